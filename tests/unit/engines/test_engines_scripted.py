"""The scripted engine: which step answers a conversation, and what it says of the prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kits.builders import a_profile

from cato.core.errors import ContextLengthError, EngineDeadError, EngineError
from cato.core.topology import EngineSpec
from cato.engines.base import Endpoint, EngineChunk, EngineRequest, EngineState
from cato.engines.scripted.engine import ScriptedEngine
from cato.engines.scripted.script import choose, load_script
from cato.wire.conversation import Conversation
from cato.wire.reading import conversation_of

READ = {"name": "read", "arguments": {"path": "$repo/app.py"}}
SCRIPT = {
    "steps": {
        "edit": [
            {"thinking": "Look first.", "text": "I look.", "calls": [READ, READ]},
            {"text": "Two words.", "calls": [READ]},
            {"text": "Done in $repo."},
        ],
        "breaks": [{"text": "One two three four.", "fault": "dies"}],
        "refused": [{"text": "Welcome.", "fault": "refuses"}],
        "after": [{"text": "Gone on."}],
    },
    "rules": [
        {
            "name": "title",
            "where": "system",
            "pattern": "title generator",
            "step": {"text": "A title"},
        },
        {
            "name": "summary",
            "where": "last_user",
            "pattern": "Summarise",
            "step": {"text": "[script: after repo=$repo]"},
        },
        {
            "name": "commit",
            "where": "all",
            "pattern": "commit message",
            "step": {"text": "Change"},
            "without_tools": True,
        },
    ],
    "resumes": "connection dropped",
    "aborted": "execution aborted",
}
MARK = "[script: edit repo=/srv/toy]"


class Letters:
    """A vocabulary of single bytes: counts can be seen."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def bytes_of(self, token: int) -> bytes:
        return bytes([token])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "script.json"
    file.write_text(json.dumps({**SCRIPT, "log": str(tmp_path / "log.jsonl")}))
    return file


def an_engine(path: Path, context_tokens: int = 8192) -> ScriptedEngine:
    sizes = replace(a_profile(), context_tokens=context_tokens)
    return ScriptedEngine(sizes, EngineSpec("scripted", script=str(path)), "m", Letters())


def said(*messages: Mapping[str, object]) -> Conversation:
    return conversation_of("chat/completions", {"messages": list(messages)})


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def called(text: str = "I look.") -> list[dict[str, object]]:
    function = {"name": "read", "arguments": "{}"}
    call = {"id": "1", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "print()"},
    ]


async def answered(
    engine: ScriptedEngine, endpoint: Endpoint, body: Mapping[str, object], **more: Any
) -> list[EngineChunk]:
    request = EngineRequest("r-1", endpoint, body, raw=True, **more)
    return [chunk async for chunk in engine.generate(request)]


def test_the_step_is_the_number_of_answers_since_the_script_was_named(path: Path) -> None:
    script = load_script(path)
    first = choose(script, said({"role": "system", "content": "s"}, user(f"Work. {MARK}")))
    second = choose(script, said(user(f"Work. {MARK}"), *called()))
    over = choose(script, said(user(f"Work. {MARK}"), *called(), *called(), *called()))
    assert [c.number for c in (first, second, over)] == [0, 1, 3]
    assert first.step.calls[0].arguments == '{"path": "/srv/toy/app.py"}'
    assert over.step.calls == ()


def test_calls_and_results_name_no_script(path: Path) -> None:
    asked = {"name": "helper", "arguments": '{"prompt": "[script: after]"}'}
    conversation = said(
        user(f"Work. {MARK}"),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": asked}]},
        {"role": "tool", "tool_call_id": "1", "content": "[script: after]"},
    )
    chosen = choose(load_script(path), conversation)
    assert (chosen.name, chosen.number) == ("edit", 1)


