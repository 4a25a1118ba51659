"""Grammars that take minutes to compile are refused, and cost nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from ingress_kit import COMPLETION, a_fast_pool, running
from test_ingress_bounds import CHAT, COMPLETE, formatted

from cato.core.errors import InputError, QuotaError
from cato.serve.ingress import calls
from cato.serve.ingress.bounds import DEFAULT, check_call
from cato.serve.ingress.grammars import Grammars, grammars_of
from cato.serve.lanes import Job, Lane

# Not imported here: it takes seconds, for torch, and every worker collects this file.
if find_spec("xgrammar") is None:
    pytest.skip("`xgrammar` is not installed", allow_module_level=True)


def fields(count: int, **schema: object) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {**schema} for n in range(count)}}


def long_texts(shortest: int) -> dict[str, Any]:
    """Every length is a grammar of its own: all of them together take XGrammar a minute or more."""
    schema = fields(20, type="string")
    for n, field in enumerate(schema["properties"].values()):
        field["maxLength"] = shortest + n
    return formatted(schema)


USUAL = formatted(fields(20, type="string"))
# All within the bounds of size.
MINUTES = [
    long_texts(501),
    {"structured_outputs": {"regex": "[a-z]*" * 160}},
    {"structured_outputs": {"json": fields(50, type="string", pattern="^([a-z]{1,40} ?){1,40}$")}},
]


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    found = Grammars(wait_s=60.0)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, []),
        (formatted({"type": "string"}), [("json", '{"type": "string"}')]),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, [("regex", "a+")]),
        ({"structured_outputs": {"json": '{"a": 1}'}}, [("json", '{"a": 1}')]),
        ({"guided_grammar": 'root ::= "a"'}, [("grammar", 'root ::= "a"')]),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, [("json", "{}")]),
        (
            {"structural_tag": '{"format": {"type": "json_schema", "json_schema": {"a": {}}}}'},
            [("json", '{"a": {}}')],
        ),
        (
            {"tool_choice": "required", "tools": [{"function": {"parameters": {"b": 1}}}]},
            [("json", '{"b": 1}')],
        ),
        ({"tool_choice": "auto", "tools": [{"function": {"parameters": {"b": 1}}}]}, []),
        (
            {"tools": [{"function": {"strict": True, "parameters": {"b": 1}}}, {"name": "loose"}]},
            [("json", '{"b": 1}')],
        ),
    ],
)
def test_every_grammar_of_a_body_is_found(
    body: Mapping[str, object], expected: list[tuple[str, str]]
) -> None:
    assert list(grammars_of(body)) == expected


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fields", MINUTES)
async def test_a_grammar_that_takes_minutes_ends_and_the_next_is_compiled(
    grammars: Grammars, fields: dict[str, Any]
) -> None:
    body = {**COMPLETE, **fields}
    check_call(body)
    for _ in range(2):  # known the second time
        with pytest.raises(InputError, match="too long to compile") as refused:
            await grammars.check(body, "a", 0.5)
        assert refused.value.param == next(iter(fields))
    await grammars.check({**COMPLETE, **USUAL}, "a", 0.5)


async def test_what_a_grammar_took_is_remembered(grammars: Grammars) -> None:
    body = {**COMPLETE, **formatted(fields(300, type="string"))}
    await grammars.check(body, "a", 8.0)
    started_s = time.process_time()
    for _ in range(100):
        await grammars.check(body, "a", 8.0)
    assert grammars._lane.begun == (begun := grammars._lane.begun)
    assert time.process_time() - started_s < 1.0
    with pytest.raises(InputError):  # another key's time is shorter
        await grammars.check(body, "b", 0.001)
    assert grammars._lane.begun == begun


@pytest.mark.timeout(120)
async def test_who_sends_many_waits_behind_himself() -> None:
    grammars = Grammars(wait_s=60.0)
    order: list[str] = []

    async def ask(name: str, tenant: str, body: Mapping[str, object]) -> None:
        with contextlib.suppress(InputError):
            await grammars.check(body, tenant, 0.3)
        order.append(name)

    await grammars.check({**COMPLETE, **USUAL}, "a", 8.0)
    asked = [
        asyncio.create_task(ask(f"hostile {n}", "a", {**COMPLETE, **long_texts(501 + n)}))
        for n in range(6)
    ]
    await asyncio.sleep(0.05)
    asked.append(asyncio.create_task(ask("other", "b", formatted(fields(3, type="integer")))))
    await asyncio.wait(asked)
    assert order.index("other") <= 1
    hurried = Grammars(wait_s=0.0)
    async with hurried._turn:
        with pytest.raises(QuotaError):
            await hurried.check(formatted({"type": "null"}), "a", 8.0)
    grammars.close()


async def test_a_caller_that_leaves_leaves_no_turn_taken() -> None:
    grammars = Grammars(wait_s=60.0)
    hostile = {**COMPLETE, **long_texts(501)}
    for _ in range(3):
        asked = asyncio.create_task(grammars.check(hostile, "a", 0.2))
        await asyncio.sleep(0.02)
        asked.cancel()
        await asyncio.wait([asked])
    async with asyncio.timeout(60):
        await grammars.check({**COMPLETE, **USUAL}, "a", 8.0)
    assert not grammars._turn.locked()
    grammars.close()


class SlowLane(Lane):
    """Finishes its jobs, also those whose callers have left, when `may_end` is set."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.may_end = asyncio.Event()

    async def run(self, job: Job) -> dict[str, object]:
        self.jobs.append(job)
        await self.may_end.wait()
        return {"cpu_s": 0.1}


