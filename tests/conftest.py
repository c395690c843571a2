"""One thread for every process, and `tests/` on the path of the processes that tests start."""

import os
import sys
from pathlib import Path

import pytest

# Before torch is loaded, here and in child processes: it takes its number of threads from these.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    path for path in (str(Path(__file__).parent), os.environ.get("PYTHONPATH")) if path
)


@pytest.fixture(autouse=True)
def _same_models_every_time() -> None:
    """Models that a test makes without naming a stream start alike; tests without torch do not load it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
