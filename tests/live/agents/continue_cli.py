"""Continue's command line: `cn -p`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.live.agents.agent import Call, Place, ToolAgent, call
from tests.live.agents.installed import Npm


class Continue(ToolAgent):
    name = "cn"
    title = "Continue `cn`"
    source = Npm("@continuedev/cli", "1.5.47", "cn")
    example = "continue.yaml"
    needs = "a model with the role `chat` and the size of the context"
    endpoint = "/v1/chat/completions"
    # Its helpers need a session that `-p` does not have ("No active session found").

    def prepare(self, place: Place) -> None:
        config = yaml.safe_load(place.example(self.example))
        chat = next(m for m in config["models"] if "chat" in m["roles"])
        chat["defaultCompletionOptions"] = {"contextLength": 24_000, "maxTokens": 2000}
        place.write(".continue/config.yaml", yaml.safe_dump(config))

    def argv(self, place: Place, said: str) -> Sequence[str | Path]:
        config = place.home / ".continue" / "config.yaml"
        return ("cn", "--config", config, "--auto", "-p", said)

    def env(self, place: Place) -> Mapping[str, str]:
        return {"CONTINUE_TELEMETRY_ENABLED": "0"}

    def rules(self) -> list[dict[str, Any]]:
        return [self.summary("last_user", "provide a concise summary of our conversation")]

    def look(self) -> Call:
        return call("List", dirpath=".")

    def read(self, path: str) -> Call:
        return call("Read", filepath=path)

    def edit(self, path: str, old: str, new: str) -> Call:
        return call("Edit", file_path=path, old_string=old, new_string=new)

    def write(self, path: str, text: str) -> Call:
        return call("Write", filepath=path, content=text)

    def shell(self, command: str) -> Call:
        return call("Bash", command=command)
