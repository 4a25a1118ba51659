"""An agent of another project: how it is run without a person, and what its script calls."""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tests.live.agents.installed import Npm, Pip, node_folder, program

EXAMPLES = Path(__file__).resolve().parents[3] / "deployments" / "clients"
# Where every example says that CATO is.
EXAMPLE_URL = "http://127.0.0.1:8000"
# Clients start slowly on a busy machine, and wait for what they are told to.
AGENT_S = 240
NOWHERE = "http://127.0.0.1:9"  # the discard port: refused at once

Call = dict[str, Any]
Step = dict[str, Any]
APP = '''"""A small application."""


def greet(name):
    return "hello " + name


def main():
    print(greet("world"))


if __name__ == "__main__":
    main()
'''
BEFORE = {
    "app.py": APP,
    **{f"lib{i}.py": f"def f{i}():\n    return {i}\n" for i in (1, 2, 3)},
    "README.md": "# Toy\n",
}
# As the work of the script leaves them.
AFTER = {
    "app.py": APP.replace('"hello "', '"Hello, "'),
    "lib3.py": BEFORE["lib3.py"].replace("3\n", "33\n"),
    "notes.py": "NOTES = 1\n",
}
TABLE_ROWS = 200
TABLES = 4


@dataclass(frozen=True)
class Place:
    """Where an agent works: a home of its own, a repository, and the address of the model."""

    home: Path
    repo: Path
    url: str

    @classmethod
    def made(cls, folder: Path, url: str) -> Place:
        place = cls(folder / "home", folder / "repo", url)
        place.home.mkdir(parents=True)
        place.repo.mkdir()
        for name, text in BEFORE.items():
            (place.repo / name).write_text(text)
        who = ("-c", "user.name=toy", "-c", "user.email=toy@localhost")
        for words in (("init", "-q", "-b", "main"), ("add", "."), ("commit", "-q", "-m", "Begin")):
            subprocess.run(["git", *who, *words], cwd=place.repo, check=True)
        return place

    def write(self, path: str, text: str) -> Path:
        """A file in the home."""
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def example(self, name: str) -> str:
        """A file of `deployments/clients/`, with this address."""
        return (EXAMPLES / name).read_text().replace(EXAMPLE_URL, self.url)


@dataclass(frozen=True)
class Ran:
    """What a run of a program left."""

    status: int
    stdout: str
    stderr: str

    def __str__(self) -> str:
        return f"status {self.status}\n{self.stdout[-4000:]}\n{self.stderr[-4000:]}"


class Agent(ABC):
    """One client. Its file in `deployments/clients/` is used as a user would."""

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[Npm | Pip]
    example: ClassVar[str]
    needs: ClassVar[str]
    """What a user must set; a cell of the table."""
    endpoint: ClassVar[str]
    names_session: ClassVar[bool] = False
    """Whether it says itself which requests belong together."""
    appends: ClassVar[bool] = True
    """Whether each prompt of its main loop begins with the one before."""
    helpers: ClassVar[int] = 0
    """How many sub-agents its script starts at once."""
    kept: ClassVar[int] = 0
    """Turns that it keeps behind a summary."""

    @abstractmethod
    def prepare(self, place: Place) -> None:
        """Write its configuration."""

    @abstractmethod
    def argv(self, place: Place, said: str) -> Sequence[str | Path]: ...

    def env(self, place: Place) -> Mapping[str, str]:
        return {}

    def said(self, job: str, place: Place) -> str:
        """The task of a job: `work` or `tables`."""
        return f"Improve the toy. [script: {self.name}-{job} repo={place.repo}]"

    def typed(self, said: str) -> str:
        """What is typed into it; nothing for those that take their task as an argument."""
        return ""

    # Of its script

    @abstractmethod
    def steps(self) -> dict[str, list[Step]]:
        """By name of the script; the names begin with the agent's."""

    def rules(self) -> list[dict[str, Any]]:
        return []

    def program(self) -> Path:
        return program(self.source)

    def run(self, place: Place, said: str) -> Ran:
        env = {
            "PATH": f"{node_folder()}{os.pathsep}{self.program().parent}{os.pathsep}"
            + os.environ["PATH"],
            "HOME": str(place.home),
            "HTTP_PROXY": NOWHERE,
            "HTTPS_PROXY": NOWHERE,
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            "NO_COLOR": "1",
            "CI": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.env(place),
        }
        done = subprocess.run(
            [str(word) for word in self.argv(place, said)],
            cwd=place.repo,
            env=env,
            input=self.typed(said),
            capture_output=True,
            text=True,
            timeout=AGENT_S,
        )
        return Ran(done.returncode, done.stdout, done.stderr)


