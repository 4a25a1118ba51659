"""Features of a call that may predict the length of its answer.

The ingress, the simulator and the studies all use `features_of`. No text is kept: a call becomes
numbers on arrival, and its answer's length is remembered under a hash of task, node and user.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import fsum, log

from cato.core.record import record
from cato.wire.asked import format_of, last_message, tools_of
from cato.wire.conversation import PartKind
from cato.wire.limits import limits_of

FENCE = "```"
# Signs of a line of code in most languages, which prose seldom has.
_CODE_LINE = re.compile(
    r"[{};]|\w\(|\)\s*:|\s=\s|^\s*(?:def|class|import|from|return|func|fn|package|using|#include)\b"
)
_TAG = re.compile(r"```[ \t]*([A-Za-z+#]+)")
LANGUAGES = ("python", "java", "javascript", "typescript", "c", "cpp", "csharp", "go", "rust")
ROLES = ("user", "tool", "assistant", "system")
FORMATS = ("", "json_object", "json_schema", "regex", "grammar")
# Code for a value outside the list: neither one of its indices nor the code for no value.
_OTHER = -2.0
# Characters of a message that are examined at each end: what is asked stands at one of them, and a
# whole file between them would cost milliseconds.
EXAMINED_CHARS = 600
# Characters of a line that are examined for signs of code.
_LINE_CHARS = 100
# Decimals of a feature: the store and receipts keep them all.
DIGITS = 4

NAMES = (
    *("log_prompt_tokens", "last_role", "code_share", "fences", "language", "format"),
    *("log_max_tokens", "turn", "tools", "log_earlier_mean", "log_earlier_last"),
)
"""Names of the values of `features_of`, in order."""


@record
class Asked:
    """A call as the client sent it. `text` is its last message, of `role`.

    `max_tokens`: the client's limit, 0 without one. `turn` counts the earlier calls of its
    session. `earlier`: lengths of the latest answers of the same task and node to the same
    user, oldest first (see `EarlierAnswers`).
    """

    prompt_tokens: int
    text: str = ""
    role: str = "user"
    format: str = ""
    max_tokens: int = 0
    turn: int = 0
    tools: int = 0
    earlier: tuple[int, ...] = ()


def asked_of(
    endpoint: str,
    body: Mapping[str, object],
    prompt_tokens: int,
    turn: int,
    earlier: tuple[int, ...],
) -> Asked:
    """The call that an engine's `body` makes; `endpoint` is its dialect's path under `/v1/`.

    Raise `InputError` for an invalid last message.
    """
    message = last_message(endpoint, body)
    has_result = any(part.kind is PartKind.RESULT for part in message.parts)
    return Asked(
        prompt_tokens,
        "".join(p.text for p in message.parts if p.kind in (PartKind.TEXT, PartKind.RESULT)),
        "tool" if has_result else message.role,
        format_of(body),
        max([0, *limits_of(body).values()]),  # those of other dialects are not checked
        turn,
        tools_of(body),
        earlier,
    )


def features_of(asked: Asked) -> tuple[float, ...]:
    """Numbers for a forest, named by `NAMES`; a fraction of a millisecond for any text."""
    text = asked.text
    if len(text) > 2 * EXAMINED_CHARS:
        text = f"{text[:EXAMINED_CHARS]}\n{text[-EXAMINED_CHARS:]}"
    tag = _TAG.search(text)
    earlier = [log(max(1, tokens)) for tokens in asked.earlier]
    values = (
        log(1 + asked.prompt_tokens),
        _place(asked.role, ROLES),
        code_share(text),
        float(text.count(FENCE) // 2),
        _place(tag.group(1).lower(), LANGUAGES) if tag else -1.0,
        _place(asked.format, FORMATS),
        log(1 + asked.max_tokens),
        float(asked.turn),
        float(asked.tools),
        fsum(earlier) / len(earlier) if earlier else -1.0,
        earlier[-1] if earlier else -1.0,
    )
    return tuple(round(value, DIGITS) for value in values)


def _place(name: str, names: Sequence[str]) -> float:
    return float(names.index(name)) if name in names else _OTHER


def code_share(text: str) -> float:
    """Share of the lines that are code: in fences, or matching `_CODE_LINE`."""
    is_inside, code, lines = False, 0, 0
    for line in text.splitlines():
        if line.lstrip().startswith(FENCE):
            is_inside = not is_inside
            continue
        if line.strip():
            lines += 1
            code += is_inside or _CODE_LINE.search(line, 0, _LINE_CHARS) is not None
    return code / lines if lines else 0.0


@dataclass(slots=True)
class EarlierAnswers:
    """Lengths of the newest `kept` answers per task, node and user, for the `most` latest of them.

    They are identified by a hash of 8 bytes. Mutable; one owner.
    """

    kept: int = 5
    most: int = 10_000
    _known: OrderedDict[bytes, tuple[int, ...]] = field(default_factory=OrderedDict)

    def add(self, task: str, node: str, user: str, output_tokens: int) -> None:
        key = _key(task, node, user)
        self._known[key] = (*self._known.pop(key, ()), output_tokens)[-self.kept :]
        if len(self._known) > self.most:
            self._known.popitem(last=False)

    def of(self, task: str, node: str, user: str) -> tuple[int, ...]:
        """Oldest first; empty without history."""
        return self._known.get(_key(task, node, user), ())


def _key(task: str, node: str, user: str) -> bytes:
    name = f"{len(task)}:{len(node)}:{task}{node}{user}"
    return blake2b(name.encode(), digest_size=8).digest()
