"""Line numbers of problems in a file.

Schemas report a path (`pools.main.model`). This follows the path through the file's YAML nodes to
its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import yaml

from cato.config.paths import resolve
from cato.config.yaml_file import MAX_FILE_BYTES, parse_nodes
from cato.core.errors import ConfigError, Problem


def with_lines(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """The problems, with the line of their path added to the file: `deploy.yaml:12`.

    A problem is unchanged when its file cannot be read or lacks the path.
    """
    roots: dict[str, list[yaml.Node]] = {}
    found = []
    for problem in problems:
        if problem.file not in roots:
            roots[problem.file] = _roots(problem.file)
        marks = [m for root in roots[problem.file] if (m := _mark_of(root, problem.path))]
        line = max((m.line for m in marks), default=None)
        found.append(
            problem if line is None else replace(problem, file=f"{problem.file}:{line + 1}")
        )
    return tuple(found)


def _roots(file: str) -> list[yaml.Node]:
    """The nodes that a problem's path may start at: the root, and in a deployment file the `args`
    of its applications."""
    try:
        with resolve(file).open("rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
        root = parse_nodes(text) if len(text) <= MAX_FILE_BYTES else None
    except (OSError, ConfigError, yaml.YAMLError, UnicodeError):
        return []
    roots = [] if root is None else [root]
    for app in _items(_entry(root, "applications")):
        roots += [args for args in [_entry(app, "args")] if args is not None]
    return roots


def _mark_of(node: yaml.Node, path: str) -> yaml.Mark | None:
    """The position of the deepest part of `path` below `node`; None if even its first is missing.

    Names may contain dots, so keys are compared with the rest of the path.
    """
    mark: yaml.Mark | None = None
    while path:
        if isinstance(node, yaml.MappingNode):
            fitting = [
                (key, value)
                for key, value in node.value
                if isinstance(key, yaml.ScalarNode)
                and path.startswith(key.value)
                and path[len(key.value) : len(key.value) + 1] in ("", ".", "[")
            ]
            if not fitting:
                break
            key, node = max(fitting, key=lambda kv: len(kv[0].value))
            mark, path = key.start_mark, path[len(key.value) :].removeprefix(".")
            continue
        index = re.match(r"\[(\d+)\]\.?", path)
        items = _items(node)
        if index is None or int(index[1]) >= len(items):
            break
        node = items[int(index[1])]
        mark, path = node.start_mark, path[index.end() :]
    return mark


def _entry(node: yaml.Node | None, name: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((v for k, v in node.value if k.value == name), None)


def _items(node: yaml.Node | None) -> list[yaml.Node]:
    return node.value if isinstance(node, yaml.SequenceNode) else []