def call(name: str, **arguments: object) -> Call:
    return {"name": name, "arguments": arguments}


def table(number: int) -> str:
    """A command that prints many tokens."""
    first = number * TABLE_ROWS
    row = "def g%d(x): return x + %d  # value of the table at this place"
    rows = f"range({first}, {first + TABLE_ROWS})"
    return f"python3 -c \"[print('{row}' % (i, i * 7919 % 10007)) for i in {rows}]\""


NOTES_TEXT = "I write the notes."
"""The stream of this answer is cut on its way to the client."""


class ToolAgent(Agent):
    """An agent that works by calls of tools: ten turns with tools, and a job that needs a
    summary."""

    @abstractmethod
    def look(self) -> Call: ...

    @abstractmethod
    def read(self, path: str) -> Call: ...

    @abstractmethod
    def edit(self, path: str, old: str, new: str) -> Call: ...

    @abstractmethod
    def write(self, path: str, text: str) -> Call: ...

    @abstractmethod
    def shell(self, command: str) -> Call: ...

    def helper(self, task: str) -> Call:
        """Starts a sub-agent; only for agents with helpers."""
        raise NotImplementedError(task)

    def steps(self) -> dict[str, list[Step]]:
        mark = f"[script: {self.name}-helper repo=$repo]"
        asked = [self.helper(f"Read part {i} of it. {mark}") for i in range(self.helpers)]
        after = {"text": "I write what was done.", "calls": [self._after()]}
        return {
            f"{self.name}-work": [
                {
                    "thinking": "First I look at what is there.",
                    "text": "I look at the files.",
                    "calls": [self.look()],
                },
                {"text": "Now the application.", "calls": [self.read("$repo/app.py")]},
                {
                    "text": "All libraries at once.",
                    "calls": [self.read(f"$repo/lib{i}.py") for i in (1, 2, 3)],
                },
                {
                    "thinking": "The greeting needs a capital.",
                    "calls": [self.edit("$repo/app.py", '"hello "', '"Hello, "')],
                },
                {"text": "A table of numbers.", "calls": [self.shell(table(0))]},
                {"text": "Somebody reads the readme.", "calls": asked}
                if asked
                else {"text": "I read the readme.", "calls": [self.read("$repo/README.md")]},
                {"text": NOTES_TEXT, "calls": [self.write("$repo/notes.py", "NOTES = 1\n")]},
                {
                    "text": "The third library returns another number.",
                    "calls": [self.edit("$repo/lib3.py", "return 3", "return 33")],
                    "fault": "dies",
                },
                {
                    "text": "I run it.",
                    "calls": [self.shell("python3 app.py")],
                    "fault": "refuses",
                },
                {"text": "What has changed?", "calls": [self.shell("git status --short")]},
                {"text": "Done: the greeting, the notes and the third library."},
            ],
            f"{self.name}-helper": [
                {"text": "I read it.", "calls": [self.read("$repo/README.md")]},
                {"text": "The readme says Toy."},
            ],
            f"{self.name}-tables": [
                {"text": f"Table {i}.", "calls": [self.shell(table(i))]} for i in range(TABLES)
            ]
            + [{"text": "All tables fit."}],
            f"{self.name}-after": [{"text": "Kept."}] * self.kept
            + [after, {"text": "Done after the summary."}],
        }

    def _after(self) -> Call:
        return self.write("$repo/after.py", "AFTER = 1\n")

    def summary(self, where: str, pattern: str, text: str = "{}") -> dict[str, Any]:
        """The rule that answers a request for a summary."""
        said = text.format(f"We made tables. [script: {self.name}-after repo=$repo]")
        return {
            "name": f"{self.name}-summary",
            "where": where,
            "pattern": pattern,
            "step": {"text": said},
        }


def title(name: str, pattern: str, text: str = "A toy") -> dict[str, Any]:
    return {"name": f"{name}-title", "where": "system", "pattern": pattern, "step": {"text": text}}
