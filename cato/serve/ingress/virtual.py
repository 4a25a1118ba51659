"""Virtual models: workflows under model names, for clients that only set a model and a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from cato.core.errors import InputError
from cato.core.ids import TaskName
from cato.core.workflow import Workflow

PREFIX = "cato-"
# Inputs that receive the prompt, wherever they stand in the workflow file.
MAIN_INPUTS = ("prefix", "instruction", "code")


def model_name(task: str) -> str:
    """`code-completion` is offered as `cato-completion`, `review` as `cato-review`."""
    return PREFIX + task.removeprefix("code-")


def model_names(tasks: Iterable[TaskName]) -> Mapping[str, TaskName]:
    """Every virtual model name: the short one, and the one with the task's full name."""
    return _model_names(tuple(tasks))


@lru_cache(maxsize=16)  # every request asks
def _model_names(tasks: tuple[TaskName, ...]) -> Mapping[str, TaskName]:
    names: dict[str, TaskName] = {}
    for task in sorted(tasks):
        names.setdefault(model_name(task), task)
    for task in sorted(tasks):
        names[PREFIX + task] = task  # wins if `x` and `code-x` would share a short name
    return names


def main_input(workflow: Workflow) -> str:
    """The input that receives the prompt."""
    texts = [i for i in workflow.inputs if i.type == "str"]
    named = [name for name in MAIN_INPUTS if any(i.name == name for i in texts)]
    if named:
        return named[0]
    required = [i.name for i in texts if i.required] or [i.name for i in texts]
    if not required:
        raise InputError(
            f"task {workflow.name!r} takes no text; use POST /v1/tasks/{workflow.name}", "model"
        )
    return required[0]


def prompt_of(body: Mapping[str, object]) -> str:
    """The one prompt of a completion body."""
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise InputError("a task takes one prompt, as a string", "prompt")
    return prompt


def text_of(output: object) -> str:
    """The text of an output node's result; items of a fan-out are joined by newlines."""
    match output:
        case {"text": str(text)} | {"code": str(text)}:
            return text
        case list() | tuple():
            return "\n".join(text_of(item) for item in output)
        case _:
            return ""
