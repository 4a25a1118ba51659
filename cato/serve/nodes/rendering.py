"""Renders a node's templates."""

from __future__ import annotations

from collections.abc import Mapping

from cato.core.errors import ExpressionError, NodeError, WorkLimitError
from cato.core.workflow import Template


def render(node: str, template: Template, names: Mapping[str, object]) -> str:
    """Render `template`. Raise `NodeError` if that fails, `WorkLimitError` if it needs more work
    than is allowed here."""
    try:
        return template.render(names)
    except WorkLimitError:
        raise
    except ExpressionError as exc:
        raise NodeError(node, str(exc)) from exc
