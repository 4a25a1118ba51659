"""Reading YAML files that people write: deployments, profiles and workflows.

Every problem is a `ConfigError` with the line; nothing else is raised.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from cato.core.errors import ConfigError, Problem

MAX_FILE_BYTES = 256_000
"""Longest YAML file read: far longer than people write; PyYAML reads only ~100 kB a second."""

MAX_VALUES = 50_000
"""Most values in a file after its aliases are expanded; stops "billion laughs" files."""

MAX_DEPTH = 50
"""Deepest nesting; far below the depth at which PyYAML raises RecursionError."""

_TEXT_TAG = "tag:yaml.org,2002:str"
_MERGE_TAG = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """YAML's safe types, but `1e-5` is a number (as in YAML 1.2) and a date is text.

    Raises `MarkedYAMLError` for a forbidden alias, for nesting that is too deep, and for a value
    that does not fit its tag.
    """

    def __init__(self, text: bytes, aliases: bool) -> None:
        super().__init__(text)
        self._aliases = aliases
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if not self._aliases and self.check_event(yaml.AliasEvent):
            rule = "an alias (*name) is not allowed; write it out"
            raise yaml.composer.ComposerError(None, None, rule, mark)
        if self._depth == MAX_DEPTH:
            rule = f"nested deeper than {MAX_DEPTH} levels"
            raise yaml.composer.ComposerError(None, None, rule, mark)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as exc:
            # PyYAML raises e.g. IndexError for `!!int ''`, ValueError for a 5,000-digit integer.
            raise yaml.constructor.ConstructorError(
                None, None, "a value does not fit its type", node.start_mark
            ) from exc


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def read_yaml(path: Path, *, aliases: bool = True) -> object:
    """The data in the file at `path`; raise `ConfigError`. `aliases`: whether they are allowed."""
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
        raise ConfigError((Problem(str(path), "", "", f"cannot be read: {reason}"),)) from exc
    return parse_yaml(text, str(path), aliases=aliases)


def parse_yaml(text: bytes, file: str, *, aliases: bool = True) -> object:
    """The data in `text`; `file` is its name in problems. Raise `ConfigError`."""
    if len(text) > MAX_FILE_BYTES:
        rule = f"longer than {MAX_FILE_BYTES:,} bytes, the limit"
        raise ConfigError((Problem(file, "", "", rule),))
    problems: list[Problem] = []
    try:
        loader = _Loader(text, aliases)
        try:
            root = loader.get_single_node()
            if root is None:
                raise ConfigError((Problem(file, "", "", "the file is empty"),))
            problems = _node_problems(root, file, aliases)
            if not problems:
                return loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as exc:
        words = ", ".join(w for w in (exc.problem, exc.context) if w)
        problems = [Problem(_at(file, exc.problem_mark), "", "", f"not valid YAML: {words}")]
    except yaml.YAMLError as exc:  # a forbidden character, or bytes that are not UTF-8
        words = str(exc).split("\n")[0]
        problems = [Problem(file, "", "", f"not valid YAML: {words}")]
    except UnicodeError as exc:
        problems = [Problem(file, "", "", f"not UTF-8 text: {exc}")]
    raise ConfigError(tuple(problems))


def unlike_serve(path: Path, file: str) -> list[Problem]:
    """Values of a readable file that Ray Serve takes for something else.

    Serve reads a deployment file itself, with PyYAML: `1e3` is a text there, 2026-01-31 a date.
    """
    with path.open("rb") as stream:
        text = stream.read(MAX_FILE_BYTES)
    problems: list[Problem] = []
    seen: set[int] = set()

    def compare(ours: Any, theirs: Any, path: str) -> None:
        if id(ours) in seen:  # an alias
            return
        seen.add(id(ours))
        if ours.tag != theirs.tag:
            problems.append(Problem(file, path, ours.value, _other_words(ours)))
        elif isinstance(ours, yaml.SequenceNode):
            for i, pair in enumerate(zip(ours.value, theirs.value, strict=True)):
                compare(*pair, f"{path}[{i}]")
        elif isinstance(ours, yaml.MappingNode):
            for (key, value), (their_key, their_value) in zip(
                ours.value, theirs.value, strict=True
            ):
                below = f"{path}.{key.value}" if path else key.value
                compare(key, their_key, below)
                compare(value, their_value, below)

    compare(parse_nodes(text), yaml.compose(text, yaml.SafeLoader), "")
    return problems


def _other_words(node: yaml.ScalarNode) -> str:
    if node.tag == _TEXT_TAG:
        return "Serve takes this for a date: put it in quotes"
    number = yaml.safe_dump(float(node.value)).partition("\n")[0]
    return f"Serve takes this for text: write {number}"


def parse_nodes(text: bytes) -> yaml.Node | None:
    """The syntax tree of `text`; its nodes have line numbers. Raise `yaml.YAMLError`."""
    loader = _Loader(text, True)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _at(file: str, mark: yaml.Mark | None) -> str:
    return file if mark is None else f"{file}:{mark.line + 1}"


def _node_problems(root: yaml.Node, file: str, aliases: bool) -> list[Problem]:
    """Duplicate keys (PyYAML silently keeps the last), keys that are not text, and aliases that
    make the data huge or infinite."""
    key_tags = (_TEXT_TAG, _MERGE_TAG) if aliases else (_TEXT_TAG,)
    problems: list[Problem] = []
    measured: dict[int, tuple[int, int]] = {}  # by identity: an alias is the same node object
    open_: set[int] = set()

    def measure(node: yaml.Node, path: str) -> tuple[int, int]:
        """The number of values and levels of `node`, with aliases expanded."""
        if id(node) in open_:
            rule = "this alias refers to itself"
            raise ConfigError((Problem(_at(file, node.start_mark), path, "", rule),))
        if id(node) in measured:
            return measured[id(node)]
        open_.add(id(node))
        inner: list[tuple[int, int]] = []
        if isinstance(node, yaml.SequenceNode):
            inner = [measure(item, f"{path}[{i}]") for i, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                where = _at(file, key.start_mark)
                if not isinstance(key, yaml.ScalarNode) or key.tag not in key_tags:
                    found = key.value if isinstance(key, yaml.ScalarNode) else ""
                    rule = "a key must be text (quote it if it looks like something else)"
                    problems.append(Problem(where, path, found, rule))
                    continue
                below = f"{path}.{key.value}" if path else str(key.value)
                if key.value in seen:
                    problems.append(Problem(where, below, "", "this key is given twice"))
                seen.add(key.value)
                inner.append(measure(value, below))
        open_.discard(id(node))
        size = 1 + sum(s for s, _ in inner)
        depth = 1 + max((d for _, d in inner), default=0)
        measured[id(node)] = size, depth
        return size, depth

    size, depth = measure(root, "")
    if size > MAX_VALUES:
        rule = f"more than {MAX_VALUES:,} values once its aliases are expanded"
        problems.append(Problem(file, "", "", rule))
    if depth > MAX_DEPTH:
        rule = f"nested deeper than {MAX_DEPTH} levels once its aliases are expanded"
        problems.append(Problem(file, "", "", rule))
    return problems
