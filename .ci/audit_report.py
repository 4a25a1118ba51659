"""What the reports of pip-audit say, one for each name or file of requirements; 1 for a known hole.

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
            print(
                f"{name}: {package['name']} {package['version']}: {hole['id']}, mended in {fixed}"
            )
        print(
            f"audit: {name}: {len(compared)} of {len(packages)} compared, {len(found)} known holes"
        )
        if not compared:
            print(f"audit: {name}: nothing was compared ({path.with_suffix('.log')} says why)")
        holes += len(found)
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
