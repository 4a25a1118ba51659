"""Whether a deployment has the models and indexes that a workflow names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from cato.config.problems import did_you_mean
from cato.core.errors import Problem
from cato.core.topology import ModelSpec, model_called
from cato.core.workflow import LlmSettings, RetrieveSettings, Workflow


def unknown_names(
    file: str, workflow: Workflow, models: Sequence[ModelSpec], indexes: Collection[str]
) -> Iterator[Problem]:
    """Problems of `workflow`, which stands in `file`, beside these models and indexes."""
    known = sorted(name for model in models for name in model.names)
    for node in workflow.nodes:
        settings, where = node.settings, f"nodes.{node.id}"
        if isinstance(settings, LlmSettings):
            for key, name in (("model", settings.model), ("fallback", settings.fallback)):
                if name is not None and model_called(name, models) is None:
                    yield _unknown(file, f"{where}.{key}", "model", name, known)
        if isinstance(settings, RetrieveSettings) and settings.index not in indexes:
            yield _unknown(file, f"{where}.index", "index", settings.index, sorted(indexes))


def _unknown(file: str, path: str, kind: str, name: str, known: Sequence[str]) -> Problem:
    hint = did_you_mean(name, known) or f"; known: {', '.join(known) or 'none'}"
    return Problem(file, path, "", f"the deployment has no {kind} {name!r}{hint}")
