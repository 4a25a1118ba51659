"""Qwen Code: `qwen -p`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.live.agents.agent import Call, Place, ToolAgent, call
from tests.live.agents.installed import Npm


class Qwen(ToolAgent):
    name = "qwen"
    title = "Qwen Code"
    source = Npm("@qwen-code/qwen-code", "0.24.4", "qwen")
    example = "qwen-code.json"
    needs = "node 22, a provider with the size of the context"
    endpoint = "/v1/chat/completions"
    helpers = 2
    kept = 1

    def prepare(self, place: Place) -> None:
        config = json.loads(place.example(self.example))
        # It keeps 33,000 tokens free: a summary at 32,000.
        provider = config["modelProviders"]["openai"][0]
        provider["generationConfig"]["contextWindowSize"] = 65_000
        tested = {
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"enableAutoUpdate": False},
        }
        place.write(".qwen/settings.json", json.dumps(config | tested))

    def argv(self, place: Place, said: str) -> Sequence[str | Path]:
        return ("qwen", "-y", "-p", said)

    def env(self, place: Place) -> Mapping[str, str]:
        return {"CATO_API_KEY": "none"}

    def rules(self) -> list[dict[str, Any]]:
        text = "<state_snapshot>{}</state_snapshot>"
        return [self.summary("last_user", "<state_snapshot> XML", text)]

    def look(self) -> Call:
        return call("glob", pattern="*")

    def read(self, path: str) -> Call:
        return call("read_file", file_path=path)

    def edit(self, path: str, old: str, new: str) -> Call:
        return call("edit", file_path=path, old_string=old, new_string=new)

    def write(self, path: str, text: str) -> Call:
        return call("write_file", file_path=path, content=text)

    def shell(self, command: str) -> Call:
        return call("run_shell_command", command=command, is_background=False)

    def helper(self, task: str) -> Call:
        kind = {"subagent_type": "general-purpose", "run_in_background": False}
        return call("agent", description="Read", prompt=task, **kind)
