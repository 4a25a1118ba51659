"""Schema of workflow files, key by key; checks across keys are in `load.py`.

Editors show the docstrings under the fields (see `json_schema.py`).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from cato.config.fields import Duration, StrictModel, matching

MAX_NODES = 64
MAX_ROUNDS = 8
MAX_ITEMS = 64
DEFAULT_MAX_ITEMS = 8
MAX_OUTPUT_TOKENS = 131_072
MAX_STOPS = 32
MAX_TOP_K = 50
MAX_DURATION_S = 24 * 3600.0
MAX_TEXT_CHARS = 64_000

DEFAULT_TOP_K = 3
DEFAULT_INDEX = "code"

_OWN_ENGINE_KEYS = (
    "model prompt messages max_tokens max_completion_tokens stream stream_options priority n "
    "best_of suffix echo temperature top_p stop seed"
)
OWN_ENGINE_KEYS = frozenset(_OWN_ENGINE_KEYS.split())
"""Keys of an OpenAI body that `extra` must not set: CATO or the node's own keys set them."""


def _in_a_day(seconds: float) -> float:
    if not 0 < seconds <= MAX_DURATION_S:
        raise ValueError("must be a duration of more than 0 and at most 24h")
    return seconds


Span = Annotated[Duration, AfterValidator(_in_a_day)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS)]
_ID = r"[A-Za-z][A-Za-z0-9_]{0,63}"
Id = Annotated[
    str,
    matching(_ID, "a name has letters, digits and '_', with a letter first, at most 64"),
    WithJsonSchema({"type": "string", "pattern": f"^{_ID}$"}),
]
_TASK = r"[a-z][a-z0-9-]{0,62}"
Task = Annotated[
    str,
    matching(_TASK, "must be small letters, digits and '-', with a letter first, at most 63"),
    WithJsonSchema({"type": "string", "pattern": f"^{_TASK}$"}),
]
Checker = Annotated[str, Field(min_length=1, max_length=63)]
"""The name of a checker of the deployment."""
InputType = Literal["str", "int", "float", "bool", "list"]


class Part(StrictModel):
    """Base of all parts of a workflow file."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class SlaPart(Part):
    """The SLA of this task, unless the request asks for another."""

    metric: Literal["ttft", "tpot", "e2e"]
    """ttft: time to the first token of the streamed node; tpot: time per later token;
    e2e: time to the whole answer."""
    target: Span
    """The objective for `metric`."""
    deadline: Span | None = None
    """Time after which the run is ended unfinished. Default: 20 times the target, at least 10s."""
    session: Span | None = None
    """Target for a whole session (a conversation with tools or history, which goes to the task's
    model): from its first call to its last answer. Each turn gets a share of it."""

    @model_validator(mode="after")
    def _deadline_is_later(self) -> Self:
        if self.metric != "tpot" and self.deadline is not None and self.deadline < self.target:
            raise ValueError("the deadline must not be shorter than the target")
        return self


def fits_type(type_: str, value: object) -> bool:
    """True when `value`, parsed from JSON or YAML, fits an input of `type_`."""
    match type_:
        case "str":
            return isinstance(value, str)
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and _is_finite_float(value)  # type: ignore[arg-type]
        case _:
            return isinstance(value, list)


def _is_finite_float(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number above the largest float
        return False


def _check_json(value: object) -> None:
    """Raise ValueError for YAML values that JSON does not have: dates, sets, infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise ValueError("must be JSON values: finite numbers, text, lists, mappings") from exc


PYTHON_TYPES: Mapping[str, type[Any]] = {
    "str": str, "int": int, "float": float, "bool": bool, "list": list,
}  # fmt: skip
TYPE_WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
}


class InputPart(Part):
    """An input of the task; required unless it has a default."""

    type: InputType
    default: Any = None
    """The value when the caller gives none. Without it the input is required."""
    description: str = ""

    @property
    def is_required(self) -> bool:
        return "default" not in self.model_fields_set

    @field_validator("default")
    @classmethod
    def _default_fits(cls, value: object, info: ValidationInfo) -> object:
        type_ = info.data.get("type")
        if type_ is not None and not fits_type(type_, value):
            is_huge = type_ == "float" and fits_type("int", value)
            most = f" of at most {sys.float_info.max:.1e}" if is_huge else ""
            raise ValueError(f"must be {TYPE_WORDS[type_]}{most}, as `type` says")
        _check_json(value)
        return value