def test_an_answer_and_its_rest_are_one_step(path: Path) -> None:
    conversation = said(
        user(MARK),
        {"role": "assistant", "content": "I "},
        user("The connection dropped."),
        *called("look."),
    )
    assert choose(load_script(path), conversation).number == 1


def test_an_answer_whose_call_was_cut_does_not_count(path: Path) -> None:
    aborted = {"role": "tool", "tool_call_id": "1", "content": "Tool execution aborted"}
    conversation = said(user(MARK), *called(), called("Two")[0], aborted)
    assert choose(load_script(path), conversation).number == 1


def test_a_summary_names_the_script_that_goes_on(path: Path) -> None:
    script = load_script(path)
    summary = choose(script, said(user(f"Work. {MARK}"), *called(), user("Summarise.")))
    assert summary.step.text == "[script: after repo=/srv/toy]"
    after = choose(script, said(user(f"Work. {MARK}"), user(f"So far: {summary.step.text}")))
    assert (after.name, after.step.text) == ("after", "Gone on.")


def test_rules_for_calls_without_tools_leave_agents_alone(path: Path) -> None:
    script = load_script(path)
    body = {"messages": [user(f"Write a commit message. {MARK}")]}
    tools = [{"type": "function", "function": {"name": "read"}}]
    assert choose(script, conversation_of("chat/completions", body)).name == "commit"
    offered = conversation_of("chat/completions", {**body, "tools": tools})
    assert choose(script, offered).name == "edit"


def test_the_rest_of_a_cut_answer_repeats_nothing(path: Path) -> None:
    script = load_script(path)
    begun = (user(MARK), *called(), {"role": "assistant", "content": "Two "})
    for chosen in (
        choose(script, said(*begun)),
        choose(script, said(*begun, user("The connection dropped."))),
    ):
        assert (chosen.number, chosen.step.text) == (1, "words.")
        assert len(chosen.step.calls) == 1


def test_a_broken_script_is_named_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text('{"steps": {"a": [{"fault": "sleeps"}]}, "log": "l"}')
    with pytest.raises(EngineError, match=r"s\.json is not a valid script: .*sleeps"):
        load_script(file)


BODIES: dict[Endpoint, dict[str, object]] = {
    Endpoint.CHAT: {"messages": [user(MARK)]},
    Endpoint.RESPONSES: {"input": MARK},
    Endpoint.MESSAGES: {"messages": [user(MARK)], "max_tokens": 1000},
}


@pytest.mark.parametrize("endpoint", BODIES)
async def test_streams_and_whole_answers_say_the_same_in_every_dialect(
    path: Path, endpoint: Endpoint
) -> None:
    engine = an_engine(path)
    await engine.start()
    stream = await answered(engine, endpoint, BODIES[endpoint])
    raw = b"".join(chunk.raw for chunk in stream).decode()
    whole = await answered(engine, endpoint, BODIES[endpoint], stream=False)
    for text in ("Look first.", "I look."):
        assert text in whole[-1].raw.decode()
        assert text in deltas(raw)
    assert whole[-1].raw.count(b"app.py") == 2  # both calls
    assert (stream[-1].finish_reason, whole[-1].finish_reason) == ("tool_calls", "tool_calls")
    assert stream[-1].prompt_tokens == len(f"<|user|>{MARK}\n<|assistant|>")
    assert stream[-1].output_tokens == whole[-1].output_tokens


SAYING = ("text", "thinking", "reasoning", "content", "delta")


