"""Growing forests of output lengths in a process of its own, whose memory ends with it.

scikit-learn takes 130 MB where it is imported, and what fits leave behind grows with every one. The
Profiler lives as long as its deployment, so it does not import it.

    python -m cato.control.fitting      # reads a pickled task, writes the pickled lengths
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

from cato.estimators.output_lengths import MIN_FOREST_SAMPLES, Due, OutputLengths, refitted

# A forest takes a tenth of a second, the imports two; on a busy host ten times that.
LIMIT_S = 120.0
# Whom nobody waits for gives way.
NICENESS = 10


def needs_forest(due: Due) -> bool:
    """Whether a key of `due` has enough samples for a forest."""
    return any(len(samples) >= MIN_FOREST_SAMPLES for samples, _ in due.values())


def refitted_apart(lengths: OutputLengths, due: Due, version: int, seed: int) -> OutputLengths:
    """As `refitted`, in a process of its own. Blocks; raise `OSError` or `SubprocessError` when
    that process fails."""
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps((due, version, seed)),
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
    os.dup2(2, 1)  # what libraries print is no part of the answer
    due, version, seed = pickle.load(sys.stdin.buffer)
    with answer:
        pickle.dump(refitted(OutputLengths(), due, version, seed), answer)


if __name__ == "__main__":
    main()
