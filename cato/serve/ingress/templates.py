"""Refuses requests with tools if the model's chat template would drop them."""

from __future__ import annotations

from collections.abc import Mapping

from cato.core.errors import InputError
from cato.engines.vllm.template import lost_parts
from cato.serve.pools import PoolInfo


def check_tools(pool: PoolInfo, body: Mapping[str, object]) -> None:
    """Raise `InputError` for tools that the chat template drops: the model would never see them,
    and an agent would take its nonsense for an answer."""
    template = pool.template
    has_tools = bool(body.get("tools")) and body.get("tool_choice") != "none"
    if not has_tools or template is None or template.renders_tools:
        return
    raise InputError(
        f"model {pool.model.name!r} cannot be used with tools: its chat template drops "
        f"{lost_parts(template)}; use another model, or ask an operator to set another template",
        "tools",
    )


def note_of(pool: PoolInfo) -> str:
    """A warning for operators about the pool's chat template; empty if it drops nothing."""
    lost = "" if pool.template is None else lost_parts(pool.template)
    return f"the chat template of {pool.model.name} drops {lost}: no agents" if lost else ""
