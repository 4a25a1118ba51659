"""Starts a Ray on this machine, and on it what a deployment file says, until SIGINT.

    python -P -m cato.serve.own_ray FILE      # started by `cato serve`

As `serve run --address local`, with two differences. Ray's dashboard is left out: a dozen processes
that nothing of CATO asks. And Ray is started again if it did not come up: on a busy machine one
start in sixty fails, as its raylet waits 20 s for the agent beside it.
"""

from __future__ import annotations

import sys
import traceback

import psutil
import ray
from ray.serve.scripts import cli

from cato.serve.keeper import kill

TRIES = 3


def start_ray() -> None:
    """Raise what Ray raises when the last try fails."""
    for tries_left in reversed(range(TRIES)):
        try:
            ray.init(address="local", namespace="serve", include_dashboard=False)
        except Exception:  # Ray raises nothing narrower
            if not tries_left:
                raise
            traceback.print_exc()
            ray.shutdown()
            kill(psutil.Process().children(recursive=True))
        else:
            return


def main() -> None:
    (file,) = sys.argv[1:]
    start_ray()
    cli(["run", file])


if __name__ == "__main__":
    main()
