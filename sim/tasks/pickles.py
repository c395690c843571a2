"""Pickles of plain values and numpy arrays, read without running anything that they name."""

from __future__ import annotations

import codecs
import io
import pickle
from typing import Any

import numpy as np

_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,  # how Python 3 writes bytes for Python 2
    **{
        (module, "_reconstruct"): np.empty(0).__reduce__()[0]
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
    },
}
"""What it takes to put an array together."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not loaded") from None


def load_plain(content: bytes) -> Any:
    """The value; strings of Python 2 are read as Latin-1. Raises ValueError for anything else or anything broken."""
    try:
        return _Plain(io.BytesIO(content), encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ImportError) as error:
        raise ValueError(str(error)) from error
