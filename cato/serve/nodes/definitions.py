"""Reads a syntax tree: its definitions, their kinds and places, its imports and identifiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from tree_sitter import Node

from cato.serve.nodes.languages import Parsed

# A definition's text includes its members: this bounds the result to a multiple of the source,
# however deeply namespaces nest.
MAX_NESTING = 8
# Node types of all grammars in one table: a name shared by two grammars means the same in both.
_KINDS = {
    "function_definition": "function",
    "function_declaration": "function",
    "generator_function_declaration": "function",
    "function_item": "function",
    "function_signature": "function",
    "function_signature_item": "function",
    "local_function_statement": "function",
    "macro_definition": "macro",
    "method_declaration": "method",
    "method_definition": "method",
    "method_signature": "method",
    "abstract_method_signature": "method",
    "constructor_declaration": "method",
    "compact_constructor_declaration": "method",
    "destructor_declaration": "method",
    "class_definition": "class",
    "class_declaration": "class",
    "abstract_class_declaration": "class",
    "class_specifier": "class",
    "record_declaration": "class",
    "interface_declaration": "interface",
    "annotation_type_declaration": "interface",
    "trait_item": "interface",
    "struct_specifier": "struct",
    "struct_declaration": "struct",
    "struct_item": "struct",
    "union_specifier": "struct",
    "union_item": "struct",
    "impl_item": "impl",
    "enum_specifier": "enum",
    "enum_declaration": "enum",
    "enum_item": "enum",
    "type_definition": "type",
    "type_alias_declaration": "type",
    "alias_declaration": "type",
    "type_alias": "type",
    "type_spec": "type",
    "type_item": "type",
    "delegate_declaration": "type",
    "namespace_definition": "namespace",
    "namespace_declaration": "namespace",
    "file_scoped_namespace_declaration": "namespace",
    "internal_module": "namespace",
    "mod_item": "namespace",
    # Functions only if their value is one; see `_has_function_value`.
    "variable_declarator": "function",
    "field_definition": "function",
    "public_field_definition": "function",
}
_VALUE_HOLDERS = {"variable_declarator", "field_definition", "public_field_definition"}
_FUNCTION_VALUES = {"arrow_function", "function_expression", "generator_function"}
# `struct stat s;` mentions a type, `struct stat {...}` defines it.
_NEED_BODY = {"class_specifier", "struct_specifier", "union_specifier", "enum_specifier"}
_CLASS_LIKE = {"class", "interface", "struct", "impl", "enum"}
_CALLABLE = {"function", "method", "macro"}
# Nodes around a definition that belong to its text.
_WRAPPERS = {
    "decorated_definition",
    "export_statement",
    "template_declaration",
    "ambient_declaration",
    "lexical_declaration",
    "variable_declaration",
    "type_declaration",
}
_IMPORTS = {
    "import_statement",
    "import_from_statement",
    "future_import_statement",
    "import_declaration",
    "preproc_include",
    "using_directive",
    "using_declaration",
    "use_declaration",
    "extern_crate_declaration",
}


@dataclass(frozen=True, slots=True)
class Definition:
    """A definition found in a tree. `start`, `end` and `name_at` are byte offsets.

    `depth` counts the enclosing definitions; `is_local`: one of them is a function.
    """

    kind: str
    name: str
    name_at: int
    start: int
    end: int
    start_row: int
    end_row: int
    depth: int = 0
    is_local: bool = False


@cache
def _role(kind: str) -> str | None:
    """The role of a node type: a definition or its wrapper, an import, an identifier, or None.

    A compound name is not an identifier; its parts are.
    """
    if kind in _KINDS or kind in _WRAPPERS:
        return "definition"
    if kind in _IMPORTS:
        return "import"
    composed = ("qualified", "scoped", "nested", "dotted", "_")
    return "identifier" if kind.endswith("identifier") and not kind.startswith(composed) else None


def by_role(root: Node) -> dict[str, list[Node]]:
    """The nodes of each role in source order, outer before inner.

    Walks the tree, about 1 us per node. tree-sitter's query would take time quadratic in the depth
    of the tree (20,000 nested brackets: 0.4 s, 200,000: 40 s) and hold the GIL.
    """
    found: dict[str, list[Node]] = {"definition": [], "import": [], "identifier": []}
    pending = [root]
    while pending:
        node = pending.pop()
        if (role := _role(node.type)) and node.end_byte > node.start_byte:
            found[role].append(node)
        if node.child_count:
            pending += reversed(node.children)
    return found


def definitions_of(parsed: Parsed, nodes: Sequence[Node]) -> Iterator[Definition]:
    """Definitions in source order, outer before inner; `nodes` include their wrappers."""
    around: list[Definition] = []
    wrapped: dict[int, Node] = {}  # the outermost wrapper of a node, by the node's id
    for node in nodes:
        whole = wrapped.get(node.id, node)
        if node.type in _WRAPPERS:
            inside = node.named_children
            if sum(c.type in ("variable_declarator", "type_spec") for c in inside) <= 1:
                wrapped.update((c.id, whole) for c in inside)
            continue
        found = _definition(parsed, node, whole)
        if found is None:
            continue
        while around and around[-1].end <= node.start_byte:
            around.pop()
        outer = around[-1] if around else None
        if outer is not None:
            # A typedef of a struct is one definition, not two.
            if outer.kind == "type" and found.kind != "type":
                continue
            is_member = found.kind == "function" and outer.kind in _CLASS_LIKE
            found = replace(
                found,
                kind="method" if is_member else found.kind,
                depth=outer.depth + 1,
                is_local=outer.is_local or outer.kind in _CALLABLE,
            )
        around.append(found)
        yield found


def _definition(parsed: Parsed, node: Node, whole: Node) -> Definition | None:
    """The definition at `node`, or None; `whole` is the node with its wrappers."""
    if node.type in _VALUE_HOLDERS and not _has_function_value(node):
        return None
    if node.type in _NEED_BODY and node.child_by_field_name("body") is None:
        return None
    name = _name_node(node)
    if name is None or name.start_byte == name.end_byte:
        return None
    end_row, end_column = whole.end_point
    return Definition(
        kind=_KINDS[node.type],
        name=" ".join(parsed.text(name).split()),
        name_at=name.start_byte,
        start=whole.start_byte,
        end=whole.end_byte,
        start_row=whole.start_point.row,
        # A node that includes its newline ends in the previous row.
        end_row=end_row - 1 if end_column == 0 and end_row else end_row,
    )


def _has_function_value(node: Node) -> bool:
    value = node.child_by_field_name("value")
    return value is not None and value.type in _FUNCTION_VALUES


def _name_node(node: Node) -> Node | None:
    """The name node of a definition; in C and C++ it is inside nested declarators."""
    if node.type == "impl_item":
        return node.child_by_field_name("type")
    found = node.child_by_field_name("name") or node.child_by_field_name("property")
    inner = node.child_by_field_name("declarator")
    while found is None and inner is not None:
        deeper = inner.child_by_field_name("declarator")
        if deeper is None and inner.type == "reference_declarator":  # the one without a field
            deeper = inner.named_child(0) if inner.named_child_count else None
        if deeper is None:
            return inner
        inner = deeper
    return found
