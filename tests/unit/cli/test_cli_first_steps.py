"""What a newcomer tries first: version, check, the bare address, and finding what runs here."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from ingress_kit import COMPLETION, a_fast_pool, running
from typer.testing import CliRunner, Result

import cato
from cato.cli import app, main
from cato.cli.client import DEFAULT_URL, _served
from cato.cli.cluster import served_here
from cato.cli.serve import log_path_of
from cato.config.lines import with_lines
from cato.config.yaml_file import MAX_FILE_BYTES
from cato.core.errors import Problem
from cato.serve import served
from cato.serve.keeper import new_mark
from cato.serve.served import Served

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_the_version_is_told() -> None:
    assert run("--version").output == f"cato {cato.__version__}\n"


# Checking a file


@pytest.mark.parametrize("name", [p.name for p in (ROOT / "deployments").glob("*.yaml")])
def test_every_shipped_deployment_passes_its_check(name: str) -> None:
    result = run("check", f"deployments/{name}")
    assert result.exit_code == 0, result.output
    assert "no problems" in result.output


def test_each_problem_of_a_deployment_file_has_its_line(tmp_path: Path) -> None:
    text = (ROOT / "deployments" / "local-cpu.yaml").read_text(encoding="utf-8")
    text = text.replace("model: demo-coder", "model: demo-code").replace("cpus: 1", "cpu: 1")
    path = tmp_path / "deployment.yaml"
    path.write_text(text, encoding="utf-8")
    result = run("check", str(path))
    assert result.exit_code == 2
    lines = {p.partition("deployment.yaml:")[2].split(":")[0] for p in result.output.splitlines()}
    wanted = {
        str(number)
        for number, line in enumerate(text.splitlines(), 1)
        if "model: demo-code" in line or "cpu: 1" in line
    }
    assert len(wanted) == 2
    assert wanted <= lines, result.output


def test_a_model_that_a_workflow_names_and_the_deployment_lacks_is_a_problem(
    tmp_path: Path,
) -> None:
    config = yaml.safe_load((ROOT / "deployments" / "local-cpu.yaml").read_text(encoding="utf-8"))
    engines = config["applications"][0]["args"]
    engines["models"]["demo-coder"]["aliases"].remove("coder-fast")
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    result = run("check", str(path))
    assert result.exit_code == 2
    assert re.search(
        r"code-completion\.yaml:\d+: nodes\.complete\.model: .*'coder-fast'", result.output
    )


def test_workflows_are_checked_against_the_models_of_a_deployment() -> None:
    known = run("workflows", "check", "workflows", "--deployment", "deployments/simulated.yaml")
    assert known.exit_code == 0, known.output
    others = run("workflows", "check", "workflows", "--deployment", "deployments/bench/saber.yaml")
    assert others.exit_code == 1
    assert "no model 'coder-fast'" in others.output
    assert "no index 'code'" in others.output


def test_a_path_with_dots_in_its_names_is_found_and_an_unknown_one_keeps_its_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("models:\n  qwen-1.5b:\n    source: x\n  list: [a,\n    {b: 1}]\n")
    places = (
        "models.qwen-1.5b.source",
        "models.list[1].b",
        "models.qwen-1.5b.missing",
        "pools",
        "",
    )
    found = with_lines([Problem(str(path), place, "", "") for place in places])
    assert [p.file.removeprefix(str(path)) for p in found] == [":3", ":5", ":2", "", ""]


# The bare address


def test_a_file_above_the_size_limit_is_not_parsed_for_lines(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("a: 1\n" + f"# {'x' * 98}\n" * (MAX_FILE_BYTES // 100), encoding="utf-8")
    problem = Problem(str(path), "a", "", "wrong")
    assert with_lines([problem]) == (problem,)
    path.write_text("a: 1\n", encoding="utf-8")
    assert with_lines([problem])[0].file == f"{path}:1"


async def test_the_bare_address_leads_to_the_status_page_and_docs_show_every_path(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        root = await http.get("/")
        page = await http.get(root.headers["location"])
        api = await http.get("/docs")
        document = (await http.get("/openapi.json")).json()
    assert root.is_redirect
    assert "<title>CATO status</title>" in page.text
    assert all(f" {path}</span>" in api.text for path in document["paths"])
    assert not re.search(r"(src|href)=\"(https?:)?//", api.text)
    assert "<script" not in api.text


# Finding what runs here


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CATO_RUN_DIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def test_commands_find_the_newest_cato_serve_of_this_host(run_dir: Path) -> None:
    older = Served(f"{os.getppid()}:{psutil.Process(os.getppid()).create_time()}", "u1", "f", "a:1")
    newer = Served(new_mark(), "http://127.0.0.1:9000", "g", "a:2")
    for one in (older, newer):
        served.record(run_dir, one)
    assert served_here() == newer
    assert served_here("a:1") == older
    assert _served() == newer.url
    served.forget(run_dir, newer.mark)
    assert served_here() == older


@pytest.mark.parametrize("words", [("top", "--once"), ("explain", "x"), ("keys", "list")])
def test_a_run_folder_that_cannot_be_used_ends_a_command_with_its_problem(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    run_dir.chmod(0o777)
    for variable in ("CATO_STORE", "CATO_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "argv", ["cato", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert "other users can write to it" in shown
    assert "Traceback" not in shown


def test_the_one_on_the_default_port_is_found_at_any_address(run_dir: Path) -> None:
    parent = psutil.Process(os.getppid())
    mark = f"{parent.pid}:{parent.create_time()}"
    served.record(run_dir, Served(mark, "http://0.0.0.0:8000", "f", "a:1"))
    served.record(run_dir, Served(new_mark(), "http://127.0.0.1:9000", "g", "a:2"))
    assert _served() == "http://0.0.0.0:8000"


@pytest.mark.parametrize("variable", ["", "CATO_URL"])
def test_a_url_that_was_given_is_never_replaced(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    served.record(run_dir, Served(new_mark(), "http://127.0.0.1:9000", "f", "a:1"))
    asked: list[str] = []

    def refuse(transport: object, request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url.copy_with(path="/")))
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", refuse)
    monkeypatch.delenv("CATO_URL", raising=False)
    if variable:
        monkeypatch.setenv(variable, DEFAULT_URL)
    run("top", "--once", *(() if variable else ("--url", DEFAULT_URL)))
    monkeypatch.delenv("CATO_URL", raising=False)
    run("top", "--once")
    assert asked == [f"{DEFAULT_URL}/", "http://127.0.0.1:9000/"]


def test_each_cato_serve_of_a_user_has_its_own_log(run_dir: Path) -> None:
    assert log_path_of("http://127.0.0.1:8000") == run_dir / "serve-8000.log"
    assert log_path_of("http://[::1]:9000") == run_dir / "serve-9000.log"


def test_a_named_cluster_is_not_replaced_by_the_one_that_runs_here(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.record(run_dir, Served(new_mark(), "u", "f", "a:1"))
    assert served_here("b:1") is None
    monkeypatch.setenv("RAY_ADDRESS", "b:1")
    assert served_here() is None


def test_a_killed_cato_serve_is_forgotten(run_dir: Path) -> None:
    served.record(run_dir, Served("999999999:1.0", "u", "f", "a:1"))
    assert served_here() is None
    assert list(run_dir.iterdir()) == []
    assert _served() == DEFAULT_URL
