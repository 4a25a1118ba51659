"""Runs in real time over real pools: what a workflow promises, also when parts of it fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
from ingress_kit import (
    COMPLETION,
    GENERATION,
    SLOW,
    Kit,
    a_fast_pool,
    a_model_call,
    a_pool,
    a_slow_pool,
    running,
    sse_events,
    until,
    until_busy,
    until_idle,
)
from wire_kit import counts_in, final, parts_in

from cato.core.errors import CapacityError, EngineDeadError
from cato.core.ids import NodeId, ReplicaId
from cato.core.length import LengthBelief
from cato.core.receipt import SUPERSEDED, SlaReceipt
from cato.core.workflow import LlmSettings, TransformSettings
from cato.engines.simulated import simulated_text
from cato.estimators.output_lengths import STOPPED, samples_of
from cato.estimators.prompt_features import NAMES
from cato.lab.chaos.local_pools import LocalPool
from cato.serve.attempts import MAX_LOSSES
from cato.serve.service import Origin
from cato.wire.answer import Text
from cato.wire.endpoint import Endpoint
from cato.workflows.templates import compile_template

CONTEXT = """
name: with-context
description: Uses what a slow node finds, if it finds it in time.
sla: {metric: ttft, target: 10s}
inputs: {prompt: {type: str}}
nodes:
  context:
    type: llm
    model: slow
    prompt: "{{ prompt }}"
    max_tokens: 500
    extra: {ignore_eos: true}
    optional: true
    budget: 50ms
  answer:
    type: llm
    model: fast
    needs: [context]
    prompt: "{{ prompt }}{% if context %} with {{ context.text }}{% endif %}"
    max_tokens: 6
stream: answer
output: answer
"""

LOOP = """
name: loop
description: Never satisfied.
sla: {metric: e2e, target: 10s}
inputs: {prompt: {type: str}}
nodes:
  draft: {type: llm, model: fast, prompt: "{{ prompt }}", max_tokens: 4}
  check: {type: transform, needs: [draft], text: "no"}
  refine:
    type: llm
    model: fast
    needs: [check]
    prompt: "{{ refine.text if refine else draft.text }}"
    max_tokens: 4
    when: "check.text == 'no'"
    repeat: {until: "refine.tokens > 99", max: 3}
stream: refine else draft
output: refine else draft
"""

FAN_OUT = """
name: fan-out
description: One call an item.
sla: {metric: e2e, target: 10s}
inputs: {parts: {type: list}}
nodes:
  each:
    type: llm
    model: fast
    each: "parts"
    max_items: 3
    prompt: "{{ index }}: {{ item }}"
    max_tokens: 3
  joined:
    type: transform
    needs: [each]
    text: "{% for part in each %}[{{ part.text }}]{% endfor %}"
