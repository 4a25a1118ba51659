"""opencode: `opencode run`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.live.agents.agent import Call, Place, ToolAgent, call, title
from tests.live.agents.installed import Npm


class Opencode(ToolAgent):
    name = "opencode"
    title = "opencode"
    source = Npm("opencode-ai", "1.18.33", "opencode")
    example = "opencode.json"
    needs = "a provider with the model's limits"
    endpoint = "/v1/chat/completions"
    names_session = True
    helpers = 2
    kept = 1

    def prepare(self, place: Place) -> None:
        config = json.loads(place.example(self.example))
        model = config["provider"]["cato"]["models"]["cato-auto"]
        model["limit"] = {"context": 30_000, "output": 8192}
        tested = {"autoupdate": False, "share": "disabled", "permission": "allow"}
        place.write(".config/opencode/opencode.json", json.dumps(config | tested))

    def argv(self, place: Place, said: str) -> Sequence[str | Path]:
        return ("opencode", "run", "--format", "json", said)

    def env(self, place: Place) -> Mapping[str, str]:
        return {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}

    def rules(self) -> list[dict[str, Any]]:
        return [
            title(self.name, "title generator"),
            self.summary("system", "context summarization agent"),
        ]

    def look(self) -> Call:
        return call("bash", command="ls", description="List")

    def read(self, path: str) -> Call:
        return call("read", filePath=path)

    def edit(self, path: str, old: str, new: str) -> Call:
        return call("edit", filePath=path, oldString=old, newString=new)

    def write(self, path: str, text: str) -> Call:
        return call("write", filePath=path, content=text)

    def shell(self, command: str) -> Call:
        return call("bash", command=command, description="Run it")

    def helper(self, task: str) -> Call:
        return call("task", description="Read", prompt=task, subagent_type="general")
