"""Find out which parts of a conversation a model's chat template renders. Pure.

A template may silently drop tools or system messages, and the model then answers nonsense. So a
fresh engine renders conversations that contain marker words: `/tokenize` renders them,
`/detokenize` gives the text back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cato.core.topology import TemplateFacts

# Words that no template writes by itself, in letters that every tokenizer round-trips.
_SYSTEM, _LATE, _TOOL = "catosystem", "catolate", "catotool"
_FIRST, _ANSWER, _SECOND = "catofirst", "catoanswer", "catosecond"

Body = Mapping[str, Any]


def whole_probe() -> Body:
    """A conversation with a system message and a tool."""
    function = {"name": _TOOL, "description": _TOOL, "parameters": {"type": "object"}}
    return {
        "messages": [_said("system", _SYSTEM), _said("user", _FIRST)],
        "tools": [{"type": "function", "function": function}],
    }


def system_probe() -> Body:
    """The same without the tool, for templates that refuse one."""
    return {"messages": [_said("system", _SYSTEM), _said("user", _FIRST)]}


def late_probe() -> Body:
    """A conversation with a second system message in the middle."""
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
    """Facts from the rendered probes, None for a refused one; None when none was rendered."""
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
    """The parts of a conversation that do not reach the model, in words; empty if none."""
    lost = [] if facts.renders_tools else ["tools"]
    lost += [] if facts.renders_system else ["system texts"]
    return " and ".join(lost)


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}
