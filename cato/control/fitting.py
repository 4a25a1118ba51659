"""Fit forests of output lengths in a subprocess, so that their memory is freed with it.

Importing scikit-learn takes 130 MB, and every fit leaves more behind. The Profiler lives as long as
its deployment, so it does not import it.

    python -m cato.control.fitting      # reads a pickled task, writes the pickled lengths
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

from cato.estimators.output_lengths import (
    MIN_FOREST_SAMPLES,
    Due,
    Key,
    OutputLengths,
    Taken,
    refitted,
)

# A key with a forest takes up to half a second, the imports two; several times that on a busy host.
MOST_KEYS, LIMIT_S = 30, 120.0
# No request waits for a fit, so it yields the CPU.
NICENESS = 10


def needs_forest(due: Due) -> bool:
    """Whether a key of `due` has enough samples for a forest."""
    return any(seen >= MIN_FOREST_SAMPLES for seen in due.values())


def has_first_forest(due: Due, lengths: OutputLengths) -> bool:
    """Whether a key of `due` has enough samples for a forest, and had not when `lengths` was
    fitted."""
    return any(
        seen >= MIN_FOREST_SAMPLES
        and (key not in lengths.keys or lengths.keys[key].seen < MIN_FOREST_SAMPLES)
        for key, seen in due.items()
    )


def most_urgent(due: Due, lengths: OutputLengths) -> Due:
    """The keys of `due` for the next fit, which must end within its limit: those that have grown
    most since `lengths` was fitted, new ones first. The others stay due."""

    def share_known(key: Key) -> float:
        return lengths.keys[key].seen / due[key] if key in lengths.keys else 0.0

    return {key: due[key] for key in sorted(due, key=share_known)[:MOST_KEYS]}


def refitted_apart(lengths: OutputLengths, taken: Taken, version: int, seed: int) -> OutputLengths:
    """`refitted` in a subprocess. Blocks; raise `OSError` or `SubprocessError` when the
    subprocess fails."""
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps((taken, version, seed)),
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        timeout=LIMIT_S,
        check=True,
    )
    fresh: OutputLengths = pickle.loads(done.stdout)
    return OutputLengths(version, {**lengths.keys, **fresh.keys})


def main() -> None:
    os.nice(NICENESS)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep library output out of the answer
    taken, version, seed = pickle.load(sys.stdin.buffer)
    with answer:
        pickle.dump(refitted(OutputLengths(), taken, version, seed), answer)


if __name__ == "__main__":
    main()
