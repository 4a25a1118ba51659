"""Sessions of `cato bench live agents`: one plan for the live side and the simulated one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler

from cato.core.errors import InputError
from cato.core.ids import PoolName
from cato.engines.simulated.asked import read_asked
from cato.engines.simulated.text import simulated_answer
from cato.lab.live.agents import Player, Prompts, predicted
from cato.lab.live.client import Seen, TaskClient
from cato.lab.live.session_rounds import planned_tasks
from cato.lab.live.traffic import SessionTraffic
from cato.lab.live.workflows import LiveTask
from cato.lab.studies import agent_fleet
from cato.policies import schedulers
from cato.sim.fleet import PoolSetup
from cato.sim.playing import TurnRules
from cato.sim.session_plans import UserPlan
from cato.wire.endpoint import Endpoint

Planned = tuple[TurnRules, list[UserPlan], Prompts]
SLOWDOWN, SEED, USERS = 0.05, 7, 3
LARGE = replace(agent_fleet.card_profile("large").slowed(SLOWDOWN), chars_per_token=1.0)


def a_turn(prompt: int, hit: int, **more: Any) -> dict[str, Any]:
    return {"gap": 5.0, "in": prompt, "out": 50, "hit": hit} | more


@pytest.fixture
def traffic(tmp_path: Path) -> SessionTraffic:
    """Sessions of 30 turns; a sub-agent runs beside the third."""
    rows = [
        {
            "id": f"session {n}",
            "shared": [1280, 640],
            "turns": [
                a_turn(4_000 + 300 * k, 3_900 + 300 * (k - 1) if k else 0)
                | ({"agent": 1, "base": None, "shared": [1280, 64], "hit": 0} if k == 3 else {})
                | ({"after": [2, 3]} if k == 4 else {})
                for k in range(30)
            ],
        }
        for n in range(6)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SessionTraffic(path, warm_up_s=60.0, counted_s=120.0)


def a_pool(scheduler: str = "sticky", replicas: int = 2) -> PoolSetup:
    policies = schedulers.OF_PROFILE[scheduler](LARGE, LARGE.max_running)
    return PoolSetup(PoolName("engine"), (LARGE,) * replicas, policies, chunk_tokens=8192)


def of(traffic: SessionTraffic) -> Planned:
    rules = traffic.rules(a_pool(), SLOWDOWN)
    plans = traffic.plans(LARGE, SEED, SLOWDOWN, USERS)
    return rules, plans, Prompts("bench", LARGE, 0, "arm 7")


async def played_against(answer: Handler, planned: Planned) -> dict[str, Seen]:
    """What a client sees that plays the plans against a server that gives this answer."""
    rules, plans, prompts = planned
    app = web.Application(client_max_size=10**7)
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server, TaskClient(str(server.make_url(""))) as client:
        return dict(await Player(client, prompts, rules, lambda: None).play(plans))


def test_a_trace_is_needed() -> None:
    with pytest.raises(InputError, match="--trace"):
        SessionTraffic(None).sessions()


def test_a_plan_has_the_turns_that_begin_in_time(traffic: SessionTraffic) -> None:
    _, plans, _ = of(traffic)
    assert plans == traffic.plans(LARGE, SEED, SLOWDOWN, USERS)
    begins = [b for plan in plans for part in plan.parts for b in part.begins_s]
    assert max(begins) < SLOWDOWN * (traffic.warm_up_s + traffic.counted_s)
    assert any(part.first for plan in plans for part in plan.parts)
    counted = traffic.counted(plans, SLOWDOWN)
    assert len(counted) == sum(b >= SLOWDOWN * traffic.warm_up_s for b in begins) > 0
    assert len(set(counted)) == len(counted)


def test_the_simulated_engine_answers_a_turn_at_its_length(traffic: SessionTraffic) -> None:
    rules, plans, prompts = of(traffic)
    for task in planned_tasks(plans, rules)[:10]:
        sent = prompts.changed(task)
        (node,) = sent.nodes
        asked = read_asked(Endpoint.CHAT, prompts.ask(task).body, LARGE, LARGE.context_tokens)
        pieces, why, _ = simulated_answer(0, asked)
        assert (asked.prompt.tokens, len(pieces)) == (node.prompt_tokens, node.output_tokens)
        assert why == "stop"
        assert abs(node.output_tokens - task.nodes[0].output_tokens) <= 1
        assert abs(node.prompt_tokens - task.nodes[0].prompt_tokens) <= 200  # marks and the tool


def test_prompts_share_as_much_text_as_the_trace_says(traffic: SessionTraffic) -> None:
    rules, plans, prompts = of(traffic)
    part = next(p for p in plans[0].parts if len(p.begins_s) > 6)
    playing = part.play(0.0, lambda: None)
    first, second = (
        str(prompts.ask(rules.task(playing, part.first + i, 0.0, 0.0)[0]).body["messages"])
        for i in (0, 1)
    )
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    hit = part.recorded.turns[part.first + 1].hit_tokens
    if part.recorded.turns[part.first + 1].base is None or part.first + 1 == 4:
        pytest.skip("the sub-agent's turn")
    assert abs(shared - hit) < 2 * agent_fleet.BLOCK_TOKENS


def test_both_sides_play_the_same_turns(traffic: SessionTraffic) -> None:
    """The live one against a server that answers at once; the other in virtual time."""
    rules, plans, prompts = planned = of(traffic)
    sessions: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        sessions.append(request.headers["X-CATO-Session"])
        assert float(request.headers["X-CATO-TPOT-Ms"]) == pytest.approx(40 * SLOWDOWN)
        usage = {"completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 64}}
        text = (
            f'data: {{"choices": []}}\n\ndata: {json.dumps({"usage": usage})}\n\ndata: [DONE]\n\n'
        )
        return web.Response(text=text)

    seen = asyncio.run(played_against(answer, planned))
    tasks = planned_tasks(plans, rules)
    assert seen.keys() == {t.id for t in tasks}
    assert len(sessions) == len(tasks)
    assert all(not s.problem and s.cached_tokens == 64 for s in seen.values())
    outcomes = predicted(traffic, plans, a_pool(), rules, prompts, SEED).outcomes
    assert [o.task.id for o in outcomes] == traffic.counted(plans, SLOWDOWN)
    assert all(o.is_finished for o in outcomes)
    for outcome in outcomes:
        live = seen[outcome.task.id].task.sim
        assert live.nodes == outcome.task.nodes
        assert (live.target_s, live.tpot_target_s) == (
            outcome.task.target_s,
            outcome.task.tpot_target_s,
        )


def test_a_client_without_a_first_token_leaves_and_asks_again(
    traffic: SessionTraffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cato.sim.playing.PATIENCE_S", 0.5 / SLOWDOWN)
    rules, plans, _ = planned = of(traffic)
    asked = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.Event().wait()
        return web.Response(text='data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n')

    seen = asyncio.run(played_against(answer, planned))
    first = min(seen.values(), key=lambda s: s.task.sim.arrived_at_s)
    assert (first.is_left, first.is_lost, first.is_met) == (True, False, False)
    assert seen.keys() == {t.id for t in planned_tasks(plans, rules)}, "its user went on"
    assert asked > len(seen)


def test_a_turn_is_in_time_by_its_first_token_and_its_pace(traffic: SessionTraffic) -> None:
    rules, plans, _ = of(traffic)
    task = LiveTask(planned_tasks(plans, rules)[0], {})
    pace_s, target_s = task.sim.tpot_target_s, task.sim.target_s
    seen = Seen(task, 0.0, target_s, target_s + 99 * pace_s * 0.99, None, output_tokens=100)
    assert seen.is_met
    assert not replace(seen, ttft_s=1.1 * target_s).is_met
    assert not replace(seen, e2e_s=target_s + 1.1 * 99 * pace_s).is_met
    refused = replace(seen, problem="429, no whole answer")
    assert (refused.is_met, refused.is_lost, refused.is_refused) == (False, False, True)
