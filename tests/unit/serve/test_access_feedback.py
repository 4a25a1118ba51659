"""What people did with completions: kept once, by task and model, and for one's own alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ingress_kit import COMPLETION, a_fast_pool, an_access, running
from store_kit import a_receipt, an_execution, facts

from cato.control.profiler import Profiler
from cato.control.reactions import KEPT_REACTIONS
from cato.core.errors import QuotaError
from cato.core.tenancy import Access, ApiKey
from cato.serve.access.caller import Caller
from cato.serve.access.control import AccessControl
from cato.serve.access.keys import new_key
from cato.serve.access.limits import BURST_S, EventLimits
from cato.serve.ingress.feedback import Feedback, Reaction
from cato.store.store import MetadataStore


def lines(page: bytes, name: str) -> list[str]:
    return [line for line in page.decode().splitlines() if line.startswith(name)]


async def test_reactions_are_counted_once_by_task_and_model_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    profiler = Profiler(path)
    receipt = replace(a_receipt(an_execution(llm=facts()), id="r1", task="fill"), tenant="a")
    await profiler.record(((receipt, ()),))
    view = Feedback("r1", Reaction.VIEW, view_id="v1", tenant="a")
    select = Feedback("r1", Reaction.SELECT, 0, "v1", "line", 0.4, "a")
    await profiler.react((view, select))
    await profiler.react((view,))
    page = await profiler.metrics()
    await profiler.close()
    model = facts().model
    labels = f'model="{model}",reaction="{{}}",task="fill"'
    for reaction in ("view", "select"):
        name = "cato_completion_reactions_total{" + labels.format(reaction) + "}"
        assert lines(page, name) == [f"{name} 1.0"]
        name = "cato_completion_reaction_e2e_seconds_sum{" + labels.format(reaction) + "}"
        assert lines(page, name) == [f"{name} {receipt.e2e_s}"]
    store = MetadataStore.open(path)
    kept = {r.reaction: r for r in store.reactions("r1")}
    store.close()
    assert set(kept) == {"view", "select"}
    assert (kept["select"].select_kind, kept["select"].after_s) == ("line", 0.4)
    assert (kept["view"].task, kept["view"].model, kept["view"].after_s) == ("fill", model, None)


async def test_reactions_to_unknown_or_others_completions_are_left_out(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "metadata.db")
    receipt = replace(a_receipt(an_execution(llm=facts()), id="r1"), tenant="a")
    await profiler.record(((receipt, ()),))
    await profiler.react(
        (
            Feedback("made-up", Reaction.SELECT, tenant="a"),
            Feedback("r1", Reaction.SELECT, tenant="b"),
        )
    )
    page = await profiler.metrics()
    await profiler.close()
    assert lines(page, "cato_completion_reactions_total{") == []


async def test_of_one_completion_a_bounded_number_of_reactions_counts(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    profiler = Profiler(path)
    receipts = [replace(a_receipt(an_execution(llm=facts()), id=f"r{n}")) for n in range(2)]
    await profiler.record(tuple((receipt, ()) for receipt in receipts))
    views = [Feedback("r0", Reaction.VIEW, view_id=f"v{n}") for n in range(10 * KEPT_REACTIONS)]
    await profiler.react((*views, *views, Feedback("r1", Reaction.VIEW)))
    await profiler.close()
    store = MetadataStore.open(path)
    kept = [len(store.reactions(f"r{n}")) for n in range(2)]
    store.close()
    assert kept == [KEPT_REACTIONS, 1]


EVENT = {"type": "select", "completion_id": "cmpl-r1", "choice_index": 0}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"view_id": "v" * 201}, 400),
        ({"view_id": ["v"]}, 400),
        ({"completion_id": "c" * 201}, 400),
        ({"choice_index": -1}, 400),
        ({"choice_index": 2**64}, 400),
        ({"elapsed": -1}, 400),
        ({"elapsed": 10**400}, 400),
        ({"more": "x" * 5000}, 413),
        ({"view_id": "v" * 200, "choice_index": 1023, "elapsed": 0}, 200),
    ],
)
async def test_an_event_is_small(tmp_path: Path, change: dict[str, object], status: int) -> None:
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        answer = await http.post("/v1/events", json={**EVENT, **change})
        kind = await http.post("/v1/events", params={"select_kind": "l" * 201}, json=EVENT)
    assert (answer.status_code, kind.status_code) == (status, 400)
    assert len(kit.feedback.noted) == (status == 200)


async def test_a_key_that_tells_too_many_events_waits_and_others_do_not(tmp_path: Path) -> None:
    one, other = ApiKey("one", "", "a"), ApiKey("other", "", "a")
    now_s = 1000.0
    control = AccessControl(clock=lambda: now_s)
    control.learn(Access((one, other)))
    callers = [Caller(key=key.id, tenant=key.tenant) for key in (one, other)]
    burst = int(EventLimits.PER_MINUTE / 60 * BURST_S)
    for _ in range(burst):
        control.tell(callers[0])
    with pytest.raises(QuotaError) as refused:
        control.tell(callers[0])
    assert 0 < refused.value.retry_after_s < 1
    control.tell(callers[1])
    now_s += 1
    control.tell(callers[0])


async def test_an_event_too_many_is_429_with_the_time_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventLimits, "PER_MINUTE", 6)
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,)) as kit,
        kit.http() as http,
    ):
        answers = [await http.post("/v1/events", json=EVENT) for _ in range(2)]
    assert [a.status_code for a in answers] == [200, 429]
    assert int(answers[1].headers["Retry-After"]) >= 1


async def test_the_key_says_whose_reaction_it_is(tmp_path: Path) -> None:
    secret, id, digest = new_key()
    access = an_access(Access((ApiKey(id, digest, "team-a"),)))
    event = {"type": "select", "completion_id": "cmpl-r1", "choice_index": 0}
    async with (
        running(tmp_path, a_fast_pool(), workflows=(COMPLETION,), access=access) as kit,
        kit.http() as http,
    ):
        answer = await http.post("/v1/events", json=event, headers={"api-key": secret})
    assert answer.status_code == 200
    (told,) = kit.feedback.noted
    assert (told.request_id, told.tenant) == ("r1", "team-a")