async def test_a_tenant_whose_callers_leave_gives_the_lane_one_job_at_a_time() -> None:
    grammars = Grammars(wait_s=60.0)
    grammars._lane = lane = SlowLane()
    for n in range(5):
        asked = asyncio.create_task(grammars.check(formatted(fields(n + 1)), "a", 8.0))
        await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled()
    assert len(lane.jobs) == 1
    other = asyncio.create_task(grammars.check(formatted({"type": "null"}), "b", 8.0))
    await asyncio.sleep(0)
    lane.may_end.set()
    await other
    assert len(lane.jobs) == 2, "those who left before their turn are not compiled"
    await grammars.check(formatted(fields(1)), "a", 8.0)
    assert len(lane.jobs) == 2, "what the first one's took is known"
    assert not grammars._turn.locked()
    assert not grammars._tenants


async def test_the_worker_is_light_and_ends_with_its_owner(grammars: Grammars) -> None:
    await grammars.check({**COMPLETE, **USUAL}, "a", 8.0)
    assert grammars._lane.pid is not None
    worker = psutil.Process(grammars._lane.pid)
    assert worker.memory_info().rss < 150e6, "torch is not imported"
    assert worker.nice() == min(19, os.nice(0) + 10)
    grammars.close()
    assert not worker.is_running()


@pytest.mark.timeout(120)
async def test_every_door_refuses_what_takes_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "bounds_of", lambda _: replace(DEFAULT, grammar_ms=300))
    schema = long_texts(601)["response_format"]["json_schema"]["schema"]
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        answers = [
            await http.post("/v1/completions", json={**COMPLETE, **long_texts(601)}),
            await http.post("/v1/chat/completions", json={**CHAT, **long_texts(601)}),
            await http.post(
                "/v1/responses",
                json={"model": "fast", "input": "x", "text": {"format": {"schema": schema}}},
            ),
            await http.post(
                "/v1/messages", json={**CHAT, "output_config": {"format": {"schema": schema}}}
            ),
        ]
        served = await http.post("/v1/chat/completions", json={**CHAT, **USUAL})
    assert [a.status_code for a in answers] == [400] * 4, [a.text for a in answers]
    assert all("too long to compile" in a.text for a in answers)
    assert served.status_code == 200


async def test_a_tenant_that_goes_on_sending_has_one_turn_at_a_time() -> None:
    grammars = Grammars(wait_s=60.0)
    in_queue: list[int] = []

    async def ask() -> None:
        async with grammars._turns("a"):
            in_queue.append(len(grammars._turn._waiters or ()))
            await asyncio.sleep(0.01)

    asked = []
    for _ in range(30):  # more come while each ends
        asked.append(asyncio.create_task(ask()))
        await asyncio.sleep(0.004)
    await asyncio.wait(asked)
    assert max(in_queue) == 0, "only the tenant's first one may wait for the worker"
    assert not grammars._tenants
    grammars.close()
