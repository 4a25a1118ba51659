"""aider: a person's lines, typed one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.live.agents.agent import NOTES_TEXT, TABLES, Agent, Place, Step, table, title
from tests.live.agents.installed import Pip


class Aider(Agent):
    name = "aider"
    title = "aider"
    source = Pip("aider-chat", "0.86.2", "aider")
    example = "aider.conf.yml"
    needs = "`edit-format: diff`"
    endpoint = "/v1/chat/completions"
    appends = False  # it shows the files' present text late in the prompt

    def prepare(self, place: Place) -> None:
        place.write(".aider.conf.yml", place.example(self.example))

    def argv(self, place: Place, said: str) -> Sequence[str | Path]:
        quiet = ("--no-check-update", "--analytics-disable", "--no-fancy-input", "--no-pretty")
        own = ("--yes-always", "--no-gitignore", "--max-chat-history-tokens", "500")
        return ("aider", *quiet, *own, "app.py", "lib3.py")

    def env(self, place: Place) -> Mapping[str, str]:
        name = {f"GIT_{who}_{what}": "toy" for who in ("AUTHOR", "COMMITTER") for what in ("NAME",)}
        mail = {f"GIT_{who}_EMAIL": "toy@localhost" for who in ("AUTHOR", "COMMITTER")}
        return {"LITELLM_LOCAL_MODEL_COST_MAP": "True", **name, **mail}

    def said(self, job: str, place: Place) -> str:
        turns = range(len(self._turns(job)))
        lines = [f"Turn {i}. [script: aider-{job}-{i} repo={place.repo}]\n" for i in turns]
        return "".join([*lines, "/exit\n"])

    def typed(self, said: str) -> str:
        return said

    def steps(self) -> dict[str, list[Step]]:
        jobs = ("work", "tables")
        return {
            f"aider-{job}-{i}": [step] for job in jobs for i, step in enumerate(self._turns(job))
        }

    def _turns(self, job: str) -> list[Step]:
        """One for each line that is typed: the marks of earlier lines stay in the prompt."""
        if job == "tables":
            long = [{"text": f"Table {i}: {table(i) * 8}"} for i in range(TABLES)]
            return [*long, {"text": _edit("after.py", "", "AFTER = 1\n")}, {"text": "Done."}]
        return [
            {"text": "I look at the files."},
            {"text": "Now the application."},
            {
                "text": _edit(
                    "app.py", '    return "hello " + name\n', '    return "Hello, " + name\n'
                )
            },
            {"text": "A table of numbers."},
            {"text": "I read the readme."},
            {"text": f"{NOTES_TEXT}\n\n" + _edit("notes.py", "", "NOTES = 1\n")},
            {"text": _edit("lib3.py", "    return 3\n", "    return 33\n"), "fault": "dies"},
            {"text": "I run it.", "fault": "refuses"},
            {"text": "What has changed?"},
            {"text": "Done: the greeting, the notes and the third library."},
        ]

    def rules(self) -> list[dict[str, Any]]:
        summary = {"text": "I asked you for tables, and you made them."}
        return [
            title("aider", "concise, one-line Git commit messages", "feat: change the toy"),
            {
                "name": "aider-summary",
                "where": "system",
                "pattern": "[Ss]ummarize this partial conversation",
                "step": summary,
            },
        ]


def _edit(path: str, old: str, new: str) -> str:
    marks = ("<<<<<<< SEARCH\n", "=======\n", ">>>>>>> REPLACE\n")
    return f"{path}\n```python\n{marks[0]}{old}{marks[1]}{new}{marks[2]}```\n"
