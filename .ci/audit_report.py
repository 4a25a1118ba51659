"""Prints pip-audit's reports for each name or requirements file; exit code 1 for a vulnerability.

audit_report.py installed docker/requirements/cpu.txt ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(names: list[str], folder: Path = Path("build")) -> int:
    holes = 0
    for name in names:
        path = folder / f"audit-{Path(name).stem}.json"
        packages = json.loads(path.read_text())["dependencies"] if path.exists() else []
        compared = [p for p in packages if "skip_reason" not in p]
        found = [(p, hole) for p in compared for hole in p["vulns"]]
        for package, hole in found:
            fixed = ", ".join(hole["fix_versions"]) or "no version yet"
            print(f"{name}: {package['name']} {package['version']}: {hole['id']}, fixed in {fixed}")
        print(
            f"audit: {name}: {len(compared)} of {len(packages)} checked, "
            f"{len(found)} known vulnerabilities"
        )
        if not compared:
            print(f"audit: {name}: nothing was checked (see {path.with_suffix('.log')})")
        holes += len(found)
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
