"""Check that a deployment has the models, indexes and checkers that a workflow names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cato.core.errors import Problem
from cato.core.topology import IngressSpec, ModelSpec, model_called
from cato.core.words import did_you_mean
from cato.core.workflow import LlmSettings, RetrieveSettings, ValidateSettings, Workflow
from cato.workflows.fim_families import fim_family


def unknown_names(
    file: str, workflow: Workflow, models: Sequence[ModelSpec], ingress: IngressSpec
) -> Iterator[Problem]:
    """Unknown models, indexes and checkers of `workflow`, which is in `file`."""
    known = sorted(name for model in models for name in model.names)
    for node in workflow.nodes:
        settings, where = node.settings, f"nodes.{node.id}"
        if isinstance(settings, LlmSettings):
            for key, name in (("model", settings.model), ("fallback", settings.fallback)):
                if name is not None and model_called(name, models) is None:
                    yield _unknown(file, f"{where}.{key}", "model", name, known)
        if isinstance(settings, RetrieveSettings) and settings.index not in ingress.indexes:
            indexes = sorted(ingress.indexes)
            yield _unknown(file, f"{where}.index", "index", settings.index, indexes)
        if isinstance(settings, ValidateSettings):
            for name in settings.checkers:
                if name not in ingress.checkers:
                    checkers = sorted(ingress.checkers)
                    yield _unknown(file, f"{where}.checkers", "checker", name, checkers)


def without_suffix(file: str, workflow: Workflow, models: Sequence[ModelSpec]) -> Iterator[Problem]:
    """Fill-in-the-middle nodes of `workflow` whose models are not known to fill in: they get the
    code before the cursor alone."""
    for node in workflow.nodes:
        settings = node.settings
        if not isinstance(settings, LlmSettings) or settings.fim is None:
            continue
        for key, name in (("model", settings.model), ("fallback", settings.fallback)):
            model = None if name is None else model_called(name, models)
            if model is not None and not fim_family(model.family).has_suffix:
                rule = (
                    f"the code behind the cursor is left out: {model.name!r} is not known to fill "
                    "in the middle; if it does, set `family` of the model in the deployment file"
                )
                yield Problem(file, f"nodes.{node.id}.{key}", "", rule)


def _unknown(file: str, path: str, kind: str, name: str, known: Sequence[str]) -> Problem:
    hint = did_you_mean(name, known) or f"; known: {', '.join(known) or 'none'}"
    return Problem(file, path, "", f"the deployment has no {kind} {name!r}{hint}")
