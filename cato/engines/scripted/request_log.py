"""The log of a scripted engine: a line for each request, and a file for each fault."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from cato.engines.base import EngineRequest
from cato.engines.scripted.script import Chosen
from cato.wire.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt, rendered and tokenized."""

    conversation: Conversation
    text: str
    tokens: list[int]


class Note:
    """One line of the log: a request and its answer."""

    def __init__(self, log: Path, request: EngineRequest, prompt: Prompt, chosen: Chosen) -> None:
        self._log, self._request, self._prompt, self._chosen = log, request, prompt, chosen
        self.cached_tokens = 0
        self.output_tokens = 0
        self.outcome = "left"

    def write(self) -> None:
        line = json.dumps(
            {
                "id": self._request.id,
                "engine": os.getpid(),
                "endpoint": self._request.endpoint,
                "body": self._request.body,
                "prompt": self._prompt.text,
                "prompt_tokens": len(self._prompt.tokens),
                "cached_tokens": self.cached_tokens,
                "output_tokens": self.output_tokens,
                "script": self._chosen.name,
                "step": self._chosen.number,
                "outcome": self.outcome,
            },
            default=dict,
        )
        # One write to a file opened for appending: lines of several engines do not mix.
        with self._log.open("ab", buffering=0) as file:
            file.write(line.encode("utf-8", "replace") + b"\n")


def is_first(log: Path, chosen: Chosen) -> bool:
    """Whether no engine with this log has reached the step yet."""
    folder = log.with_suffix(".faults")
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / f"{chosen.name}-{chosen.number}").touch(exist_ok=False)
        return True
    return False