output: joined
"""


def check_books(receipt: SlaReceipt) -> None:
    """What must hold of every receipt."""
    on_path = sum(receipt.nodes[i].spent_s for i in receipt.path)
    assert on_path + receipt.overhead_s == pytest.approx(receipt.e2e_s)
    assert receipt.overhead_s >= -1e-6
    for node in receipt.nodes:
        assert 0 <= node.started_s <= node.started_s + node.spent_s <= receipt.e2e_s + 1e-6
        if node.llm is not None:
            assert 0 <= node.llm.queue_s <= node.spent_s + 1e-6


async def test_a_slow_optional_node_is_left_out_within_its_budget(tmp_path: Path) -> None:
    pools = (a_fast_pool(), a_slow_pool())
    async with running(tmp_path, *pools, workflows=(CONTEXT,)) as kit:
        finish = await kit.service.run_task("with-context", {"prompt": "x"}, request_id="r").wait()
        await until_idle(pools[1], within_s=0.5)
    context, answer = finish.receipt.nodes
    assert (finish.status, context.status, answer.status) == ("done", "absent", "done")
    assert context.spent_s < 1.0  # not the 10 s of its answer
    assert context.llm is not None
    assert context.llm.replica == "sim-slow#0"
    assert finish.output == {
        "text": simulated_text(0, "x", 6),
        "tokens": 6,
        "finish_reason": "length",
    }
    assert any("context left out" in note for note in finish.receipt.notes)
    check_books(finish.receipt)


async def test_a_loop_that_is_never_satisfied_ends_after_its_last_round(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(LOOP,)) as kit:
        task = kit.service.run_task("loop", {"prompt": "x"}, request_id="r")
        streamed = "".join([piece.text async for piece in task.pieces()])
    assert task.finish is not None
    receipt = task.finish.receipt
    assert task.finish.status == "done"
    assert [(n.node, n.round) for n in receipt.nodes] == [
        ("draft", 1),
        ("check", 1),
        ("refine", 1),
        ("refine", 2),
        ("refine", 3),
    ]
    assert isinstance(task.finish.output, dict)
    assert streamed == task.finish.output["text"]
    check_books(receipt)


async def test_a_loop_ends_when_the_slack_does_not_cover_another_round(tmp_path: Path) -> None:
    hurried = LOOP.replace("target: 10s", "target: 150ms").replace("max_tokens: 4", "max_tokens: 8")
    pool = a_pool("sim-fast", "fast", step_s=0.01)
    async with running(tmp_path, pool, workflows=(hurried,)) as kit:
        task = kit.service.run_task("loop", {"prompt": "x"}, request_id="r")
        streamed = "".join([piece.text async for piece in task.pieces()])
    assert task.finish is not None
    receipt = task.finish.receipt
    assert [n.node for n in receipt.nodes] == ["draft", "check", "refine"]
    assert any("refine stopped after 1 round: another takes" in note for note in receipt.notes)
    assert isinstance(task.finish.output, dict)
    assert streamed == task.finish.output["text"]


async def test_an_output_that_its_budget_stopped_is_known_to_be_longer(tmp_path: Path) -> None:
    patient = CONTEXT.replace("budget: 50ms", "budget: 2s")
    pools = (a_slow_pool(), a_pool("sim-fast", "fast"))
    async with running(tmp_path, *pools, workflows=(patient,)) as kit:
        finish = await kit.service.run_task("with-context", {"prompt": "x"}, request_id="r").wait()
    found = {s.node: s for s in samples_of(finish.receipt)}
    assert {node: s.finish_reason for node, s in found.items()} == {
        "context": STOPPED,
        "answer": "length",
    }
    assert 0 < found[NodeId("context")].output_tokens < 500


async def test_predicted_and_actual_stand_side_by_side_in_a_receipt(tmp_path: Path) -> None:
    belief = LengthBelief((4.0, 8.0, 12.0))
    pool = a_pool("sim-fast", "fast", step_s=0.01)
    async with running(tmp_path, pool, workflows=(COMPLETION,), belief=belief) as kit:
        finish = await kit.service.run_task(
            "code-completion", {"prefix": "x"}, request_id="r"
        ).wait()
    llm = finish.receipt.nodes[0].llm
    assert llm is not None
    assert (llm.expected_tokens, llm.length_bound_tokens) == (8, 12)
    assert llm.predicted_service_s == pytest.approx(7 * 0.01)
    assert llm.service_s >= (llm.output_tokens - 1) * 0.01


async def test_what_was_asked_and_how_long_its_asker_was_answered_are_in_the_receipt(
    tmp_path: Path,
) -> None:
    pool = a_pool("sim-fast", "fast")
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        seen = []
        for user in ("ann", "ann", "bob"):
            task = kit.service.run_task(
                "code-completion", {"prefix": "x = (1"}, request_id="r", origin=Origin(user=user)
            )
            llm = (await task.wait()).receipt.nodes[0].llm
            assert llm is not None
            seen.append((llm.output_tokens, dict(zip(NAMES, llm.features, strict=True))))
    tokens = seen[0][0]
    earlier = [features["log_earlier_last"] for _, features in seen]
    assert earlier == [-1.0, pytest.approx(log(tokens), abs=1e-3), -1.0]
    assert all(features["code_share"] > 0 for _, features in seen)


LIMITED = """
name: limited
description: As long as the caller wants, within bounds.
sla: {metric: e2e, target: 10s}
inputs: {prompt: {type: str}, tokens: {type: int, default: 5}}
nodes:
  only:
    {type: llm, model: fast, prompt: "{{ prompt }}", max_tokens: 9, token_limit: tokens,
     extra: {ignore_eos: true}}
