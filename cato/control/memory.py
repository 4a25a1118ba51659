"""Memory of processes that live as long as their deployment."""

from __future__ import annotations

import ctypes
import gc

# New container objects before a collection of the young ones: Python's default of 700 is one small
# call's. Older ones are collected as often as by default, or memory would grow.
THRESHOLDS = (10_000, 2, 2)
# glibc's own limit at the start of a process, and the option's number in malloc.h.
LARGE_BYTES, _M_MMAP_THRESHOLD = 128 * 1024, -3


def spare_collector() -> None:
    """Stop collecting what start-up has made, and collect new objects less often.

    Imports leave 250,000 objects (Ray, FastAPI, Pydantic) that live as long as the process. To
    walk them all takes 150 ms, in which no token moves. Call this at the end of start-up.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def free_large_blocks() -> None:
    """Have every block of `LARGE_BYTES` or more go back to the system when it is freed.

    glibc raises that limit to the largest block freed so far, up to 32 MB. From then on such blocks
    come from its heap, where small objects soon split what they leave.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl and macOS have none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def give_back() -> None:
    """Return freed memory to the system, after large objects were replaced.

    glibc keeps freed arrays of some megabytes in its heap, where small objects soon split them, so
    that each replacement needs more. Takes milliseconds: call it in a thread.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl and macOS have none
    if trim is not None:
        trim(0)
