"""Messages' blocks and tools that vLLM 0.32 cannot read: documents become text, others are refused.

Without this its refusal is a list of types that tells nobody what to do. Models of Anthropic know
some tools without their schema, and read PDF files; other models do not.
"""

from __future__ import annotations

from collections.abc import Mapping

from cato.core.errors import InputError

Block = Mapping[str, object]

_FIELD = "messages"
# How the types of blocks end that come from tools which Anthropic's servers run.
_OF_SERVERS = ("_tool_use", "_tool_result", "container_upload")


def with_plain_blocks(body: dict[str, object]) -> dict[str, object]:
    """`body` with its documents and search results as text blocks.

    Raise `InputError` for documents that are no text, for blocks that only Anthropic's servers
    make, and for tools without a schema.
    """
    _check_tools(body.get("tools"))
    said = body.get(_FIELD)
    if not isinstance(said, list):
        return body
    plain = [_with_content(one) if isinstance(one, Mapping) else one for one in said]
    is_same = all(new is old for new, old in zip(plain, said, strict=True))
    return body if is_same else {**body, _FIELD: plain}


def _check_tools(tools: object) -> None:
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, Mapping) and not isinstance(tool.get("input_schema"), Mapping):
            kind = tool.get("type") or "custom"
            raise InputError(
                f"tool {tool.get('name')!r} (type {kind}) has no input_schema: no tools run on "
                "this server, and its models know none by their type. Send a description and an "
                "input_schema, and run the tool in the client, or leave it out.",
                "tools",
            )


def _with_content(holder: Block) -> Block:
    """A message, or a tool's result, with plain blocks; itself if it had no others."""
    content = holder.get("content")
    if not isinstance(content, list):
        return holder
    plain = [_block(block) if isinstance(block, Mapping) else block for block in content]
    is_same = all(new is old for new, old in zip(plain, content, strict=True))
    return holder if is_same else {**holder, "content": plain}


def _block(block: Block) -> Block:
    match block.get("type"):
        case "tool_result":
            return _with_content(block)
        case "document":
            head = [f"Document: {block['title']}"] if block.get("title") else ["Document:"]
            context = [str(block["context"])] if block.get("context") else []
            return _text([*head, *context, _document(block.get("source"))])
        case "search_result":
            names = " ".join(str(block[n]) for n in ("title", "source") if block.get(n))
            return _text([f"Search result: {names}", _texts(block.get("content"))])
        case str() as kind if kind != "tool_use" and kind.endswith(_OF_SERVERS):
            raise InputError(
                f"a block of type {kind} cannot be read here: Anthropic's servers make it. "
                "Leave it out, or send what it says as text.",
                _FIELD,
            )
    return block


def _text(lines: list[str]) -> Block:
    return {"type": "text", "text": "\n".join(lines)}


def _document(source: object) -> str:
    match source:
        case {"type": "text", "data": str() as text}:
            return text
        case {"type": "content", "content": content}:
            return _texts(content)
    kind = source.get("type") if isinstance(source, Mapping) else None
    raise InputError(
        f"a document with a source of type {kind} cannot be read here: files are not converted. "
        'Send its text, as the source {"type": "text", "media_type": "text/plain", "data": TEXT}, '
        "or its pages as images to a model that reads images.",
        _FIELD,
    )


def _texts(content: object) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    texts = [b.get("text") if isinstance(b, Mapping) else None for b in blocks]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError("documents and search results must consist of text blocks", _FIELD)
    return "\n".join(map(str, texts))