def _long_form(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


class RepeatPart(Part):
    """A bounded loop: run the node, then run the nodes of `redo` again, until `until` is true."""

    until: Text = Field(examples=["check.ok"])
    """Expression over inputs, ancestors and the node itself."""
    max: int = Field(ge=1, le=MAX_ROUNDS)
    """Most executions of the node."""
    redo: list[str] = Field(default_factory=list, examples=[["check"]])
    """Ancestors to run again after each round; only this node and other nodes of `redo` may need
    them."""


class FimPart(Part):
    """A fill-in-the-middle prompt, written in the format of the node's model."""

    prefix: str = Field(max_length=MAX_TEXT_CHARS, examples=["{{ prefix }}"])
    """Template: the code before the cursor."""
    suffix: str = Field(default="", max_length=MAX_TEXT_CHARS, examples=["{{ suffix }}"])
    """Template: the code after the cursor."""
    context: str = Field(default="", max_length=MAX_TEXT_CHARS)
    """Template: other helpful text, as comments; cut first when the prompt is too long."""


class NodePart(Part):
    """Keys of every node."""

    needs: list[str] = Field(default_factory=list, examples=[["draft"]])
    """Nodes that must end or be skipped before this one starts."""
    when: Text | None = Field(default=None, examples=["not check.ok"])
    """Expression; the node is skipped unless it is true."""
    each: Text | None = Field(default=None, examples=["split.chunks"])
    """Expression for a list: the node runs once per item, all in parallel, with the names `item`
    and `index`. Its result is the list of results."""
    max_items: int | None = Field(default=None, ge=1, le=MAX_ITEMS)
    """Most items of `each`, default 8; further items are left out, and the receipt says so."""
    repeat: RepeatPart | None = None
    optional: bool = False
    """If it fails or exceeds its budget, the run continues without its result."""
    budget: Span | None = None
    """Time limit of the node. Default: its share of the remaining SLA."""

    @model_validator(mode="after")
    def _loops_are_clear(self) -> Self:
        if self.max_items is not None and self.each is None:
            raise ValueError("`max_items` needs `each`")
        if self.each is not None and self.repeat is not None:
            raise ValueError("`each` and `repeat` cannot be in the same node")
        return self


class LlmPart(NodePart):
    """A call of a model; its result is `{text, tokens, finish_reason}`."""

    type: Literal["llm"]
    model: str = Field(min_length=1, max_length=200, examples=["coder-large"])
    """Name or alias of a model of the deployment."""
    fallback: str | None = Field(
        default=None, min_length=1, max_length=200, examples=["coder-fast"]
    )
    """A smaller model that answers instead when the deployment's `brownout` says so."""
    prompt: Text | None = Field(default=None, examples=["prompts/generate.j2"])
    """Template that a base model continues: a .j2 file in this file's folder, or the text itself
    (which has a blank, a newline or `{{`)."""
    fim: FimPart | None = None
    chat: Text | None = None
    """Template of the user message, given like `prompt`; the model's chat template is applied."""
    system: Text | None = None
    """Template of the system message, with `chat`."""
    max_tokens: int = Field(ge=1, le=MAX_OUTPUT_TOKENS)
    """Most tokens of the answer."""
    token_limit: Text | None = Field(default=None, examples=["tokens"])
    """Expression for a lower limit of one answer, such as an input; capped at `max_tokens`."""
    expected_tokens: int | None = Field(default=None, ge=1)
    """Usual length of the answer, used until the Profiler has seen some. Default: half of
    `max_tokens`."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stop: list[Annotated[str, Field(min_length=1, max_length=200)]] | None = Field(
        default=None, max_length=MAX_STOPS
    )
    """Stop strings: texts that end the answer and are not part of it."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    extra: dict[str, Any] = Field(default_factory=dict, examples=[{"top_k": 20}])
    """Other keys of the engine's request, passed unchanged."""

    @field_validator("extra")
    @classmethod
    def _extra_is_extra(cls, value: dict[str, Any]) -> dict[str, Any]:
        own = sorted(OWN_ENGINE_KEYS.intersection(value))
        if own:
            raise ValueError(f"must not set {', '.join(own)}: the node or CATO sets them")
        _check_json(value)
        return value

    @model_validator(mode="after")
    def _one_kind_of_prompt(self) -> Self:
        if sum(x is not None for x in (self.prompt, self.fim, self.chat)) != 1:
            raise ValueError("exactly one of `prompt`, `fim` and `chat` is required")
        if self.system is not None and self.chat is None:
            raise ValueError("`system` needs `chat`")
        if self.expected_tokens is not None and self.expected_tokens > self.max_tokens:
            raise ValueError("`expected_tokens` must be at most `max_tokens`")
        return self


class RetrievePart(NodePart):
    """Full-text search in a code index; its result is `{snippets: [{path, start_line, text,
    score}]}`, best first."""

    type: Literal["retrieve"]
    index: str = Field(default=DEFAULT_INDEX, min_length=1, max_length=63)
    """Name of an index of the deployment."""
    query: Text = Field(examples=["{{ instruction }}"])
    """Template: the search text."""
    top_k: int = Field(default=DEFAULT_TOP_K, ge=1, le=MAX_TOP_K)
    """Most snippets."""


class AnalyzePart(NodePart):
    """Parse code; the result is `{ok, language, definitions: [{kind, name, start_line, end_line,
    text}], imports, scope, chunks, identifiers}`."""

    type: Literal["analyze"]
    source: Text = Field(examples=["{{ code }}"])
    """Template: the code."""
    language: Text = Field(examples=["{{ language }}"])
    """Template: its language."""
    cursor: Text | None = Field(default=None, examples=["{{ prefix | length }}"])
    """Template: offset in characters for `scope`. Default: the end."""


class ValidatePart(NodePart):
    """Check the syntax of code, and run `checkers` on it; the code is never run. The result is
    `{ok, errors: [{line, column, message}], code, checked}`: `code` has no Markdown fences,
    `checked` is false when the language is unknown or a check was inconclusive."""

    type: Literal["validate"]
    source: Text = Field(examples=["{{ draft.text }}"])
    """Template: the code."""
    language: Text = Field(examples=["{{ language }}"])
    """Template: its language."""
    checkers: list[Checker] = Field(default_factory=list, max_length=8, examples=[["ruff"]])
    """Compilers and linters of the deployment; each checks code in its language once the syntax is
    right."""


class TransformPart(NodePart):
    """Render a text; its result is `{text, value}`."""

    type: Literal["transform"]
    text: Text = Field(examples=["{{ parts | join('\\n', 'text') }}"])
    """Template."""
    as_json: bool = False
    """Parse the text as JSON into `value`."""


RESULT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "llm": ("text", "tokens", "finish_reason"),
    "retrieve": ("snippets",),
    "analyze": (
        "ok", "language", "definitions", "imports", "scope", "chunks", "identifiers",
    ),
    "validate": ("ok", "errors", "code", "checked"),
    "transform": ("text", "value"),
}  # fmt: skip
"""The fields of a node's result by its type; the docstrings above describe them."""

AnyNodePart = Annotated[
    LlmPart | RetrievePart | AnalyzePart | ValidatePart | TransformPart,
    Field(discriminator="type"),
]


class WorkflowPart(Part):
    """A task's workflow: its inputs, nodes, answer and SLA."""

    name: Task = Field(examples=["code-generation"])
    """The task's name, used by clients."""
    description: str = Field(default="", max_length=2000)
    sla: SlaPart
    inputs: dict[
        Id,
        Annotated[
            InputPart, BeforeValidator(_long_form, json_schema_input_type=InputPart | InputType)
        ],
    ] = Field(default_factory=dict, examples=[{"instruction": "str"}])
    """The inputs of the task: `name: type`, or `name: {type, default, description}`."""
    nodes: dict[Id, AnyNodePart] = Field(min_length=1, max_length=MAX_NODES)
    """The DAG's nodes by name."""
    stream: Text | None = Field(default=None, examples=["refine else draft"])
    """The node whose text is streamed: the first of these that runs. Without it the answer is sent
    at the end."""
    output: Text = Field(examples=["refine else draft"])
    """The node whose result is the answer: the first of these that finished."""
