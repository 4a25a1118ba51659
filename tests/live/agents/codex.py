"""Codex: `codex exec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.live.agents.agent import Call, Place, ToolAgent, call
from tests.live.agents.installed import Npm


class Codex(ToolAgent):
    name = "codex"
    title = "Codex"
    source = Npm("@openai/codex", "0.169.0", "codex")
    example = "codex.toml"
    needs = '`wire_api = "responses"`, a key (any text), the size of the context'
    endpoint = "/v1/responses"
    names_session = True
    helpers = 1

    def prepare(self, place: Place) -> None:
        tested = "model_auto_compact_token_limit = 18000\ncheck_for_update_on_startup = false\n"
        place.write(".codex/config.toml", tested + place.example(self.example))

    def argv(self, place: Place, said: str) -> Sequence[str | Path]:
        free = ("--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check")
        return ("codex", "exec", "--json", *free, said)

    def env(self, place: Place) -> Mapping[str, str]:
        return {"CATO_API_KEY": "none"}

    def rules(self) -> list[dict[str, Any]]:
        return [self.summary("last_user", "CONTEXT CHECKPOINT COMPACTION")]

    def look(self) -> Call:
        return self.shell("ls")

    def read(self, path: str) -> Call:
        return self.shell(f"cat {path}")

    def edit(self, path: str, old: str, new: str) -> Call:
        return self.shell(f"sed -i 's/{old}/{new}/' {path}")

    def write(self, path: str, text: str) -> Call:
        return self.shell(f"cat > {path} <<'END'\n{text}END")

    def shell(self, command: str) -> Call:
        return call("exec_command", cmd=command)

    def helper(self, task: str) -> Call:
        # As vLLM names a tool of a namespace to the model.
        return call("multi_agent_v1__spawn_agent", message=task)
