"""Claude Code: `claude -p`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.live.agents.agent import Call, Place, Step, ToolAgent, call
from tests.live.agents.installed import Npm


class Claude(ToolAgent):
    name = "claude"
    title = "Claude Code"
    source = Npm("@anthropic-ai/claude-code", "2.1.330", "claude")
    example = "claude-code.sh"
    needs = "`ANTHROPIC_BASE_URL`, a token (any text), model names"
    endpoint = "/v1/messages"
    names_session = True
    helpers = 2
    kept = 1

    def prepare(self, place: Place) -> None:
        place.write("claude-code.sh", place.example(self.example))

    def argv(self, place: Place, said: str) -> Sequence[str | Path]:
        script = place.home / "claude-code.sh"
        return ("sh", script, "-p", "--dangerously-skip-permissions", said)

    def env(self, place: Place) -> Mapping[str, str]:
        return {
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "IS_SANDBOX": "1",  # else it does not skip permissions for root
            # A summary at 30 % of the least window that it takes, less the room for an answer.
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000",
            "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "30",
        }

    def rules(self) -> list[dict[str, Any]]:
        pattern = "an <analysis> block followed by a <summary> block"
        return [self.summary("last_user", pattern, "<summary>{}</summary>")]

    def steps(self) -> dict[str, list[Step]]:
        """Beside the others' steps it loads a tool that it knows by name only."""
        steps = super().steps()
        load = call("ToolSearch", query="select:WebFetch", max_results=1)
        steps["claude-work"].insert(5, {"text": "I may need the web.", "calls": [load]})
        return steps

    def look(self) -> Call:
        return self.shell("ls")

    def read(self, path: str) -> Call:
        return call("Read", file_path=path)

    def edit(self, path: str, old: str, new: str) -> Call:
        return call("Edit", file_path=path, old_string=old, new_string=new)

    def write(self, path: str, text: str) -> Call:
        return call("Write", file_path=path, content=text)

    def shell(self, command: str) -> Call:
        return call("Bash", command=command, description="Run it")

    def helper(self, task: str) -> Call:
        return call(
            "Agent",
            description="Read",
            prompt=task,
            subagent_type="general-purpose",
            model="sonnet",  # as models do: the file must say which one that is
        )
