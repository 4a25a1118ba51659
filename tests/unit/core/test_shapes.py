"""Accelerators of several shapes in one shared pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from test_placement import BY_ARRIVAL, Shared, a_model, finish, queue

from cato.core.errors import InputError
from cato.core.eviction import (
    Card,
    CardId,
    CardPolicies,
    CopyId,
    DispatchOrder,
    ModelFacts,
    SitePolicy,
)
from cato.core.ids import DeploymentName, HostId, ModelName, PoolName, ReplicaId
from cato.core.pool.loading import STARVED_AFTER_S
from cato.core.pool.placement_events import (
    CardAdded,
    CardLost,
    CopyFound,
    Load,
    LoadFinished,
    Served,
)
from cato.core.profile import UNMEASURED
from cato.core.shared import Looked, ModelAdded
from cato.policies.eviction.lru import LeastRecentlyUsed
from cato.policies.eviction.orders import BatchedPerModel, InOrder
from cato.policies.eviction.sites import ShapeBlind, UrgentOnFast

FAST, SLOW = DeploymentName("fast"), DeploymentName("slow")
HOST = HostId("h")
PROFILES = {FAST: UNMEASURED, SLOW: UNMEASURED.slowed(4.0)}
LOAD_S = {FAST: 8.0, SLOW: 20.0}


def on(facts: ModelFacts, *shapes: DeploymentName) -> ModelAdded:
    """Calls take four times as long on slow accelerators, loads 20 instead of 8 s."""
    served = tuple(
        Served(replace(facts, load_s=LOAD_S[s], call_s=PROFILES[s].typical_call_s), PROFILES[s], s)
        for s in shapes
    )
    return ModelAdded(0.0, PoolName(facts.name), served, BY_ARRIVAL)


def a_pool(
    models: Mapping[str, tuple[DeploymentName, ...]],
    *,
    cards: tuple[DeploymentName, ...] = (FAST, SLOW),
    order: DispatchOrder | None = None,
    sites: SitePolicy | None = None,
    slo_s: Mapping[str, float] | None = None,
    max_running: int = 8,
) -> Shared:
    """`models`: the shapes where each fits."""
    policies = CardPolicies(
        LeastRecentlyUsed(), order or BatchedPerModel(), sites or UrgentOnFast()
    )
    pool = Shared(policies, (), [Card(CardId(f"{s}-{i}"), HOST, s) for i, s in enumerate(cards)])
    for name, shapes in models.items():
        facts = a_model(name, slo_s=(slo_s or {}).get(name, 1.0), max_running=max_running)
        pool.handle(on(facts, *shapes))
    return pool


def the_load(commands: tuple[object, ...]) -> Load:
    (load,) = (c for c in commands if isinstance(c, Load))
    return load


def loaded(pool: Shared, id: str, model: str, at_s: float) -> Load:
    """The load for a call, which has finished."""
    load = the_load(queue(pool, id, model, at_s))
    pool.handle(LoadFinished(at_s + load.expected_s, load.copy_id))
    return load


def test_urgent_models_are_loaded_on_fast_accelerators_and_others_on_slow_ones() -> None:
    both = (FAST, SLOW)
    pool = a_pool({"chat": both, "line": both}, slo_s={"chat": 10.0, "line": 1.0})
    chat, line = the_load(queue(pool, "1", "chat", 0.0)), the_load(queue(pool, "2", "line", 1.0))
    assert (chat.deployment, chat.expected_s) == (SLOW, 20.0)
    assert (line.deployment, line.expected_s) == (FAST, 8.0)
    assert "; on slow, for the most urgent 50% to 100% of the work; chat is at" in chat.reason


def test_a_replica_has_the_speed_of_its_shape() -> None:
    pool = a_pool({"a": (SLOW,), "b": (FAST,)})
    for id, model, shape in (("1", "a", SLOW), ("2", "b", FAST)):
        load = loaded(pool, id, model, 0.0)
        (replica,) = pool.books.lines[ModelName(model)].accepting
        assert (replica.id, replica.deployment) == (ReplicaId(load.cards[0]), shape)
        assert replica.profile == PROFILES[shape]


@pytest.mark.parametrize("sites", [ShapeBlind(), UrgentOnFast()])
@pytest.mark.parametrize("order", [BatchedPerModel(), InOrder()])
def test_a_model_waits_for_accelerators_where_it_fits(
    sites: SitePolicy, order: DispatchOrder
) -> None:
    pool = a_pool({"large": (FAST,), "small": (FAST,)}, sites=sites, order=order)
    assert loaded(pool, "1", "small", 0.0).deployment == FAST
    assert queue(pool, "2", "large", 9.0) == ()  # the slow one is empty, but too small
    load = the_load(finish(pool, "1", 10.0))
    assert (load.deployment, [v.model for v in load.evicted]) == (FAST, ["small"])


def test_in_order_a_model_that_fits_nowhere_now_does_not_hold_up_the_others() -> None:
    pool = a_pool({"large": (FAST,), "small": (SLOW,)}, cards=(SLOW,), order=InOrder())
    assert queue(pool, "1", "large", 0.0) == ()
    assert the_load(queue(pool, "2", "small", 1.0)).deployment == SLOW
    added = pool.handle(CardAdded(2.0, Card(CardId("new"), HOST, FAST)))
    assert the_load(added).model == "large"


def test_only_a_copy_where_the_starved_model_fits_stops_taking_calls() -> None:
    pool = a_pool({"small": (SLOW,), "b": (FAST,), "large": (FAST,)}, max_running=1)
    loaded(pool, "1", "small", 0.0)
    loaded(pool, "2", "b", 1.0)
    queue(pool, "3", "large", 2.0)
    pool.handle(Looked(70.0 + STARVED_AFTER_S))
    open_ = {name: bool(line.accepting) for name, line in pool.books.lines.items()}
    assert open_ == {"small": True, "b": False, "large": False}


def test_a_lost_shape_leaves_the_copies_on_others_and_a_found_copy_must_fit() -> None:
    pool = a_pool({"a": (FAST, SLOW), "large": (FAST,)}, slo_s={"a": 10.0})
    assert loaded(pool, "1", "a", 0.0).deployment == SLOW
    pool.handle(CardLost(30.0, CardId("fast-0")))
    assert [c.cards for c in pool.copies()] == [("slow-1",)]
    new = CardId("new")
    held = (), HOST, SLOW
    pool.handle(CopyFound(31.0, CopyId("x"), ModelName("large"), (new,), *held))
    assert [c.model for c in pool.copies()] == ["a"]
    pool.handle(CopyFound(32.0, CopyId("y"), ModelName("a"), (new,), *held))
    assert [c.cards for c in pool.copies()] == [("slow-1",), ("new",)]


def test_the_easiest_accelerator_is_one_of_the_asked_shape() -> None:
    pool = a_pool({"a": (FAST, SLOW)}, slo_s={"a": 10.0})
    placement = pool.books.placement
    assert placement.easiest_card(0.0, FAST) == "fast-0"
    assert placement.easiest_card(0.0, SLOW) == "slow-1"
    load = loaded(pool, "1", "a", 0.0)
    assert placement.easiest_card(30.0, load.deployment) is None  # busy
    finish(pool, "1", 31.0)
    assert placement.easiest_card(32.0, load.deployment) == load.cards[0]


def test_a_model_that_no_longer_fits_a_shape_leaves_it_once_idle() -> None:
    pool = a_pool({"a": (SLOW,)})
    loaded(pool, "1", "a", 0.0)
    grown = on(a_model("a"), FAST)
    with pytest.raises(InputError, match="where it no longer fits; try again later"):
        pool.books.handle(replace(grown, now_s=21.0))
    finish(pool, "1", 22.0)
    pool.handle(replace(grown, now_s=23.0))
    assert pool.copies() == ()
    assert the_load(queue(pool, "2", "a", 24.0)).deployment == FAST
