"""Clients from npm, unmodified and with the configurations of `deployments/clients/`.

Each has one conversation or completion with CATO on real vLLM; what it shows to its user, and the
receipt of the request, say that it was answered.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.live.clients.conftest import CAP_TOKENS, CHAT_TOKENS, Cato, Shell
from tests.live.clients.installed import HERE, npm_folder

pytestmark = [pytest.mark.live, pytest.mark.vllm, pytest.mark.timeout(1800)]
SAID = "Read a file."


@pytest.fixture(scope="session")
def modules() -> Path:
    return npm_folder() / "node_modules"


def script(name: str, shell: Shell, modules: Path, served: Cato, *argv: str | Path) -> Any:
    """What a script of this folder prints; it finds the packages as if it lay beside them."""
    (shell.home / "node_modules").symlink_to(modules)
    path = shell.write(name, (HERE / name).read_text())
    done = shell.run("node", path, *argv, CATO_URL=served.url, CATO_API_KEY=served.key)
    return json.loads(done.stdout.splitlines()[-1])


def test_openais_sdk_for_javascript(served: Cato, shell: Shell, modules: Path) -> None:
    said = script("openai.mjs", shell, modules, served)
    assert {"demo-coder", "cato-auto", "cato-completion"} <= set(said["models"])
    assert said["completion"].strip()
    assert said["streamed"].strip()
    assert said["chunks"] > 2
    assert said["chat"]
    assert 0 < said["usage"]["completion_tokens"] <= CAP_TOKENS
    assert said["responses"][0] == "response.created"
    assert said["responses"][-1] == "response.completed"
    assert said["response"]
    assert said["error"] == {"kind": "NotFoundError", "status": 404, "code": "model_not_found"}
    served.answered(
        "openai-js", "model:demo-coder", is_agent=False
    )  # the last request that was answered


def test_continues_adapters_complete_chat_and_leave(
    served: Cato, shell: Shell, modules: Path
) -> None:
    said = script("continue.mjs", shell, modules, served)
    assert said["fim"].strip()
    assert said["completion"].strip()
    assert said["chat"].strip()
    assert 0 < said["aborted"] < CHAT_TOKENS / 2
    served.answered("continue-fim", "code-completion")
    served.answered("continue-completion", "code-completion")
    served.answered("continue-chat", "model:demo-coder", is_agent=False)
    left = served.receipt("continue-abort")
    assert (left["status"], left["problem"]) == ("cancelled", "the client left")
    assert left["nodes"][0]["llm"] is None or left["nodes"][0]["llm"]["output_tokens"] < CHAT_TOKENS


def test_continues_command_line(served: Cato, shell: Shell, modules: Path) -> None:
    config = served.example("continue.yaml").replace("apiKey: none", f"apiKey: {served.key}")
    header = "headers: {X-CATO-SLA: standard"
    assert header in config
    config = config.replace(header, f"{header}, x-request-id: cn")
    file = shell.write("config.yaml", config)
    done = shell.run(modules / ".bin" / "cn", "--config", file, "-p", SAID)
    assert done.stdout.strip()
    served.answered("cn", "model:demo-coder")  # it sends its tools


DIALECTS = ("@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic")


@pytest.mark.parametrize("package", DIALECTS)
def test_opencode_in_three_dialects(
    served: Cato, shell: Shell, modules: Path, package: str
) -> None:
    config = json.loads(served.example("opencode.json"))
    provider = config["provider"]["cato"]
    request_id = f"opencode-{package.rpartition('/')[2]}"
    provider["npm"] = package
    provider["options"] |= {"apiKey": served.key, "headers": {"x-request-id": request_id}}
    shell.write("opencode.json", json.dumps(config | {"enabled_providers": ["cato"]}))
    done = shell.run(
        modules / ".bin" / "opencode",
        "run",
        "--format",
        "json",
        "--title",
        "read",
        SAID,
        OPENCODE_DISABLE_MODELS_FETCH="1",
        OPENCODE_DISABLE_AUTOUPDATE="1",
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert any(e["type"] == "text" and e["part"]["text"].strip() for e in events), done.stdout
    assert not [e for e in events if e["type"] == "error"]
    served.answered(request_id, "model:demo-coder")


def test_codex(served: Cato, shell: Shell, modules: Path) -> None:
    config = served.example("codex.toml")
    header = 'http_headers = { "X-CATO-SLA" = "standard"'
    assert header in config
    config = config.replace(header, f'{header}, "x-request-id" = "codex"')
    shell.write(".codex/config.toml", config)
    done = shell.run(
        modules / ".bin" / "codex",
        "exec",
        "--skip-git-repo-check",
        "--sandbox",
        "read-only",
        "--json",
        SAID,
        CATO_API_KEY=served.key,
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    messages = [e["item"] for e in events if e["type"] == "item.completed"]
    assert any(m["type"] == "agent_message" and m["text"].strip() for m in messages), done.stdout
    assert events[-1]["type"] == "turn.completed"
    assert events[-1]["usage"]["output_tokens"] > 0
    served.answered("codex", "model:demo-coder")


def test_tabbys_agent(served: Cato, shell: Shell, modules: Path) -> None:
    config = served.example("tabby.toml").replace('token = "none"', f'token = "{served.key}"')
    config += '\n[server.requestHeaders]\n"x-request-id" = "tabby"\n'
    shell.write(".tabby-client/agent/config.toml", config)
    items = script("tabby.mjs", shell, modules, served, modules / "tabby-agent" / "dist" / "cli.js")
    assert items
    text = items[0].get("insertText") or items[0]["textEdit"]["newText"]
    assert text.strip()
    served.answered("tabby", "code-completion")