def deltas(raw: str) -> str:
    """All that a stream says in its events, one after the other."""
    found: list[str] = []

    def collect(value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if isinstance(inner, str) and key in SAYING:
                    found.append(inner)
                else:
                    collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    for line in raw.splitlines():
        if line.startswith("data: {"):
            collect(json.loads(line.removeprefix("data: ")))
    return "".join(found)


async def test_what_was_computed_is_cached_for_the_next_turn(path: Path) -> None:
    engine = an_engine(path)
    await engine.start()
    first = await answered(engine, Endpoint.CHAT, BODIES[Endpoint.CHAT])
    assert first[-1].cached_tokens == 0
    calls = [
        {"id": str(i), "function": {"name": "read", "arguments": '{"path": "/srv/toy/app.py"}'}}
        for i in range(2)
    ]
    answer = {"role": "assistant", "content": "I look.", "reasoning": "Look first."}
    more = [{**answer, "tool_calls": calls}, *called()[1:]]
    second = await answered(engine, Endpoint.CHAT, {"messages": [user(MARK), *more]})
    # Its own answer, too: the next prompt begins with prompt and answer.
    assert second[-1].cached_tokens > first[-1].prompt_tokens + first[-1].output_tokens
    other = await answered(engine, Endpoint.CHAT, {"messages": [user(f"Other. {MARK}")]})
    assert other[-1].cached_tokens == 0


async def test_a_reader_that_leaves_frees_the_blocks_and_is_noted(path: Path) -> None:
    engine = an_engine(path)
    await engine.start()
    request = EngineRequest("r-1", Endpoint.CHAT, BODIES[Endpoint.CHAT], raw=True)
    chunks = engine.generate(request)
    await anext(chunks)
    assert (await engine.load()).running == 1
    await chunks.aclose()
    load = await engine.load()
    assert (load.running, load.kv_cache_usage) == (0, 0.0)
    [line] = path.with_name("log.jsonl").read_text().splitlines()
    assert json.loads(line)["outcome"] == "left"


async def test_an_engine_that_its_script_ends_is_dead(path: Path) -> None:
    engine = an_engine(path)
    await engine.start()
    with pytest.raises(EngineDeadError):
        await answered(engine, Endpoint.CHAT, {"messages": [user("[script: breaks]")]})
    assert engine.state is EngineState.DEAD
    assert await engine.wait_dead() == "the scripted engine was ended by its script"


async def test_faults_happen_once_whichever_engine_is_asked(path: Path) -> None:
    one, other = an_engine(path), an_engine(path)
    await one.start()
    await other.start()
    breaks = {"messages": [user("[script: breaks]")]}
    with pytest.raises(EngineDeadError):
        await answered(one, Endpoint.CHAT, breaks)
    assert (await answered(other, Endpoint.CHAT, breaks))[-1].finish_reason == "stop"
    refused = {"messages": [user("[script: refused]")]}
    with pytest.raises(EngineError) as refusal:
        await answered(other, Endpoint.CHAT, refused)
    assert refusal.value.status == 429
    await one.start()
    assert (await answered(one, Endpoint.CHAT, refused))[-1].finish_reason == "stop"
    lines = [json.loads(line) for line in path.with_name("log.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["died", "done", "refused", "done"]
    assert lines[0]["body"] == breaks
    assert lines[0]["prompt"] == "<|user|>[script: breaks]\n<|assistant|>"


async def test_a_limit_cuts_an_answer_and_a_full_context_refuses_it(path: Path) -> None:
    engine = an_engine(path, context_tokens=60)
    await engine.start()
    body = {"messages": [user("[script: after]")], "max_tokens": 4}
    cut = await answered(engine, Endpoint.CHAT, body)
    assert (cut[-1].finish_reason, cut[-1].output_tokens) == ("length", 4)
    with pytest.raises(ContextLengthError, match="maximum context length is 60 tokens"):
        await answered(engine, Endpoint.CHAT, {"messages": [user(f"{MARK} and more words.")]})


async def test_counting_answers_with_the_tokens_of_the_whole_prompt(path: Path) -> None:
    engine = an_engine(path)
    await engine.start()
    body = BODIES[Endpoint.MESSAGES] | {"system": "Be brief."}
    asked = await answered(engine, Endpoint.MESSAGES, body)
    counted = await answered(engine, Endpoint.COUNT_TOKENS, body)
    assert json.loads(counted[0].raw) == {"input_tokens": asked[-1].prompt_tokens}
