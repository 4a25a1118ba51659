"""What a model's chat template makes of a conversation, seen from its prompts. Pure.

A template may drop tools or system texts without a word, and the model then answers nonsense. So a
fresh engine is asked what it makes of conversations with marks in them: `/tokenize` renders them,
`/detokenize` gives the text back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cato.core.topology import TemplateFacts

# Words that no template writes by itself, in letters that every tokenizer gives back.
_SYSTEM, _LATE, _TOOL = "catosystem", "catolate", "catotool"
_FIRST, _ANSWER, _SECOND = "catofirst", "catoanswer", "catosecond"

Body = Mapping[str, Any]


def whole_probe() -> Body:
    """A conversation with a system text and a tool."""
    function = {"name": _TOOL, "description": _TOOL, "parameters": {"type": "object"}}
    return {
        "messages": [_said("system", _SYSTEM), _said("user", _FIRST)],
        "tools": [{"type": "function", "function": function}],
    }


def system_probe() -> Body:
    """The same without the tool, for templates that refuse one."""
    return {"messages": [_said("system", _SYSTEM), _said("user", _FIRST)]}


def late_probe() -> Body:
    """A conversation with a second system text in its middle."""
    return {
        "messages": [
            _said("system", _SYSTEM),
            _said("user", _FIRST),
            _said("assistant", _ANSWER),
            _said("system", _LATE),
            _said("user", _SECOND),
        ]
    }


def template_facts(whole: str | None, system: str | None, late: str | None) -> TemplateFacts | None:
    """What the rendered probes tell, None for a refused one; None when none was rendered at all."""
    told = whole or system
    if told is None:
        return None
    has_tools, has_system = whole is not None and _TOOL in whole, _SYSTEM in told
    return TemplateFacts(
        renders_tools=has_tools,
        renders_system=has_system,
        is_system_first=has_system and (not has_tools or told.find(_SYSTEM) < told.find(_TOOL)),
        takes_late_system=late is not None and late.find(_LATE) > late.find(_ANSWER) >= 0,
    )


def lost_parts(facts: TemplateFacts) -> str:
    """What of a conversation does not reach the model, in words; empty when all does."""
    lost = [] if facts.renders_tools else ["tools"]
    lost += [] if facts.renders_system else ["system texts"]
    return " and ".join(lost)


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}
