"""The documents: their commands work, their links lead somewhere, the reference is the code's."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ingress_kit import KeptFeedback, Kit, a_pool, an_access
from typer.testing import CliRunner

from cato.cli import app as cato_app
from cato.cli import explain, reference
from cato.lab.chaos.local_pools import LocalPools, LocalRecords
from cato.serve.ingress.app import create_app
from cato.serve.nodes.runner import NodeRunner
from cato.serve.service import TaskService
from cato.serve.workflow_files import WorkflowFiles

ROOT = Path(__file__).parents[3]
TUTORIAL = ROOT / "workflows" / "README.md"
REFERENCE = ROOT / "cato" / "cli" / "REFERENCE.md"
REASONS = ROOT / "cato" / "policies" / "REASONS.md"
URL = "http://127.0.0.1:8000"
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.timeout(300)
async def test_every_command_of_the_tutorial_works(tmp_path: Path) -> None:
    """Against the ingress itself with simulated engines, in one shell as a reader would."""
    folder = tmp_path / "workflows"
    shutil.copytree(ROOT / "workflows", folder)
    (folder / "code-review.yaml").unlink(missing_ok=True)
    blocks = BLOCK.findall(TUTORIAL.read_text(encoding="utf-8"))
    assert len(blocks) == 6
    files = WorkflowFiles(folder)
    pool = a_pool("sim", "coder-fast", "coder-large", "coder-review")
    async with LocalPools(pool) as pools:
        records = LocalRecords(pools)
        service = TaskService(files.workflows, pools, NodeRunner({}), records, seed=1)
        app = create_app(
            service, max_body_bytes=100_000, ready=lambda: (True, ""), access=an_access()
        )
        follow = files.follow(lambda: service.follow(files.workflows, files.problem))
        following = asyncio.create_task(follow)
        async with Kit(service, records, app, KeptFeedback()).server() as url:
            script = "set -euo pipefail\n" + "\n".join(blocks).replace(URL, url)
            shell = await asyncio.create_subprocess_exec(
                "bash", "-c", script,
                cwd=tmp_path,
                env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                     "CATO_URL": url},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            output = (await shell.communicate())[0].decode()
        following.cancel()
    assert shell.returncode == 0, output
    assert "replicas ready" in output, "cato top"
    assert "tutorial-1" in output, "cato explain"
    assert "code-review: 2 nodes, ttft 2000 ms" in output, "cato workflows check"
    receipt = records.receipts["", "tutorial-2"]
    assert [n.node for n in receipt.nodes] == ["parts", "review"]
    assert receipt.status == "done"
    assert receipt.target_s == 2
    assert service.workflow_problem == ""


def test_the_reference_is_what_the_code_says() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == reference.text(), (
        "run `python -m cato.cli.reference`"
    )


def test_the_reference_has_the_defaults_of_options() -> None:
    rows = reference.text().splitlines()
    for row in (
        "| `--cells` | `0` | Random cells of",
        "| `--seeds` | 10, or the scenario's |",
        "| `--transport`, `--no-transport` | `--transport` |",
        "| `--source` | required |",
        "| `--yes`, `-y` |  |",
    ):
        assert any(r.startswith(row) for r in rows), row


def test_the_receipt_in_the_readme_ends_as_the_code_prints_it() -> None:
    times = {
        "e2e_s": 0.5805,
        "queue_s": 3e-4,
        "overhead_s": 1e-4,
        "ttft_s": 0.0654,
        "tpot_s": 0.0082,
    }
    last = str(explain._totals({**times, "output_tokens": 64}))
    assert last in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_folder_for_editing_has_no_dead_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cato_app, ["init", "my cato"])
    assert result.exit_code == 0, result.output
    assert "cd 'my cato'\n" in result.output
    documents = list((tmp_path / "my cato").rglob("*.md"))
    assert len(documents) >= 4
    for document in documents:
        for target in LINK.findall(document.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                found = (document.parent / target).resolve()
                assert found.exists(), f"{document}: {target}"
                assert found.is_relative_to(tmp_path / "my cato")
    monitoring = tmp_path / "my cato" / "deployments" / "monitoring" / "README.md"
    assert "`cato/telemetry/README.md` of CATO's sources explains" in monitoring.read_text()
    (tmp_path / "my cato" / "workflows" / "README.md").unlink()
    again = CliRunner().invoke(cato_app, ["init", "my cato"])
    assert "wrote 1 file\n" in again.output


def test_a_file_that_a_full_disk_cut_off_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = shutil.copyfile

    def cut_off(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", cut_off)
    result = CliRunner().invoke(cato_app, ["init", str(tmp_path)])
    assert result.exit_code == 1
    assert "No space left on device" in result.output
    monkeypatch.setattr(shutil, "copyfile", whole)
    again = CliRunner().invoke(cato_app, ["init", str(tmp_path)])
    assert "kept" not in again.output


@pytest.mark.parametrize(
    "document",
    [
        TUTORIAL,
        REFERENCE,
        REASONS,
        ROOT / "README.md",
        ROOT / "cato/policies/README.md",
        ROOT / "cato/lab/RESULTS.md",
        ROOT / "cato/telemetry/README.md",
        ROOT / "deployments/README.md",
        ROOT / "deployments/accelerator/README.md",
        ROOT / "deployments/monitoring/README.md",
    ],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_links_lead_to_files(document: Path) -> None:
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


def test_reasons_that_are_explained_are_those_of_the_code() -> None:
    """By the words before and after their numbers."""
    code = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "cato").rglob("*.py"))
    rows = re.findall(r"^\| `([^`]+)` \|", REASONS.read_text(encoding="utf-8"), re.M)
    assert len(rows) >= 8
    for reason in rows:
        for words in re.split(r"\s*-?[\d.]+\s*", reason):
            assert words in code, reason


@pytest.mark.parametrize("page", ["0008-failure-model.md", "0009-threat-model.md"])
def test_every_threat_and_every_loss_names_a_test_that_there_is(page: str) -> None:
    lines = (ROOT / "cato/core/decisions" / page).read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    assert len(rows) > 20
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for row in rows:
        named = set(re.findall(r"`(?:tests/live/)?(test_\w+\.py)`", row))
        drills = set(re.findall(r"`(deployments/drills/[\w-]+\.yaml)`", row))
        assert named <= tests, row
        assert all((ROOT / drill).exists() for drill in drills), row
        # Nothing is promised for a lost head node.
        assert named or drills or row.startswith("| head node |"), row


# In a block, or in a sentence; what follows a pipe, a redirection or a comment is the shell's.
COMMAND = re.compile(r"(?:^ *(?:\.venv/bin/)?|`)(cato [a-z][^`\n|>#…]*)", re.MULTILINE)


def documents(folder: Path) -> Iterator[Path]:
    """Those of the checkout: not of its environment, which has far more, nor of its build."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "build" and not path.name.startswith("."):
            yield from documents(path)
        elif path.suffix == ".md":
            yield path


def commands_of(document: Path) -> list[str]:
    text = document.read_text(encoding="utf-8")
    if document == REFERENCE or document.name == "CHANGELOG.md":  # made from the code; history
        return []
    return sorted({command.strip() for command in COMMAND.findall(text)})


@pytest.mark.parametrize(
    ("document", "command"),
    [(d, c) for d in documents(ROOT) for c in commands_of(d)],
    ids=lambda value: str(value.relative_to(ROOT)) if isinstance(value, Path) else value,
)
def test_commands_in_documents_exist_with_their_options(document: Path, command: str) -> None:
    """`--help` at the end: the words are read, and nothing is done."""
    read = CliRunner().invoke(cato_app, [*shlex.split(command)[1:], "--help"])
    assert read.exit_code == 0, read.output
