"""Keeps the process's resident memory close to what it uses: glibc's allocator holds on to what loading freed."""

from __future__ import annotations

import ctypes
import sys

_M_ARENA_MAX = -8  # glibc's mallopt parameter
ARENAS = 2  # heaps that threads share; the default of 8 a core keeps a high-water mark in each


def _libc() -> ctypes.CDLL | None:
    """The C library when it is glibc, else None."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def limit_arenas() -> None:
    """Few allocator arenas. Call before threads start; does nothing where glibc is not the C library."""
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Return freed memory to the system (some milliseconds); does nothing where glibc is not the C library."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(ctypes.c_size_t(0))