output: only
"""


@pytest.mark.parametrize(("asked", "given"), [(None, 5), (3, 3), (50, 9)])
async def test_a_run_may_lower_the_limit_of_a_node(
    tmp_path: Path, asked: int | None, given: int
) -> None:
    inputs = {"prompt": "x"} if asked is None else {"prompt": "x", "tokens": asked}
    async with running(tmp_path, a_fast_pool(), workflows=(LIMITED,)) as kit:
        finish = await kit.service.run_task("limited", inputs, request_id="r").wait()
    assert finish.receipt.output_tokens == given


async def test_a_fan_out_keeps_the_order_and_bounds_the_number_of_items(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(FAN_OUT,)) as kit:
        inputs = {"parts": ["a", "b", "c", "d"]}
        finish = await kit.service.run_task("fan-out", inputs, request_id="r").wait()
        none = await kit.service.run_task("fan-out", {"parts": []}, request_id="s").wait()
    texts = [simulated_text(0, prompt, 3) for prompt in ("0: a", "1: b", "2: c")]
    assert isinstance(finish.output, dict)
    assert finish.output["text"] == "".join(f"[{text}]" for text in texts)
    assert any("first 3 of 4" in note for note in finish.receipt.notes)
    assert isinstance(none.output, dict)
    assert none.output["text"] == ""
    check_books(finish.receipt)


async def test_fifty_tasks_at_once_all_finish_and_their_books_add_up(tmp_path: Path) -> None:
    pools = (a_fast_pool(), a_pool("sim-slow", "slow", step_s=0.001, slots=4, replicas=2))
    workflows = (COMPLETION, GENERATION, LOOP, FAN_OUT, CONTEXT)
    inputs: list[tuple[str, dict[str, object]]] = [
        ("code-completion", {"prefix": "def f("}),
        ("code-generation", {"instruction": "sort"}),
        ("loop", {"prompt": "x"}),
        ("fan-out", {"parts": ["a", "b"]}),
        ("with-context", {"prompt": "y"}),
    ]
    async with running(tmp_path, *pools, workflows=workflows) as kit:
        tasks = [
            kit.service.run_task(*inputs[i % len(inputs)], request_id=f"r{i}") for i in range(50)
        ]
        finishes = await asyncio.gather(*(task.wait() for task in tasks))
        for pool in pools:
            await until_idle(pool, within_s=1)
    assert [f.status for f in finishes] == ["done"] * 50
    for finish in finishes:
        check_books(finish.receipt)
    for pool in pools:
        picture = pool.orchestrator.picture(0.0)
        assert (picture.queued, sum(r.held for r in picture.replicas)) == (0, 0)


async def test_an_answer_goes_on_elsewhere_when_its_replica_dies(tmp_path: Path) -> None:
    pool = a_pool("sim-fast", "fast", step_s=0.01, replicas=2)
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        task = kit.service.run_task("code-completion", {"prefix": "x"}, request_id="r")
        pieces = task.pieces()
        first = await anext(pieces)
        await pool.kill(ReplicaId("sim-fast#0"))
        text = first.text + "".join([piece.text async for piece in pieces])
    assert task.finish is not None
    llm = task.finish.receipt.nodes[0].llm
    assert llm is not None
    assert (llm.attempts, llm.replica, llm.output_tokens) == (2, "sim-fast#1", 12)
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit:
        whole = await kit.service.run_task(
            "code-completion", {"prefix": "x"}, request_id="r"
        ).wait()
    assert isinstance(whole.output, dict)
    assert text == whole.output["text"]


LATE = """
name: late
description: Cannot be in time, but may finish.
sla: {metric: e2e, target: 50ms, deadline: 60s}
inputs: {prompt: {type: str}}
nodes:
  only: {type: llm, model: fast, prompt: "{{ prompt }}", max_tokens: 150, extra: {ignore_eos: true}}
