"""Loading workflow files into checked `Workflow` values, and checking a caller's inputs.

All problems of a file are reported at once, by three passes: the schema of each key, the graph of
the well-formed nodes, and the templates with the names they use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cato.config.problems import problems_of, shown
from cato.config.yaml_file import read_yaml
from cato.core.errors import ConfigError, ExpressionError, InputError, Problem
from cato.core.ids import NodeId, TaskName
from cato.core.slo import Slo, SloMetric
from cato.core.words import did_you_mean
from cato.core.workflow import (
    ITEM_NAMES,
    AnalyzeSettings,
    Expression,
    FimPrompt,
    InputSpec,
    LlmSettings,
    Node,
    NodeKind,
    NodeSettings,
    Repeat,
    RetrieveSettings,
    TransformSettings,
    ValidateSettings,
    Workflow,
    count_of,
    list_of,
)
from cato.workflows import graph
from cato.workflows.sandbox import MAPPING_MEMBERS, members_of
from cato.workflows.schema import (
    DEFAULT_MAX_ITEMS,
    MAX_NODES,
    MAX_TEXT_CHARS,
    PYTHON_TYPES,
    RESULT_FIELDS,
    TYPE_WORDS,
    AnalyzePart,
    AnyNodePart,
    InputPart,
    LlmPart,
    NodePart,
    RetrievePart,
    TransformPart,
    ValidatePart,
    WorkflowPart,
    fits_type,
)
from cato.workflows.templates import (
    JinjaExpression,
    JinjaTemplate,
    compile_expression,
    compile_template,
)

MAX_CHAIN = 32
"""Longest chain of nodes."""

MIN_DEADLINE_S = 10.0
DEADLINE_PER_TARGET = 20.0
"""Default hard deadline: this many times the target, because a later answer is useless, but at
least `MIN_DEADLINE_S`."""

_JINJA_NAMES = (
    "and or not in is if else true false none True False None "
    "self super loop range caller varargs kwargs"
)
RESERVED_NAMES = ITEM_NAMES.union(_JINJA_NAMES.split())
"""Names that already have a meaning in templates."""

AUTO_TASK = "auto"
"""No task's name: its model's name would be the one that lets CATO choose a task."""

_EMPTY_TEMPLATE = compile_template("")
_EMPTY_EXPRESSION = compile_expression("none")
_NODE: TypeAdapter[Any] = TypeAdapter(AnyNodePart)


def load_workflow(path: Path) -> Workflow:
    """The workflow in the file at `path`; raise `ConfigError` with every problem found."""
    draft = _Draft(str(path), path.parent, read_yaml(path, aliases=False))
    workflow = draft.check()
    if workflow is None or draft.problems:
        raise ConfigError(tuple(draft.problems))
    return workflow


def files_of_workflows(folder: Path, ending: str = ".yaml") -> list[Path]:
    """The workflow files of a folder, by name. Hidden ones are left out: editors keep locks and
    copies beside a file that is being edited (`.#review.yaml`)."""
    return sorted(p for p in folder.glob(f"*{ending}") if not p.name.startswith("."))


def load_workflows(folder: Path) -> dict[TaskName, Workflow]:
    """All workflows of a folder by task; raise `ConfigError` with the problems of all files."""
    by_file, problems = read_workflows(folder)
    if problems:
        raise ConfigError(problems)
    return {workflow.name: workflow for workflow in by_file.values()}


def read_workflows(folder: Path) -> tuple[dict[Path, Workflow], tuple[Problem, ...]]:
    """The valid workflows of a folder by file, and the problems of the other files. Raise
    `ConfigError` without such a folder."""
    if not folder.is_dir():
        raise ConfigError((Problem(str(folder), "", "", "no such folder of workflows"),))
    by_file: dict[Path, Workflow] = {}
    files: dict[TaskName, Path] = {}
    problems: list[Problem] = [
        Problem(str(path), "", "", "is not read: rename it to end in .yaml")
        for path in files_of_workflows(folder, ".yml")
    ]
    for path in files_of_workflows(folder):
        try:
            workflow = load_workflow(path)
        except ConfigError as exc:
            problems += exc.problems
            continue
        if workflow.name in files:
            rule = f"the task is already defined in {files[workflow.name]}"
            problems.append(Problem(str(path), "name", repr(workflow.name), rule))
            continue
        by_file[path], files[workflow.name] = workflow, path
    return by_file, tuple(problems)


def check_inputs(
    workflow: Workflow, values: Mapping[str, object], shape: str = ""
) -> dict[str, object]:
    """`values` with defaults filled in; raise one `InputError` that lists every problem.

    None means not given: many clients send null for inputs that they leave out. `shape` tells
    callers whose body is not made of inputs how to give those that are missing.
    """
    specs = {spec.name: spec for spec in workflow.inputs}
    problems: dict[str, str] = {}
    for name in values:
        if name not in specs:
            hint = did_you_mean(name, specs) or f"; known: {', '.join(specs) or 'none'}"
            problems[name] = f"unknown input {name!r}{hint}"
    checked: dict[str, object] = {}
    is_incomplete = False
    for name, spec in specs.items():
        value = values.get(name)
        if value is not None and fits_type(spec.type, value):
            checked[name] = float(value) if spec.type == "float" else value  # type: ignore[arg-type]
        elif value is not None:
            problems[name] = f"input {name!r} must be {TYPE_WORDS[spec.type]}"
        elif spec.required:
            problems[name] = f"input {name!r} is required ({TYPE_WORDS[spec.type]})"
            is_incomplete = True
        else:
            checked[name] = spec.default
    if problems:
        param = next(iter(problems)) if len(problems) == 1 else None
        how = f"; give inputs in the body as {shape}" if is_incomplete and shape else ""
        raise InputError("; ".join(problems.values()) + how, param)
    return checked


@dataclass
class _Draft:
    """A workflow file being checked. Collects `problems`; nothing here raises."""

    file: str
    folder: Path
    data: object
    problems: list[Problem] = field(default_factory=list)

    def check(self) -> Workflow | None:
        """The workflow; None or incomplete if there are `problems`."""
        if not isinstance(self.data, dict):
            self._add("", "must be a mapping with `name`, `sla`, `nodes` and `output`", self.data)
            return None
        part = None
        try:
            part = WorkflowPart.model_validate(self.data)
        except ValidationError as exc:
            self.problems += problems_of(exc, WorkflowPart, self.file)
        if len(self.needs) > MAX_NODES:
            return None  # already reported; checking a graph of any size could take long
        self._check_ids()
        self._check_graph()
        self._check_loops()
        stream, output = self._preference("stream"), self._preference("output")
        self._check_stream(stream)
        self._check_use((*stream, *output))
        nodes = {id: self._node(id, node) for id, node in self.parts.items()}
        if part is None or self.problems:
            return None
        return Workflow(
            name=TaskName(part.name),
            description=part.description,
            slo=Slo(SloMetric(part.sla.metric), part.sla.target),
            hard_deadline_s=part.sla.deadline
            or max(MIN_DEADLINE_S, DEADLINE_PER_TARGET * part.sla.target),
            inputs=tuple(_input(name, spec) for name, spec in part.inputs.items()),
            nodes=tuple(nodes[id] for id in self.order),
            output=tuple(NodeId(id) for id in output),
            stream=tuple(NodeId(id) for id in stream),
            session_target_s=part.sla.session,
        )

    # Facts about the file that hold even when parts of it are wrong

    @cached_property
    def _raw(self) -> dict[str, Any]:
        return self.data if isinstance(self.data, dict) else {}

    @cached_property
    def inputs(self) -> list[str]:
        inputs = self._raw.get("inputs")
        return list(inputs) if isinstance(inputs, dict) else []

    @cached_property
    def input_types(self) -> dict[str, str]:
        """The types of the inputs, where they are known ones."""
        given = {name: self._raw["inputs"][name] for name in self.inputs}
        types = {n: v.get("type") if isinstance(v, dict) else v for n, v in given.items()}
        return {n: t for n, t in types.items() if isinstance(t, str) and t in PYTHON_TYPES}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The default values of the inputs that have one."""
        given = {name: self._raw["inputs"][name] for name in self.inputs}
        return {n: v["default"] for n, v in given.items() if isinstance(v, dict) and "default" in v}

    @cached_property
    def needs(self) -> dict[str, list[str]]:
        """The needs of every node, well-formed or not."""
        nodes = self._raw.get("nodes")
        if not isinstance(nodes, dict):
            return {}
        return {
            id: _texts(node.get("needs")) if isinstance(node, dict) else []
            for id, node in nodes.items()
        }

    @cached_property
    def parts(self) -> dict[str, NodePart]:
        """The well-formed nodes."""
        parts = {}
        for id in self.needs:
            try:
                parts[id] = _NODE.validate_python(self._raw["nodes"][id])
            except ValidationError:
                continue  # reported with the whole file
        return parts

    @cached_property
    def order(self) -> list[str]:
        return graph.topological_order(self.needs)

    @cached_property
    def ancestors(self) -> dict[str, frozenset[str]]:
        return graph.ancestors(self.needs)

    @cached_property
    def loops(self) -> dict[str, list[str]]:
        """The `redo` of every repeating node."""
        return {id: p.repeat.redo for id, p in self.parts.items() if p.repeat is not None}

    # Passes

    def _check_ids(self) -> None:
        if self._raw.get("name") == AUTO_TASK:
            rule = "this name is taken: the model cato-auto chooses a task by the request's shape"
            self._add("name", rule)
        for name in self.inputs:
            if name in RESERVED_NAMES:
                self._add(f"inputs.{name}", "this name already has a meaning in templates")
        for id in self.needs:
            if id in RESERVED_NAMES:
                self._add(f"nodes.{id}", "this name already has a meaning in templates")
            if id in self.inputs:
                self._add(f"nodes.{id}", "an input already has this name")

    def _check_graph(self) -> None:
        for id, needs in self.needs.items():
            for need in dict.fromkeys(needs):
                if need not in self.needs:
                    self._add(f"nodes.{id}.needs", self._unknown_node(need))
                elif needs.count(need) > 1:
                    self._add(f"nodes.{id}.needs", f"node {need!r} is given twice")
        for cycle in graph.cycles(self.needs):
            path = " -> ".join((*cycle, cycle[0]))
            self._add(f"nodes.{cycle[0]}.needs", f"nodes need each other in a cycle: {path}")
        if (chain := graph.depth(self.needs)) > MAX_CHAIN:
            self._add("nodes", f"a chain of {chain} nodes; at most {MAX_CHAIN} are allowed")

    def _check_loops(self) -> None:
        for owner, redo in self.loops.items():
            where = f"nodes.{owner}.repeat.redo"
            for id in dict.fromkeys(redo):
                if id not in self.needs:
                    self._add(where, self._unknown_node(id))
                    continue
                if redo.count(id) > 1:
                    self._add(where, f"node {id!r} is given twice")
                if id not in self.ancestors[owner]:
                    self._add(where, f"node {id!r} is not an ancestor of {owner!r}")
                for other in self.needs:
                    if id in self.needs[other] and other not in (owner, *redo):
                        rule = f"node {id!r} is run again, but {other!r} needs it"
                        self._add(where, f"{rule}; only {owner!r} and other nodes of `redo` may")
                part = self.parts.get(id)
                if part is not None and (part.when is not None or part.repeat is not None):
                    self._add(where, f"node {id!r} must not have `when` or `repeat` itself")

    def _preference(self, key: str) -> list[str]:
        """The nodes of `refine else draft`."""
        text = self._raw.get(key)
        if not isinstance(text, str) or not text:
            return []
        ids = re.split(r"\s+else\s+", text.strip())
        for id in dict.fromkeys(ids):
            if not re.fullmatch(r"\w+", id):
                rule = "must be a node, or several with `else` between: refine else draft"
                self._add(key, rule, text)
            elif id not in self.needs:
                self._add(key, self._unknown_node(id))
            elif ids.count(id) > 1:
                self._add(key, f"node {id!r} is given twice")
        return [id for id in ids if id in self.needs]

    def _check_stream(self, stream: Sequence[str]) -> None:
        for id in stream:
            part = self.parts.get(id)
            if part is not None and not isinstance(part, LlmPart | TransformPart):
                self._add("stream", f"node {id!r} has no text to stream: only llm, transform do")
            if part is not None and part.each is not None:
                self._add("stream", f"node {id!r} cannot be streamed: it runs once per item")
        sla = self._raw.get("sla")
        metric = sla.get("metric") if isinstance(sla, dict) else None
        if metric in ("ttft", "tpot") and self._raw.get("stream") is None:
            rule = f"an SLA on {metric} needs `stream`, the node whose tokens count"
            self._add("sla.metric", rule)

    def _check_use(self, goals: Sequence[str]) -> None:
        said = {"stream", "output", *(f"nodes.{id}.needs" for id in self.needs)}
        if not goals or any(p.path in said for p in self.problems):
            return  # a misspelt name must not make its owner look unused
        used = set(goals).union(*(self.ancestors[id] for id in goals))
        for id in self.needs:
            if id not in used:
                self._add(f"nodes.{id}", "is not used: no node of `stream` or `output` needs it")

    # Building

    def _node(self, id: str, part: NodePart) -> Node:
        where, known = f"nodes.{id}", {*self.inputs, *self.ancestors[id]}
        inside = known | ITEM_NAMES if part.each is not None else known
        # In a loop the nodes see the previous round: `{{ refine.text or draft.text }}`.
        inside = inside | {o for o, redo in self.loops.items() if id == o or id in redo}
        repeat = None
        each = self._optional_expression(f"{where}.each", part.each, known)
        if part.each is not None:
            self._check_each(f"{where}.each", part.each)
        self._check_value(f"{where}.each", part, each, list_of)
        if part.repeat is not None:
            repeat = Repeat(
                until=self._expression(f"{where}.repeat.until", part.repeat.until, known | {id}),
                max_rounds=part.repeat.max,
                redo=tuple(NodeId(n) for n in self.order if n in part.repeat.redo),
            )
        return Node(
            id=NodeId(id),
            kind=NodeKind(self._raw["nodes"][id]["type"]),
            settings=self._settings(where, part, inside),
            needs=tuple(NodeId(n) for n in part.needs),
            when=self._optional_expression(f"{where}.when", part.when, known),
            each=each,
            max_items=(part.max_items or DEFAULT_MAX_ITEMS) if part.each is not None else 1,
            repeat=repeat,
            optional=part.optional,
            budget_s=part.budget,
        )

    def _settings(self, where: str, part: NodePart, known: Collection[str]) -> NodeSettings:
        def template(key: str, text: str) -> JinjaTemplate:
            return self._template(f"{where}.{key}", text, known)

        def prompt(key: str, text: str | None) -> JinjaTemplate | None:
            return None if text is None else self._prompt(f"{where}.{key}", text, known)

        match part:
            case LlmPart():
                fim = None
                if part.fim is not None:
                    context = part.fim.context
                    fim = FimPrompt(
                        prefix=template("fim.prefix", part.fim.prefix),
                        suffix=template("fim.suffix", part.fim.suffix),
                        context=template("fim.context", context) if context else None,
                    )
                extra = {
                    key: value
                    for key in ("temperature", "top_p", "stop", "seed")
                    if (value := getattr(part, key)) is not None
                }
                limit = self._optional_expression(f"{where}.token_limit", part.token_limit, known)
                self._check_value(f"{where}.token_limit", part, limit, count_of)
                return LlmSettings(
                    model=part.model,
                    max_tokens=part.max_tokens,
                    expected_tokens=part.expected_tokens or max(1, part.max_tokens // 2),
                    prompt=prompt("prompt", part.prompt),
                    fim=fim,
                    chat=prompt("chat", part.chat),
                    system=prompt("system", part.system),
                    extra={**extra, **part.extra} or None,
                    token_limit=limit,
                    fallback=part.fallback,
                )
            case RetrievePart():
                return RetrieveSettings(part.index, template("query", part.query), part.top_k)
            case AnalyzePart():
                return AnalyzeSettings(
                    source=template("source", part.source),
                    language=template("language", part.language),
                    cursor=None if part.cursor is None else template("cursor", part.cursor),
                )
            case ValidatePart():
                return ValidateSettings(
                    template("source", part.source),
                    template("language", part.language),
                    tuple(dict.fromkeys(part.checkers)),
                )
            case TransformPart():
                return TransformSettings(template("text", part.text), part.as_json)
            case _:
                raise AssertionError(f"no settings for {type(part).__name__}")

    def _template(self, where: str, text: str, known: Collection[str]) -> JinjaTemplate:
        try:
            template = compile_template(text)
        except ExpressionError as exc:
            self._add(where, exc.problem)
            return _EMPTY_TEMPLATE
        self._check_names(where, template.names, known)
        self._check_fields(where, template.attributes)
        return template

    def _expression(self, where: str, text: str, known: Collection[str]) -> JinjaExpression:
        try:
            expression = compile_expression(text)
        except ExpressionError as exc:
            self._add(where, exc.problem, text)
            return _EMPTY_EXPRESSION
        self._check_names(where, expression.names, known)
        self._check_fields(where, expression.attributes)
        return expression

    def _optional_expression(
        self, where: str, text: str | None, known: Collection[str]
    ) -> JinjaExpression | None:
        return None if text is None else self._expression(where, text, known)

    def _check_names(self, where: str, names: frozenset[str], known: Collection[str]) -> None:
        for name in sorted(names.difference(known)):
            if name in self.needs:
                if self._has_unknown_needs(where):
                    continue  # its `needs` may have misspelt this very name
                rule = f"uses node {name!r}, which may not have run before: add it to `needs`"
            elif name in ITEM_NAMES:
                rule = f"{name!r} exists only in the templates of a node with `each`"
            else:
                hint = did_you_mean(name, known) or f"; known: {', '.join(sorted(known)) or 'none'}"
                rule = f"unknown name {name!r}{hint}"
            self._add(where, rule)

    def _check_fields(self, where: str, attributes: frozenset[tuple[str, str]]) -> None:
        """Report attributes that a node's result or an input never has: they render as nothing."""
        for name, attribute in sorted(attributes):
            if name in self.parts:
                rule = self._no_field(name, attribute)
            else:
                rule = self._no_member(name, attribute)
            if rule:
                self._add(where, rule)

    def _no_field(self, id: str, name: str) -> str:
        """Why the result of the node has no such field; empty if it has."""
        if self.parts[id].each is not None:
            if name in members_of(list):
                return ""
            return f"node {id!r} has `each`: its result is a list, without {name!r}; loop over it"
        kind, fields = self._fields(id)
        if name in fields or name in MAPPING_MEMBERS:
            return ""
        hint = did_you_mean(name, fields) or f"; it has {', '.join(fields)}"
        return f"node {id!r} is {kind}: its result has no {name!r}{hint}"

    def _no_member(self, name: str, member: str) -> str:
        """Why the input has no such member; empty if it has, or if there is no such input."""
        type_ = self.input_types.get(name)
        if type_ is None or member in members_of(PYTHON_TYPES[type_]):
            return ""
        return f"input {name!r} is {TYPE_WORDS[type_]}, which has no {member!r}"

    def _check_each(self, where: str, text: str) -> None:
        """Report an `each` that names a value that is never a list."""
        name = text.strip()
        if (type_ := self.input_types.get(name, "list")) != "list":
            self._add(where, f"must be a list; input {name!r} is {TYPE_WORDS[type_]}")
        part = self.parts.get(name)
        if part is not None and part.each is None:
            _, fields = self._fields(name)
            rule = f"must be a list; the result of node {name!r} has {', '.join(fields)}"
            self._add(where, rule)

    def _check_value(
        self,
        where: str,
        part: NodePart,
        expression: JinjaExpression | None,
        value_of: Callable[[Expression, Mapping[str, object]], object],
    ) -> None:
        """Report an expression of constants whose value its node cannot use, and one of inputs
        whose defaults it cannot use. A node with a condition may not run with the defaults."""
        usable = {} if part.when is not None or part.optional else self.defaults
        if expression is None or not expression.names <= set(usable):
            return
        try:
            value_of(expression, usable)
        except ExpressionError as exc:
            by_default = " with the defaults of its inputs" if expression.names else ""
            self._add(where, exc.problem + by_default, expression.source)

    def _fields(self, id: str) -> tuple[str, tuple[str, ...]]:
        """The type of a well-formed node and the fields of its result."""
        kind = str(self._raw["nodes"][id]["type"])
        return kind, RESULT_FIELDS[kind]

    def _prompt(self, where: str, text: str, known: Collection[str]) -> JinjaTemplate:
        """The template in a file, or `text` itself; see `LlmPart.prompt`."""
        if "\n" in text or "{{" in text or (" " in text and not text.endswith(".j2")):
            return self._template(where, text, known)
        source = self._prompt_file(where, text)
        return _EMPTY_TEMPLATE if source is None else self._template(where, source, known)

    def _prompt_file(self, where: str, name: str) -> str | None:
        rule = None
        if not name.endswith(".j2"):
            rule = "a text without a blank is read as a file name, which must end in .j2"
        elif name.startswith(("/", "\\")) or ".." in PurePosixPath(name.replace("\\", "/")).parts:
            rule = "must be a file in the workflow file's folder, or below"
        if rule is not None:
            self._add(where, rule, name)
            return None
        try:
            path = (self.folder / name).resolve()
            if not path.is_relative_to(self.folder.resolve()):  # a link that leads out
                self._add(where, "must be a file in the workflow file's folder, or below", name)
                return None
            with path.open("rb") as stream:
                data = stream.read(4 * MAX_TEXT_CHARS + 1)
            text = data.decode("utf-8-sig")  # some editors write a byte order mark
        except UnicodeDecodeError:
            self._add(where, "the prompt file is not UTF-8 text", name)
        except (OSError, ValueError, RuntimeError) as exc:  # a NUL in the name, a cycle of links
            reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
            self._add(where, f"the prompt file cannot be read: {reason}", name)
        else:
            return text.replace("\r\n", "\n")
        return None

    def _has_unknown_needs(self, where: str) -> bool:
        """Whether the node that has `where`, or one before it, needs a node that does not exist."""
        # Ids with a dot were reported, and are here all the same.
        id = max((n for n in self.needs if where.startswith(f"nodes.{n}.")), key=len)
        return any(n not in self.needs for a in (id, *self.ancestors[id]) for n in self.needs[a])

    # Words

    def _unknown_node(self, id: str) -> str:
        return f"unknown node {id!r}{did_you_mean(id, self.needs)}"

    def _add(self, where: str, rule: str, value: object = None) -> None:
        found = "" if value is None else shown(value)
        self.problems.append(Problem(self.file, where, found, rule))


def _input(name: str, part: InputPart) -> InputSpec:
    default = part.default
    if part.type == "float" and isinstance(default, int):
        default = float(default)
    return InputSpec(name, part.type, part.is_required, default, part.description)


def _texts(value: object) -> list[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []
