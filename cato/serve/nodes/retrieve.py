"""The retrieve node: finds snippets of a code folder that match a text."""

from __future__ import annotations

from collections.abc import Mapping

from cato.core.errors import NodeError
from cato.core.workflow import RetrieveSettings
from cato.serve.nodes.code_index import CodeIndex
from cato.serve.nodes.rendering import render


def run(
    node: str,
    settings: RetrieveSettings,
    names: Mapping[str, object],
    indexes: Mapping[str, CodeIndex],
) -> dict[str, object]:
    """`{"snippets": [{"path", "start_line", "text", "score"}]}`, best first; may be empty."""
    index = indexes.get(settings.index)
    if index is None:
        known = ", ".join(sorted(indexes)) or "none"
        raise NodeError(node, f"no code index named {settings.index!r}; known: {known}")
    query = render(node, settings.query, names)
    try:
        found = index.search(query, settings.top_k)
    except (ValueError, OSError) as exc:  # Tantivy's errors: the store is damaged or gone
        raise NodeError(node, f"code index {settings.index!r} cannot be read: {exc}") from exc
    return {
        "snippets": [
            {"path": s.path, "start_line": s.start_line, "text": s.text, "score": s.score}
            for s in found
        ]
    }