stream: only
output: only
"""


async def test_what_is_late_gives_way_and_goes_on_from_its_text(tmp_path: Path) -> None:
    pool = a_pool("sim-fast", "fast", step_s=0.01, slots=1)
    async with running(tmp_path, pool, workflows=(LATE, FAN_OUT)) as kit:
        late = kit.service.run_task("late", {"prompt": "x"}, request_id="late")
        await until_busy(pool, requests=1)
        urgent = kit.service.run_task("fan-out", {"parts": ["a"]}, request_id="urgent")
        assert (await urgent.wait()).status == "done"
        assert late.finish is None, "the urgent one came first"
        finish = await late.wait()
        await until_idle(pool, within_s=1)
    llm = finish.receipt.nodes[0].llm
    assert llm is not None
    assert (finish.status, llm.attempts, llm.output_tokens) == ("done", 2, 150)
    assert isinstance(finish.output, dict)
    assert finish.output["text"] == simulated_text(0, "x", 150)
    picture = pool.orchestrator.picture(0.0)
    assert (picture.queued, sum(r.held for r in picture.replicas)) == (0, 0)
    check_books(finish.receipt)


async def test_the_wait_after_a_preemption_does_not_delay_the_token_before_it(
    tmp_path: Path,
) -> None:
    pool = a_pool("sim-fast", "fast", step_s=0.01, slots=1)
    async with running(tmp_path, pool, workflows=(LATE, FAN_OUT)) as kit:
        late = kit.service.run_task("late", {"prompt": "x"}, request_id="late")
        await late.next()
        urgent = kit.service.run_task("fan-out", {"parts": ["a"]}, request_id="urgent")
        assert (await urgent.wait()).status == "done"
        finish = await late.wait()
        page = (await kit.service.records.metrics()).decode()
    llm = finish.receipt.nodes[0].llm
    assert llm is not None
    assert llm.attempts == 2
    assert llm.first_token_s is not None
    assert finish.receipt.ttft_s is not None
    assert llm.first_token_s <= finish.receipt.ttft_s < llm.queue_s + llm.service_s
    assert llm.engine_ttft_s is not None
    assert llm.queue_s + llm.engine_ttft_s > finish.receipt.ttft_s, "it waited once more"
    name = 'cato_invocation_ttft_seconds_sum{pool="sim-fast-pool"}'
    (sum_s,) = (float(x.split()[-1]) for x in page.splitlines() if x.startswith(name))
    receipts = (urgent.finish.receipt, finish.receipt)  # type: ignore[union-attr]
    calls = [n.llm for r in receipts for n in r.nodes if n.llm is not None]
    assert sum_s == pytest.approx(sum(c.first_token_s or 0.0 for c in calls))


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
async def test_a_direct_stream_goes_on_elsewhere_as_one(
    tmp_path: Path, endpoint: str, body: dict[str, object]
) -> None:
    pool = a_pool("sim-fast", "fast", step_s=0.01, replicas=2)
    asked = {**body, "max_tokens": 40, "ignore_eos": True}
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        whole = await direct(kit, endpoint, asked)
        task = kit.service.run_model(a_model_call("fast", endpoint, asked), request_id="r")
        pieces = task.pieces()
        sent = [await anext(pieces)]
        await pool.kill(replica_of(pool))
        sent += [piece async for piece in pieces]
    assert task.finish is not None
    llm = task.finish.receipt.nodes[0].llm
    assert llm is not None
    assert (llm.attempts, llm.output_tokens) == (2, 40)
    assert "lost after" in llm.reasons[0]
    assert "".join(piece.text for piece in sent) == whole
    events = [v for _, v in sse_events(b"".join(piece.raw for piece in sent).decode())]
    assert len({event["id"] for event in events}) == 1
    assert events[-1]["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("responses", {"input": "x", "max_output_tokens": 40}),
        ("messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40}),
    ],
)
async def test_a_typed_stream_goes_on_elsewhere_as_one(
    tmp_path: Path, endpoint: str, body: dict[str, object]
) -> None:
    pool = a_pool("sim-fast", "fast", step_s=0.01, replicas=2)
    asked = {**body, "ignore_eos": True}
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        whole = await direct(kit, endpoint, asked)
        task = kit.service.run_model(a_model_call("fast", endpoint, asked), request_id="r")
        pieces = task.pieces()
        sent = [await anext(pieces)]
        await pool.kill(replica_of(pool))
        sent += [piece async for piece in pieces]
    assert task.finish is not None
    llm = task.finish.receipt.nodes[0].llm
    assert llm is not None
    assert (llm.attempts, llm.output_tokens) == (2, 40)
    assert "".join(piece.text for piece in sent) == whole
    answer = final(Endpoint(endpoint), b"".join(piece.raw for piece in sent))
    assert parts_in(Endpoint(endpoint), answer) == [Text(whole)]
    assert counts_in(Endpoint(endpoint), answer)[2] == 40


async def direct(kit: Kit, endpoint: str, body: dict[str, object]) -> str:
    """The text of a direct stream that nothing happens to."""
    task = kit.service.run_model(a_model_call("fast", endpoint, body), request_id="w")
    return "".join([piece.text async for piece in task.pieces()])


def replica_of(pool: LocalPool) -> ReplicaId:
    """The replica that holds work."""
    (busy,) = [r.id for r in pool.orchestrator.picture(0.0).replicas if r.held]
    return busy


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
        ("responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}),
        ("messages", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
    ],
)
async def test_a_stream_that_cannot_go_on_is_not_repeated_once_bytes_were_sent(
    tmp_path: Path, endpoint: str, body: dict[str, object]
) -> None:
    pool = a_pool("sim-fast", "fast", step_s=0.01, replicas=2)
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        task = kit.service.run_model(a_model_call("fast", endpoint, body), request_id="r")
        pieces = task.pieces()
        await anext(pieces)
        await pool.kill(ReplicaId("sim-fast#0"))
        async for _ in pieces:
            pass
    assert isinstance(task.error, EngineDeadError)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_call_of_which_nothing_was_sent_is_offered_again(
    tmp_path: Path, is_streamed: bool
) -> None:
    pool = a_pool("sim-fast", "fast", step_s=0.01, prefill_s=0.2, replicas=2)
    body = {"input": "x", "max_output_tokens": 3}
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        task = kit.service.run_model(
            a_model_call("fast", "responses", body, is_streamed=is_streamed), request_id="r"
        )
        await until_busy(pool)
        await pool.kill(replica_of(pool))
        finish = await task.wait()
    assert finish.status == "done"


async def test_replicas_that_are_gone_before_a_call_reaches_them_do_not_fail_it(
    tmp_path: Path,
) -> None:
    pool = a_pool("sim-fast", "fast", replicas=6)
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        for id in list(pool.replicas)[:5]:
            pool.vanish(id)
        finish = await kit.service.run_task(
            "code-completion", {"prefix": "x"}, request_id="r"
        ).wait()
    llm = finish.receipt.nodes[0].llm
    assert llm is not None
    assert (finish.status, llm.attempts) == ("done", 6)


async def test_engines_that_die_of_a_call_are_not_all_given_to_it(tmp_path: Path) -> None:
    pool = a_pool("sim-fast", "fast", prefill_s=1.0, replicas=5)
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        task = kit.service.run_task("code-completion", {"prefix": "x"}, request_id="r")
        for _ in range(MAX_LOSSES):
            await until_busy(pool)
            await pool.kill(replica_of(pool))
        finish = await task.wait()
        assert len(pool.ready) == 5 - MAX_LOSSES
    assert isinstance(task.error, EngineDeadError)
    llm = finish.receipt.nodes[0].llm
    assert llm is not None
    assert llm.attempts == MAX_LOSSES


async def test_a_stream_that_gets_on_outlives_more_losses(tmp_path: Path) -> None:
    pool = a_pool("sim-fast", "fast", step_s=0.01, replicas=MAX_LOSSES + 3)
    body: dict[str, object] = {"prompt": "x", "max_tokens": 60, "ignore_eos": True}
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        task = kit.service.run_model(a_model_call("fast", "completions", body), request_id="r")
        text, killed = "", 0
        async for piece in task.pieces():
            text += piece.text
            if killed <= MAX_LOSSES and await pool.running():
                await pool.kill(replica_of(pool))
                killed += 1
    assert killed == MAX_LOSSES + 1
    assert text == simulated_text(0, "x", 60)


async def test_a_stream_that_cannot_go_on_ends_when_its_buffers_newer_run_takes_its_place(
    tmp_path: Path,
) -> None:
    pool = a_pool("sim-fast", "fast", step_s=0.01)
    body = {"input": "x", "max_output_tokens": 400}
    of_buffer = Origin(buffer="b")
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        older = kit.service.run_model(
            a_model_call("fast", "responses", body), request_id="1", origin=of_buffer
        )
        pieces = older.pieces()
        await anext(pieces)
        newer = kit.service.run_model(
            a_model_call("fast", "responses", body), request_id="2", origin=of_buffer
        )
        async for _ in pieces:
            pass
        newer.cancel("seen enough")
    finish = older.finish
    assert finish is not None
    assert (finish.status, finish.receipt.problem) == ("cancelled", SUPERSEDED)


async def test_cancelling_empties_queue_and_engine_and_is_recorded(tmp_path: Path) -> None:
    pool = a_slow_pool(slots=2)
    async with running(tmp_path, pool, workflows=(SLOW,)) as kit:
        tasks = [
            kit.service.run_task("slow", {"instruction": "x"}, request_id=f"r{i}") for i in range(5)
        ]
        await until_busy(pool, requests=2)
        for task in tasks:
            task.cancel("no longer wanted")
        finishes = [await task.wait() for task in tasks]
        await until_idle(pool, within_s=0.5)
        picture = pool.orchestrator.picture(0.0)
    assert {(f.status, f.receipt.problem) for f in finishes} == {("cancelled", "no longer wanted")}
    assert (picture.queued, picture.replicas[0].held) == (0, 0)
    assert len(kit.records.receipts) == 5


async def test_a_refused_run_names_the_refusal(tmp_path: Path) -> None:
    pool = a_pool("sim-fast", "fast", replicas=0, max_queued=0)
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        task = kit.service.run_task("code-completion", {"prefix": "x"}, request_id="r")
        finish = await task.wait()
    assert finish.status == "failed"
    assert isinstance(task.error, CapacityError)
    llm = finish.receipt.nodes[0].llm
    assert llm is not None
    assert llm.reasons[0].startswith("refused: ")


async def test_a_node_whose_time_is_over_while_it_waits_says_why_it_waited(tmp_path: Path) -> None:
    budgeted = SLOW.replace("name: slow", "name: budgeted").replace(
        "max_tokens: 3000", "max_tokens: 3000\n    budget: 100ms"
    )
    # A scheduler without preemption, so that the second call waits.
    pool = a_slow_pool(slots=1, scheduler="ray-serve")
    async with running(tmp_path, pool, workflows=(SLOW, budgeted)) as kit:
        first = kit.service.run_task("slow", {"instruction": "x"}, request_id="first")
        await until_busy(pool)
        waits = kit.service.run_task("budgeted", {"instruction": "x"}, request_id="waits")
        receipt = (await waits.wait()).receipt
        first.cancel("the test is over")
        await first.wait()
    (node,) = receipt.nodes
    assert node.llm is not None
    assert receipt.queue_s == node.llm.queue_s >= 0.09  # the budget runs from the start
    (reason,) = node.llm.reasons
    assert reason.startswith("queued 0.")


async def test_runs_with_the_same_request_id_do_not_disturb_each_other(tmp_path: Path) -> None:
    pool = a_pool("sim-fast", "fast", step_s=0.005)
    async with running(tmp_path, pool, workflows=(COMPLETION,)) as kit:
        prefixes = ("a", "b", "c")
        tasks = [
            kit.service.run_task("code-completion", {"prefix": p}, request_id="same")
            for p in prefixes
        ]
        tasks.append(kit.service.run_task("code-completion", {"prefix": "d"}, request_id="same"))
        tasks[-1].cancel("not this one")
        texts = [str(f.output) for f in [await t.wait() for t in tasks[:3]]]
    assert len(set(texts)) == 3


async def test_what_queues_up_while_the_reader_is_busy_comes_together(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit:
        task = kit.service.run_task("code-completion", {"prefix": "x"}, request_id="r")
        first = await task.next()
        await until(lambda: task.finish is not None, within_s=5)
        second = await task.next()
        assert await task.next() == []
    assert len(first) + len(second) == 12
    assert isinstance(task.finish.output, dict)
    assert "".join(p.text for p in (*first, *second)) == task.finish.output["text"]


async def test_a_whole_direct_answer_is_the_engines_bytes(tmp_path: Path) -> None:
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit:
        body = {"prompt": "x", "max_tokens": 3}
        task = kit.service.run_model(
            a_model_call("fast", "completions", body, is_streamed=False), request_id="r"
        )
        raw = b"".join([piece.raw async for piece in task.pieces()])
    assert json.loads(raw)["choices"][0]["text"] == simulated_text(0, "x", 3)


async def test_a_run_is_found_by_its_request_id_when_it_has_ended(tmp_path: Path) -> None:
    async def ask(kit: Kit, id: str) -> object:
        found = await kit.service.records.receipt(id, None)
        return None if found is None else found["status"]

    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit:
        task = kit.service.run_task("code-completion", {"prefix": "x"}, request_id="r")
        assert await ask(kit, "r") is None
        await task.wait()
        assert await ask(kit, "r") == "done"


class Watched:
    """A template that notes the threads in which it was rendered to its end."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.threads: list[int] = []

    def render(self, names: Mapping[str, object]) -> str:
        text = compile_template(self.source).render(names)
        self.threads.append(threading.get_ident())
        return text


