"""A task's workflow: a DAG of nodes, as loaded and checked by `cato.workflows`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from cato.core.errors import CatoError, InputError, WrongValueError
from cato.core.ids import NodeId, TaskName
from cato.core.session import Prompt
from cato.core.slo import Slo

ITEM_NAMES = frozenset({"item", "index"})
"""Names that exist in a node with `each`, besides inputs and results."""


class Expression(Protocol):
    """A compiled condition or value; evaluated over inputs and node results by name. Pure."""

    @property
    def source(self) -> str: ...

    @property
    def names(self) -> frozenset[str]:
        """The names that it uses."""
        ...

    def evaluate(self, names: Mapping[str, object]) -> object:
        """Raise `ExpressionError` when it cannot be evaluated. A missing name is falsy."""
        ...


class Template(Protocol):
    """A compiled sandboxed template. Pure."""

    @property
    def source(self) -> str: ...

    def render(self, names: Mapping[str, object]) -> str:
        """Raise `ExpressionError` when it cannot be rendered."""
        ...


def list_of(expression: Expression, names: Mapping[str, object]) -> Sequence[object]:
    """Its list, empty for a missing value; raise `ExpressionError` if it is anything else."""
    value = expression.evaluate(names)
    if not value:
        return ()
    if not isinstance(value, list | tuple):
        problem = f"is not a list but {type(value).__name__}"
        raise WrongValueError(expression.source, problem, expression.names)
    return value


def count_of(expression: Expression, names: Mapping[str, object]) -> int | None:
    """Its count, None for a missing value; raise `ExpressionError` if it is anything else."""
    value = expression.evaluate(names)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        problem = f"must be a whole number of at least 1, is {value!r:.40}"
        raise WrongValueError(expression.source, problem, expression.names)
    return value


class NodeKind(StrEnum):
    LLM = "llm"
    RETRIEVE = "retrieve"
    ANALYZE = "analyze"
    VALIDATE = "validate"
    TRANSFORM = "transform"


@dataclass(frozen=True, slots=True)
class FimPrompt:
    """A fill-in-the-middle prompt; the model's family decides how it is written."""

    prefix: Template
    suffix: Template
    context: Template | None = None


@dataclass(frozen=True, slots=True)
class LlmSettings:
    """An LLM call. Exactly one of `prompt`, `fim`, `chat` is set.

    `model` is a model name or alias of the deployment. `max_tokens` bounds the output and
    `expected_tokens` predicts it until the profiler has seen runs; `token_limit` may lower the
    bound for one run. `extra` goes to the engine as it is (temperature, stop, top_p, ...);
    `of_client` names the fields of the engine's request that the client set. `chat`
    renders the user message (`system` the system message), and the model's own chat template is
    applied. `fallback` is a model that may answer instead while the pool of `model` is full.
    """

    model: str
    max_tokens: int
    expected_tokens: int
    prompt: Template | None = None
    fim: FimPrompt | None = None
    chat: Template | None = None
    system: Template | None = None
    extra: Mapping[str, object] | None = None
    token_limit: Expression | None = None
    fallback: str | None = None
    of_client: frozenset[str] = frozenset()

    def limit_of(self, names: Mapping[str, object]) -> int:
        """Limit on tokens of the answer; raise `ExpressionError` if it evaluates to no count."""
        limit = None if self.token_limit is None else count_of(self.token_limit, names)
        return self.max_tokens if limit is None else min(limit, self.max_tokens)


@dataclass(frozen=True, slots=True)
class RetrieveSettings:
    """Full-text search of `query` in the code index named `index`; at most `top_k` snippets."""

    index: str
    query: Template
    top_k: int


@dataclass(frozen=True, slots=True)
class AnalyzeSettings:
    """Parse `source` with tree-sitter: definitions, imports, scopes, chunks."""

    source: Template
    language: Template
    cursor: Template | None = None


@dataclass(frozen=True, slots=True)
class ValidateSettings:
    """Check the syntax of `source`, then run the named `checkers` on it; it is never executed."""

    source: Template
    language: Template
    checkers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TransformSettings:
    """Render `text`; with `as_json` the text is parsed into a value."""

    text: Template
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class CallSettings:
    """An OpenAI body passed to a model unchanged: the only node of a plain model's workflow.

    `endpoint` is the path below `/v1/` in the engine's dialect, `max_tokens` the limit in the body
    (None: no limit of its own). It asks for `calls` answers at once.
    """

    model: str
    endpoint: str
    body: Mapping[str, object]
    stream: bool
    expected_tokens: int
    prompt: Prompt
    max_tokens: int | None = None
    calls: int = 1


NodeSettings = (
    LlmSettings
    | CallSettings
    | RetrieveSettings
    | AnalyzeSettings
    | ValidateSettings
    | TransformSettings
)


@dataclass(frozen=True, slots=True)
class Repeat:
    """A bounded loop: run the node, run the nodes of `redo` again, stop when `until` holds.

    `max_rounds` counts executions of the node. `redo` lists ancestors in dependency order;
    only the node itself and other members of `redo` may depend on them.
    """

    until: Expression
    max_rounds: int
    redo: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """One vertex of a workflow.

    `when`: the node is skipped unless it holds. `each`: the node runs once per item of the list
    that it evaluates to (`item` and `index` are names inside); its result is the list of results.
    `optional`: if it fails or exceeds its budget, its result is absent and the run continues.
    `budget_s`: the longest it may take; None means the share of the SLO decides.
    """

    id: NodeId
    kind: NodeKind
    settings: NodeSettings
    needs: tuple[NodeId, ...] = ()
    when: Expression | None = None
    each: Expression | None = None
    max_items: int = 1
    repeat: Repeat | None = None
    optional: bool = False
    budget_s: float | None = None


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of a task: `type` is str, int, float, bool or list; `default` None = required."""

    name: str
    type: str
    required: bool
    default: object
    description: str


@dataclass(frozen=True, slots=True)
class Workflow:
    """A task's DAG; `nodes` are in a topological order.

    `stream` and `output` are preferences: the first node of the list that completed counts ("refine
    else draft"). `stream` is empty if nothing is streamed before the end. `hard_deadline_s` ends a
    run that nobody waits for any more. `session_target_s` is for whole sessions of conversations
    with the task's model; None without one.
    """

    name: TaskName
    description: str
    slo: Slo
    hard_deadline_s: float
    inputs: tuple[InputSpec, ...]
    nodes: tuple[Node, ...]
    output: tuple[NodeId, ...]
    stream: tuple[NodeId, ...] = ()
    session_target_s: float | None = None

    def blamed(self, node: Node, error: CatoError) -> CatoError:
        """`error` of `node`; an `InputError` if it is about a value of the run's inputs alone."""
        if not isinstance(error, WrongValueError):
            return error
        inputs = {spec.name for spec in self.inputs}
        if node.each is not None and node.each.names <= inputs:
            inputs |= ITEM_NAMES
        if not error.names or not error.names <= inputs:
            return error
        param = next(iter(error.names)) if len(error.names) == 1 else None
        return InputError(f"node {node.id!r}: {error}", param)

    def node(self, id: NodeId) -> Node:
        return next(n for n in self.nodes if n.id == id)

    @property
    def is_dynamic(self) -> bool:
        """Whether conditions or repeats decide at run time which nodes execute."""
        return any(n.when is not None or n.repeat is not None for n in self.nodes)
