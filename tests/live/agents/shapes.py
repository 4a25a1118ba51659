"""Requests of each client's shape, written by hand: what their makers' prompts are like, not what
they say. For runs in which the clients themselves are not installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
RULES = (
    "Read a file before you change it, and change no more of it than the task needs.",
    "Say in one sentence what you are about to do; afterwards say whether it worked.",
    "Never guess an address, a password or the name of a package; look it up or ask.",
    "Use `git status` before you commit, and do not commit unless you were told to.",
    "Keep to the style of the code around yours: names, comments, imports, line length.",
    "When a command fails, read what it printed before you try it a second time.",
)
NAMES = ("read", "edit", "write", "shell", "search")
# What a tool says: a file with the numbers of its lines.
RESULT = "\n".join(f"{i:6}\tdef part_{i}(value):  # returns value + {i}" for i in range(60))
LONG = "\n".join(
    f"src/module_{i % 7}.py:{i}:    return self.table[name] + offset * {i % 10}" for i in range(160)
)


@dataclass(frozen=True)
class Shape:
    """One client: how its turns look. `said` fields are filled by the tests."""

    name: str
    endpoint: str
    rules: int
    """How often the rules stand in its instructions: clients differ in length."""

    @property
    def instructions(self) -> str:
        return "\n".join(f"{i}.{j} {r}" for i in range(self.rules) for j, r in enumerate(RULES))

    @property
    def mark(self) -> str:
        return f"[script: shape-{self.name}]"

    def steps(self) -> dict[str, list[dict[str, Any]]]:
        """Four answers: two with one call, one with two, and words."""
        read = {"name": "read", "arguments": {"path": "app.py"}}
        return {
            f"shape-{self.name}": [
                {"thinking": "First I look.", "text": "I look.", "calls": [read]},
                {"text": "Again.", "calls": [read]},
                {"text": "Twice.", "calls": [read, read]},
                {"text": "Done."},
            ]
        }

    def headers(self, session: str, agent: str = "") -> Mapping[str, str]:
        """As the client names its session; `agent` is the sub-agent's."""
        match self.name:
            case "claude":
                found = {
                    "User-Agent": "claude-cli/2.1.330 (external, sdk-cli)",
                    "X-Claude-Code-Session-Id": session,
                    "anthropic-version": "2023-06-01",
                }
                return found | ({"x-claude-code-agent-id": agent} if agent else {})
            case "codex":
                thread = agent or session
                found = {
                    "User-Agent": "codex_exec/0.169.0",
                    "originator": "codex_exec",
                    "session-id": session,
                    "thread-id": thread,
                    "x-client-request-id": thread,
                }
                return found | ({"x-codex-parent-thread-id": session} if agent else {})
            case "opencode":
                own = agent or session
                found = {
                    "User-Agent": "opencode/1.18.33",
                    "x-session-id": own,
                    "x-session-affinity": own,
                }
                return found | ({"x-parent-session-id": session} if agent else {})
            case "qwen":
                return {"User-Agent": "QwenCode/0.24.4 (linux; x64)"}
            case "cn":
                return {"User-Agent": "ls/JS 5.23.2"}
            case _:
                return {"User-Agent": "OpenAI/Python 2.20.0"}

    def first(self, session: str) -> Body:
        """The first turn's body."""
        asked = f"Improve the toy of {session}. {self.mark}"
        match self.endpoint:
            case "/v1/messages":
                billing = f"x-anthropic-billing-header: cc_version=2.1.330.{session[:3]};"
                system = [{"type": "text", "text": t} for t in (billing, self.instructions)]
                reminder = "<system-reminder>\nBranch: main\n</system-reminder>"
                blocks = [{"type": "text", "text": t} for t in (reminder, asked)]
                return {
                    "max_tokens": 32_000,
                    "stream": True,
                    "thinking": {"type": "adaptive", "display": "omitted"},
                    "output_config": {"effort": "high"},
                    "metadata": {"user_id": json.dumps({"session_id": session})},
                    "system": system,
                    "tools": [_tool(n, "input_schema") for n in NAMES],
                    "messages": [
                        {"role": "user", "content": blocks},
                        {"role": "system", "content": "# Environment\nA repository."},
                    ],
                }
            case "/v1/responses":
                return {
                    "stream": True,
                    "store": False,
                    "parallel_tool_calls": True,
                    "reasoning": {"summary": "auto"},
                    "include": ["reasoning.encrypted_content"],
                    "prompt_cache_key": session,
                    "tools": [{"type": "function", **_tool(n, "parameters")} for n in NAMES],
                    "tool_choice": "auto",
                    "input": [
                        _item("developer", self.instructions),
                        _item("user", "<environment>A repository.</environment>"),
                        _item("user", asked),
                    ],
                }
            case _:
                functions = [_tool(n, "parameters") for n in NAMES]
                body = {
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "messages": [
                        {"role": "system", "content": self.instructions},
                        {"role": "user", "content": asked},
                    ],
                }
                if self.name == "aider":  # with examples, the same in all its sessions
                    system, said = body["messages"]
                    example = {"role": "user", "content": "Change get_factorial()."}
                    answer = {"role": "assistant", "content": "I need to modify one file."}
                    other = {"role": "user", "content": "I switched to a new code base."}
                    return body | {
                        "temperature": 0,
                        "messages": [system, example, answer, other, said],
                    }
                tools = [{"type": "function", "function": f} for f in functions]
                return body | {"max_tokens": 8192, "tools": tools}

    def next(self, body: Body, said: Said, result: str) -> Body:
        """The body of the turn after one that was answered with `said`."""
        match self.endpoint:
            case "/v1/messages":
                content: list[Body] = []
                if said.thinking:
                    thought = {"type": "thinking", "thinking": said.thinking, "signature": "s"}
                    content.append(thought)
                content.append({"type": "text", "text": said.text})
                for id, name, arguments in said.calls:
                    given = {"replace_all": False, **json.loads(arguments)}
                    content.append({"type": "tool_use", "id": id, "name": name, "input": given})
                results = [
                    {"type": "tool_result", "tool_use_id": id, "content": result}
                    for id, _, _ in said.calls
                ]
                more = [
                    {"role": "assistant", "content": content},
                    {"role": "user", "content": results},
                ]
                return body | {"messages": [*body["messages"], *more]}
            case "/v1/responses":
                items: list[Body] = []
                if said.thinking:
                    texts = [{"type": "reasoning_text", "text": said.thinking}]
                    items.append({"type": "reasoning", "summary": [], "content": texts})
                items.append(_item("assistant", said.text, "output_text"))
                for id, name, arguments in said.calls:
                    named = {"call_id": id, "name": name, "arguments": arguments}
                    items.append({"type": "function_call", **named})
                items += [
                    {"type": "function_call_output", "call_id": id, "output": result}
                    for id, _, _ in said.calls
                ]
                return body | {"input": [*body["input"], *items]}
            case _:
                answer: Body = {"role": "assistant", "content": said.text}
                if said.thinking and self.name != "cn":
                    answer["reasoning_content"] = said.thinking
                if said.calls:
                    answer["tool_calls"] = [
                        {
                            "id": id,
                            "type": "function",
                            "function": {
                                "name": name,
                                # Compact, as the clients write it.
                                "arguments": json.dumps(
                                    json.loads(arguments), separators=(",", ":")
                                ),
                            },
                        }
                        for id, name, arguments in said.calls
                    ]
                tools = [
                    {"role": "tool", "tool_call_id": id, "content": result}
                    for id, _, _ in said.calls
                ]
                return body | {"messages": [*body["messages"], answer, *tools]}


@dataclass(frozen=True)
class Said:
    """An answer, whatever dialect it came in. `calls`: id, name, arguments as JSON text."""

    text: str
    thinking: str
    calls: tuple[tuple[str, str, str], ...]
    prompt_tokens: int
    cached_tokens: int


SHAPES = (
    Shape("claude", "/v1/messages", 60),
    Shape("codex", "/v1/responses", 50),
    Shape("opencode", "/v1/chat/completions", 40),
    Shape("qwen", "/v1/chat/completions", 100),
    Shape("cn", "/v1/chat/completions", 10),
    Shape("aider", "/v1/chat/completions", 10),
)


def _tool(name: str, schema: str) -> Body:
    properties = {"path": {"type": "string", "description": f"The file to {name}."}}
    about = f"Use {name} when a file of the repository is concerned, and only then. " * 6
    fields = {"type": "object", "properties": properties, "required": ["path"]}
    return {"name": name, "description": about, schema: fields}


def _item(role: str, text: str, kind: str = "input_text") -> Body:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
