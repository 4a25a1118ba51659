"""What all nodes do first: turn a template into text."""

from __future__ import annotations

from collections.abc import Mapping

from cato.core.errors import ExpressionError, NodeError, WorkLimitError
from cato.core.workflow import Template


def render(node: str, template: Template, names: Mapping[str, object]) -> str:
    """The text of `template`; a template that fails makes the node fail. Raise `WorkLimitError` for
    one that needs more work than is allowed here."""
    try:
        return template.render(names)
    except WorkLimitError:
        raise
    except ExpressionError as exc:
        raise NodeError(node, str(exc)) from exc
