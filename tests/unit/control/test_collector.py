"""The garbage collector of the control plane's processes."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: it changes the collector of all of it.
CODE = """
import gc
from cato.control.collector import THRESHOLDS, spare_collector

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
