#!/usr/bin/env python
"""Install packages as `pip install ARG ...` does, with uv: in a third of the time.

uv does not read pip's settings. They are handed over here, so that an index or a certificate of
one's own needs to be set only once. What uv cannot install, pip tries with all of its settings.
"""

import ast
import os
import subprocess
import sys

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
}
COMMAS = ("UV_FIND_LINKS",)  # between the values of one; others have spaces
PLACES = ("global", "install", ":env:")  # the later ones count


def of_pip(listed: str) -> dict[str, str]:
    """uv's variables for what `pip config list` says."""
    lines = [line.partition("=") for line in listed.splitlines() if "=" in line]
    found = {}
    for place in PLACES:
        for key, _, value in lines:
            name = SETTINGS.get(key.removeprefix(f"{place}."))
            if name is not None:
                values = str(ast.literal_eval(value)).split()
                found[name] = ("," if name in COMMAS else " ").join(values)
    return found


def main() -> int:
    subprocess.run([*PIP, "install", "-q", "uv"], check=True)
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True)
    # As pip: the best version of all indexes, not of the first that has the package.
    env = {"UV_INDEX_STRATEGY": "unsafe-best-match", **of_pip(listed.stdout), **os.environ}
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    if subprocess.run([*uv, *sys.argv[1:]], env=env).returncode == 0:
        return 0
    print("uv could not install all; pip tries", file=sys.stderr)
    return subprocess.run([*PIP, "install", "--no-compile", *sys.argv[1:]]).returncode


if __name__ == "__main__":
    sys.exit(main())
