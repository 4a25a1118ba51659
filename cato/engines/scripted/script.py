"""The scripted engine's script: steps of an agent's work, chosen by the conversation itself.

A user message names a script and its variables, `[script: edit-files repo=/srv/toy]`; the step
number is the number of answers since then. So the same conversation gets the same answer on every
replica, after every retry, and after a summary that names another script. Rules come first: they
match requests that name no script (titles, summaries, commit messages) by their text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from cato.core.errors import EngineError
from cato.wire.conversation import Conversation, Message

_MARK = re.compile(r"\[script: (?P<name>[\w-]+)(?P<variables>(?: \w+=[^\s\]]+)*)\]")
_VARIABLE = re.compile(r"\$(\w+)")


class Fault(StrEnum):
    """A fault that a step injects once."""

    NONE = ""
    DIES = "dies"
    """The engine dies in the middle of the answer, with all its running requests."""
    REFUSES = "refuses"
    """The engine answers 429."""


class Where(StrEnum):
    """The text of a conversation that a rule searches."""

    SYSTEM = "system"
    LAST_USER = "last_user"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Step:
    """One answer; its first token comes after `delay_s`."""

    text: str = ""
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    fault: Fault = Fault.NONE
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rule:
    """The answer to requests whose text matches `pattern`.

    `without_tools`: match only requests that offer no tools.
    """

    name: str
    where: Where
    pattern: re.Pattern[str]
    step: Step
    without_tools: bool = False


@dataclass(frozen=True, slots=True)
class Script:
    """Steps by name, rules in their order, and the file in which requests are logged.

    `resumes`: the user message with which a client asks for the rest of a cut answer;
    `aborted`: the tool result that a client sends for a call that was cut.
    """

    steps: Mapping[str, tuple[Step, ...]]
    rules: tuple[Rule, ...]
    log: Path
    resumes: re.Pattern[str] | None = None
    aborted: re.Pattern[str] | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """A step with its variables filled in; `name` is that of its script or rule, or empty.

    `number` counts from 0.
    """

    name: str
    number: int
    step: Step


UNKNOWN = Step(text="No script fits this request.")
OVER = Step(text="The script is over.")


def choose(script: Script, conversation: Conversation) -> Chosen:
    """The answer to a conversation; if it ends with an answer, the rest of that answer."""
    marked = _marked(conversation)
    variables = _variables(_all_text(conversation))
    for rule in script.rules:
        is_meant = not (rule.without_tools and conversation.tools)
        if is_meant and rule.pattern.search(_text(conversation, rule.where)):
            return Chosen(rule.name, 0, _filled(rule.step, variables))
    if marked is None:
        return Chosen("", 0, UNKNOWN)
    name, after = marked
    since = Conversation(messages=tuple(_without_cuts(script, after)))
    number = since.answers
    is_resumed = number > 0 and since.messages[-1].role == "assistant"
    if is_resumed:
        number -= 1
    steps = script.steps.get(name)
    if steps is None:
        return Chosen("", 0, UNKNOWN)
    step = _filled(steps[number], variables) if number < len(steps) else OVER
    if is_resumed:
        step = _rest(step, since.messages[-1].text)
    return Chosen(name, number, step)


def _matches(pattern: re.Pattern[str] | None, text: str) -> bool:
    return pattern is not None and pattern.search(text) is not None


def _without_cuts(script: Script, messages: Sequence[Message]) -> list[Message]:
    """The messages as if no answer had been cut: an answer is joined with its rest, and an answer
    whose tool call was cut is left out."""
    found: list[Message] = []
    for message in messages:
        if message.role == "user" and _matches(script.resumes, message.text):
            continue
        if message.role == "tool" and _matches(script.aborted, message.parts[0].text):
            found.pop()
        else:
            found.append(message)
    return found


def _marked(conversation: Conversation) -> tuple[str, Sequence[Message]] | None:
    """The script named last, and the messages after it.

    Users name scripts; so does a summary, which some clients keep as an answer.
    """
    messages = conversation.messages
    for i in reversed(range(len(messages))):
        is_said = messages[i].role in ("user", "assistant")
        marks = list(_MARK.finditer(messages[i].text)) if is_said else []
        if marks:
            return marks[-1]["name"], messages[i + 1 :]
    return None


def _variables(text: str) -> dict[str, str]:
    marks = list(_MARK.finditer(text))
    words = marks[-1]["variables"].split() if marks else []
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _text(conversation: Conversation, where: Where) -> str:
    match where:
        case Where.SYSTEM:
            return conversation.system
        case Where.LAST_USER:
            return conversation.last_user_text
        case Where.ALL:
            return _all_text(conversation)


def _all_text(conversation: Conversation) -> str:
    return "\n".join(message.text for message in conversation.messages)


def _rest(step: Step, said: str) -> Step:
    """The rest of a step after `said`; its thinking counts as said."""
    text = step.text.removeprefix(said) if said and step.text.startswith(said) else step.text
    return replace(step, text=text, thinking="" if said else step.thinking, fault=Fault.NONE)


def _filled(step: Step, variables: Mapping[str, str]) -> Step:
    def fill(text: str, *, is_json: bool = False) -> str:
        def value(match: re.Match[str]) -> str:
            found = variables.get(match[1], match[0])
            return json.dumps(found)[1:-1] if is_json else found

        return _VARIABLE.sub(value, text)

    calls = tuple(Call(call.name, fill(call.arguments, is_json=True)) for call in step.calls)
    return replace(step, text=fill(step.text), thinking=fill(step.thinking), calls=calls)


def load_script(path: Path) -> Script:
    """Read a script's file; raise an `EngineError` that names it."""
    try:
        return _script(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, re.error) as exc:
        raise EngineError(f"{path} is not a valid script: {exc!r}") from exc


def _script(data: Mapping[str, Any]) -> Script:
    rules = tuple(
        Rule(
            name=rule["name"],
            where=Where(rule["where"]),
            pattern=re.compile(rule["pattern"]),
            step=_step(rule["step"]),
            without_tools=rule.get("without_tools", False),
        )
        for rule in data.get("rules", ())
    )
    steps = {name: tuple(map(_step, found)) for name, found in data["steps"].items()}
    patterns = {n: re.compile(data[n]) for n in ("resumes", "aborted") if n in data}
    return Script(steps, rules, Path(data["log"]), **patterns)


def _step(data: Mapping[str, Any]) -> Step:
    return Step(
        text=data.get("text", ""),
        thinking=data.get("thinking", ""),
        calls=tuple(
            Call(call["name"], json.dumps(call["arguments"])) for call in data.get("calls", ())
        ),
        fault=Fault(data.get("fault", "")),
        delay_s=float(data.get("delay_s", 0.0)),
    )
