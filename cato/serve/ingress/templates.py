"""Requests that a model's chat template would lose parts of."""

from __future__ import annotations

from collections.abc import Mapping

from cato.core.errors import InputError
from cato.engines.vllm.template import lost_parts
from cato.serve.pools import PoolInfo


def check_tools(pool: PoolInfo, body: Mapping[str, object]) -> None:
    """Raise `InputError` for tools that the pool's model would never see: an agent takes the
    nonsense that comes back for an answer."""
    template = pool.template
    has_tools = bool(body.get("tools")) and body.get("tool_choice") != "none"
    if not has_tools or template is None or template.renders_tools:
        return
    raise InputError(
        f"model {pool.model.name!r} cannot be used with tools: its chat template drops "
        f"{lost_parts(template)}; ask another model, or give its engine another template",
        "tools",
    )


def note_of(pool: PoolInfo) -> str:
    """What operators should know of the pool's chat template; empty when it loses nothing."""
    lost = "" if pool.template is None else lost_parts(pool.template)
    return f"the chat template of {pool.model.name} drops {lost}: no agents" if lost else ""
