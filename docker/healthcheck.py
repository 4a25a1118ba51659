"""Health check of a container: exit 0 when CATO can serve tasks, else 1 with the reason.

`CATO_URL` is CATO's URL; the default is http://127.0.0.1:8000.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 5


def main() -> int:
    url = os.environ.get("CATO_URL", "http://127.0.0.1:8000").rstrip("/") + "/readyz"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S):
            return 0
    except urllib.error.HTTPError as error:
        print(f"{url}: {error.code} {error.read(500).decode(errors='replace')}")
    except (OSError, ValueError) as error:
        print(f"{url}: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
