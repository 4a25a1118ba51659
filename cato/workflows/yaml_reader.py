"""Parses one workflow file; whatever is wrong with it becomes a `ConfigError`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cato.core.errors import ConfigError, Problem

MAX_FILE_BYTES = 256_000
"""Longest file read: far above what people write, and PyYAML reads only ~100 kB a second."""

MAX_DEPTH = 32
"""Deepest nesting; workflows need five levels, and PyYAML recurses."""

_TEXT_TAG = "tag:yaml.org,2002:str"


class _Loader(yaml.SafeLoader):
    """YAML's safe types without aliases: a few lines of them can stand for gigabytes."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "an alias (*name) is not allowed; write it out", event.start_mark
            )
        self._depth += 1
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, f"nested deeper than {MAX_DEPTH} levels", mark
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node if isinstance(node, yaml.Node) else None

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as exc:
            # PyYAML lets e.g. `!!int ''` (IndexError) and `2001-99-99` (ValueError) out.
            raise yaml.constructor.ConstructorError(
                None, None, "a value does not fit its type", node.start_mark
            ) from exc


def read_yaml(path: Path) -> object:
    """The data in the file at `path`; raise `ConfigError`."""
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
        raise ConfigError((Problem(str(path), "", "", f"cannot be read: {reason}"),)) from exc
    return parse_yaml(text, str(path))


def parse_yaml(text: bytes, file: str) -> object:
    """The data in `text`; `file` is its name in problems. Raise `ConfigError`."""
    if len(text) > MAX_FILE_BYTES:
        rule = f"longer than {MAX_FILE_BYTES:,} bytes, the most that is read"
        raise ConfigError((Problem(file, "", "", rule),))
    problems: list[Problem] = []
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                problems = [Problem(file, "", "", "the file is empty")]
            else:
                _check_keys(root, file, "", problems)
                if not problems:
                    return loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as exc:
        line = f":{exc.problem_mark.line + 1}" if exc.problem_mark else ""
        words = ", ".join(w for w in (exc.problem, exc.context) if w)
        problems = [Problem(file + line, "", "", f"not valid YAML: {words}")]
    except yaml.YAMLError as exc:  # a character that YAML forbids, or bytes that are not UTF-8
        words = str(exc).split("\n")[0]
        problems = [Problem(file, "", "", f"not valid YAML: {words}")]
    except UnicodeError as exc:
        problems = [Problem(file, "", "", f"not UTF-8 text: {exc}")]
    raise ConfigError(tuple(problems))


def _check_keys(node: yaml.Node, file: str, path: str, problems: list[Problem]) -> None:
    """Note keys given twice (PyYAML keeps the last in silence) and keys that are not text."""
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _check_keys(item, file, f"{path}[{i}]", problems)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            where = f"{file}:{key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode) or key.tag != _TEXT_TAG:
                found = key.value if isinstance(key, yaml.ScalarNode) else ""
                rule = "a key must be text (quote it if it looks like something else)"
                problems.append(Problem(where, path, found, rule))
                continue
            below = f"{path}.{key.value}" if path else key.value
            if key.value in seen:
                problems.append(Problem(where, below, "", "this key is given twice"))
            seen.add(key.value)
            _check_keys(value, file, below, problems)