@pytest.mark.parametrize(
    ("source", "is_here"),
    [
        ("{{ draft.text | upper }}", True),
        ("{% for i in range(9999) %}{{ i }}{% endfor %}", False),
        ("{{ 'x' * 900_000 }}", False),
    ],
)
@pytest.mark.parametrize("kind", ["transform", "prompt"])
async def test_rendering_that_takes_long_does_not_hold_up_the_loop(
    tmp_path: Path, source: str, is_here: bool, kind: str
) -> None:
    template = Watched(source)
    async with running(tmp_path, a_fast_pool(), workflows=(GENERATION,)) as kit:
        workflow = kit.service.workflow("code-generation")
        draft, final = workflow.nodes
        if kind == "prompt":
            assert isinstance(draft.settings, LlmSettings)
            draft = replace(draft, settings=replace(draft.settings, prompt=template))
        else:
            final = replace(final, settings=TransformSettings(template))
        task = kit.service.run_workflow(
            replace(workflow, nodes=(draft, final)), {"instruction": "x"}, request_id="r"
        )
        await task.wait()
    assert [thread == threading.get_ident() for thread in template.threads] == [is_here]


@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
async def test_a_limit_that_does_not_fit_behind_the_prompt_gives_way(
    tmp_path: Path, endpoint: str
) -> None:
    text = "word " * 200
    said = {"messages": [{"role": "user", "content": text}], "prompt": text}
    async with running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit:
        (pool,) = kit.service.pools()
        room = pool.profile.context_tokens
        body: dict[str, object] = {**said, "max_tokens": room}
        call = replace(a_model_call("fast", endpoint, body), max_tokens=room)
        finish = await kit.service.run_model(call, request_id="r").wait()
        call = replace(call, body={**body, "messages": [], "prompt": text * 90})
        with_nothing_left = await kit.service.run_model(call, request_id="s").wait()
    assert finish.status == "done"
    assert with_nothing_left.status == "failed"
