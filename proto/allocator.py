"""A glibc setting for processes that move large bodies."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_large_blocks() -> bool:
    """Let malloc keep freed megabyte blocks instead of returning them to the kernel each time.

    Every gRPC message is copied into fresh memory; without this each megabyte is mapped, zeroed and
    unmapped anew. Costs freed memory that stays with the process. False where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, (1 << 31) - 1), (_M_ARENA_MAX, 1))
    return all([mallopt(name, value) for name, value in settings])
