"""Memory of the control plane's processes."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# In a process of its own: it changes the collector of all of it.
CODE = """
import gc
from cato.control.memory import THRESHOLDS, spare_collector

spare_collector()
assert gc.get_freeze_count() > 1000
assert gc.get_threshold() == THRESHOLDS
before, counted = gc.get_stats()[0]["collections"], THRESHOLDS[0] // 2
kept = [[] for _ in range(counted)]
assert gc.get_stats()[0]["collections"] == before
ring = []
ring.append(ring)
del ring
assert gc.collect() > 0, "what is made later is still collected"
"""


def test_only_new_objects_are_collected_and_seldom() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


BLOCKS_CODE = """
import os
from cato.control.memory import free_large_blocks

def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

free_large_blocks()
bytes(8_000_000)  # freed at once: from here on, glibc would take smaller blocks from its heap
made, pins = [], []
for _ in range(100):
    made.append(b"x" * 1_000_000)
    pins.append(b"x" * 1_000)  # after each block
before = resident()
del made
assert resident() < before - 90_000_000, (before, resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_large_blocks_go_back_when_they_are_freed() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKS_CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


HEAP_CODE = """
import os
from cato.control.memory import give_back

def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

made = [bytes(100_000) for _ in range(1000)]
pins = [bytes(100) for _ in range(1000)]  # at the heap's end: freeing alone does not shrink it
del made
before = resident()
give_back()
assert resident() < before - 50_000_000, (before, resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_freed_memory_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", HEAP_CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
