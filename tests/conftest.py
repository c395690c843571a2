"""One thread for every process, and `tests/` on the path of the processes that tests start."""

import os
from pathlib import Path

# Before torch is loaded, here and in child processes: it takes its number of threads from these.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    path for path in (str(Path(__file__).parent), os.environ.get("PYTHONPATH")) if path
)
