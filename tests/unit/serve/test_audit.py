"""What the audit says of pip-audit's reports: no old one counts, and every list is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HOLE = {"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2"]}]}


def report(folder: Path, *names: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / ".ci" / "audit_report.py"), *names]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_a_hole_of_any_list_fails_and_a_list_without_a_report_is_said(tmp_path: Path) -> None:
    build = tmp_path / "build"
    build.mkdir()
    clean = {"dependencies": [HOLE | {"vulns": []}]}
    (build / "audit-installed.json").write_text(json.dumps(clean))
    names = ("installed", "docker/requirements/cpu.txt")
    code, said = report(tmp_path, *names)
    assert code == 0
    assert "installed: 1 of 1 checked, 0 known vulnerabilities" in said
    assert "docker/requirements/cpu.txt: nothing was checked" in said
    (build / "audit-cpu.json").write_text(json.dumps({"dependencies": [HOLE]}))
    code, said = report(tmp_path, *names)
    assert code == 1
    assert "docker/requirements/cpu.txt: a 1: PYSEC-1, fixed in 2" in said


def test_earlier_results_are_removed_before_anything_is_asked() -> None:
    script = (ROOT / ".ci" / "audit").read_text()
    assert script.index('rm -f "$bill" build/audit*.json') < script.index('pip-audit" ]')
    assert "docker/requirements/*.txt" in script
