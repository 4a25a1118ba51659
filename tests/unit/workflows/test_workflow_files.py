"""An edited workflow takes effect without a restart; a wrong one does not, and says why."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from pathlib import Path

import pytest
from ingress_kit import COMPLETION, GENERATION, a_fast_pool, running, until

from cato.core.errors import ConfigError
from cato.serve import workflow_files
from cato.serve.workflow_files import WorkflowFiles


def write(path: Path, text: str) -> None:
    """A later moment than that of the last write, however coarse the file system's clock is."""
    before_ns = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(before_ns + 1_000_000, before_ns + 1_000_000))


def target_s(files: WorkflowFiles) -> float:
    (workflow,) = files.workflows.values()
    return workflow.slo.target_s


def test_a_changed_target_is_taken_at_the_second_look_that_agrees(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    write(path, COMPLETION)
    files = WorkflowFiles(tmp_path)
    assert not files.look()
    write(path, COMPLETION.replace("10s", "3s"))
    assert not files.look(), "an editor may still write"
    assert files.look()
    assert target_s(files) == 3
    assert not files.look()


def test_what_an_editor_hides_beside_a_file_is_no_workflow(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", COMPLETION)
    (tmp_path / ".#a.yaml").symlink_to("user@host.123:456")  # Emacs, while the file is edited
    (tmp_path / "._a.yaml").write_bytes(b"\0\5\26\7")  # macOS, beside a copied file
    (tmp_path / "self").symlink_to(tmp_path / "self")
    files = WorkflowFiles(tmp_path)
    write(tmp_path / "a.yaml", COMPLETION.replace("10s", "3s"))
    files.look()
    assert files.look()
    assert (target_s(files), files.problem) == (3, "")


def test_a_changed_prompt_file_counts_as_a_change(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    prompt = tmp_path / "prompts" / "p.j2"
    write(prompt, "one")
    write(
        tmp_path / "a.yaml",
        GENERATION.replace('"{{ language }}: {{ instruction }}"', "prompts/p.j2"),
    )
    files = WorkflowFiles(tmp_path)
    write(prompt, "two")
    files.look()
    assert files.look()


def test_a_wrong_file_changes_nothing_and_is_named_until_it_is_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("cato"), "propagate", True)  # as before `logs.set_up`
    path = tmp_path / "a.yaml"
    write(path, COMPLETION)
    files = WorkflowFiles(tmp_path)
    write(path, COMPLETION.replace("max_tokens: 12", "max_tokens: many"))
    files.look()
    assert files.look()
    assert re.search(r"a\.yaml:\d+: nodes\.fill\.max_tokens", files.problem)
    assert files.problem in caplog.text, "operators find it in the log"
    assert target_s(files) == 10
    write(path, COMPLETION.replace("10s", "4s"))
    files.look()
    assert files.look()
    assert files.problem == ""
    assert target_s(files) == 4


def test_a_wrong_file_holds_up_no_other(tmp_path: Path) -> None:
    wrong, other = tmp_path / "a.yaml", tmp_path / "b.yaml"
    write(wrong, COMPLETION)
    write(other, GENERATION)
    files = WorkflowFiles(tmp_path)
    write(wrong, COMPLETION.replace("max_tokens: 12", "max_tokens: many"))
    write(other, GENERATION.replace("10s", "3s"))
    files.look()
    assert files.look()
    assert {name: w.slo.target_s for name, w in files.workflows.items()} == {
        "code-completion": 10,
        "code-generation": 3,
    }
    wrong.unlink()
    files.look()
    assert files.look()
    assert (list(files.workflows), files.problem) == (["code-generation"], "")


def test_a_task_that_moves_to_another_file_is_that_of_the_valid_one(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", COMPLETION)
    files = WorkflowFiles(tmp_path)
    write(tmp_path / "a.yaml", "name: [")
    write(tmp_path / "b.yaml", COMPLETION.replace("10s", "3s"))
    files.look()
    assert files.look()
    assert target_s(files) == 3


def test_an_ingress_that_starts_beside_a_wrong_file_serves_the_others(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "nonsense")
    write(tmp_path / "b.yaml", COMPLETION)
    files = WorkflowFiles(tmp_path)
    assert list(files.workflows) == ["code-completion"]
    assert "a.yaml" in files.problem


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        WorkflowFiles(tmp_path / "absent")


async def test_the_next_request_is_of_the_new_workflow_and_the_page_shows_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow_files, "POLL_S", 0.01)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        files = WorkflowFiles(tmp_path)
        follow = files.follow(lambda: kit.service.follow(files.workflows, files.problem))
        following = asyncio.create_task(follow)

        async def sla() -> str:
            answer = await http.post(
                "/v1/completions", json={"model": "cato-completion", "prompt": "a"}
            )
            return str(answer.headers["x-cato-sla"])

        assert await sla() == "ttft=10000ms"
        path = tmp_path / "0.yaml"
        write(path, COMPLETION.replace("10s", "250ms"))
        await until(
            lambda: kit.service.workflow("code-completion").slo.target_s == 0.25, within_s=5
        )
        assert await sla() == "ttft=250ms"
        write(path, "name: [")
        await until(lambda: kit.service.workflow_problem != "", within_s=5)
        assert "0.yaml" in (await http.get("/ui/state")).json()["problem"]
        assert await sla() == "ttft=250ms"
        following.cancel()


async def test_an_unexpected_error_is_shown_and_the_next_good_file_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflow_files, "POLL_S", 0.01)
    path = tmp_path / "a.yaml"
    write(path, COMPLETION)
    files = WorkflowFiles(tmp_path)
    told: list[str] = []
    following = asyncio.create_task(files.follow(lambda: told.append(files.problem)))

    def fails(_: Path) -> None:
        raise OverflowError("too large")

    with monkeypatch.context() as broken:
        broken.setattr(workflow_files, "read_workflows", fails)
        write(path, COMPLETION.replace("10s", "3s"))
        await until(lambda: len(told) == 1, within_s=5)
    assert "too large" in told[0]
    assert target_s(files) == 10
    write(path, COMPLETION.replace("10s", "4s"))
    await until(lambda: len(told) == 2, within_s=5)
    assert told[1] == ""
    assert target_s(files) == 4
    following.cancel()
