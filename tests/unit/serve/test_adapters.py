"""Fine-tunes of one base share its replicas, and are called like models of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ingress_kit import COMPLETION, a_profile, an_access, running
from test_keys import a_key, bearer

from cato.core.ids import ModelName, PoolName
from cato.core.tenancy import Access
from cato.core.topology import AdapterSpec, ModelSpec, PoolSpec, Topology
from cato.engines.simulated import simulated_seed, simulated_text
from cato.lab.chaos.local_pools import LocalPool
from cato.wire.prefix import chain

TEAM = AdapterSpec(ModelName("team-coder"), "/lora/team", ("team",))
OTHER = AdapterSpec(ModelName("other-coder"), "/lora/other")
BASE = ModelSpec(ModelName("sim-fast"), "demo", "starcoder", ("fast",), (TEAM, OTHER))
PROMPT = "def add(a, b):\n"


def a_pool() -> LocalPool:
    return LocalPool(BASE, a_profile(), slots=8)


async def test_each_name_is_answered_by_its_own_fine_tune(tmp_path: Path) -> None:
    expected = {
        "fast": ("sim-fast", simulated_text(0, PROMPT, 8)),
        "team": ("team-coder", simulated_text(simulated_seed(0, "team-coder"), PROMPT, 8)),
        "other-coder": ("other-coder", simulated_text(simulated_seed(0, "other-coder"), PROMPT, 8)),
    }
    async with running(tmp_path, a_pool(), workflows=(COMPLETION,)) as kit, kit.http() as http:
        for name, (model, text) in expected.items():
            body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
            answer = await http.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == text
            assert answer.json()["model"] == answer.headers["X-CATO-Model"] == model
        listed = (await http.get("/v1/models")).json()["data"]
    assert {m["id"]: m["root"] for m in listed if not m["id"].startswith("cato-")} == {
        "sim-fast": "sim-fast",
        "fast": "sim-fast",
        "team-coder": "team-coder",
        "team": "team-coder",
        "other-coder": "other-coder",
    }


async def test_a_workflow_can_call_a_fine_tune(tmp_path: Path) -> None:
    workflow = COMPLETION.replace("model: fast", "model: team")
    async with running(tmp_path, a_pool(), workflows=(workflow,)) as kit, kit.http() as http:
        body = {"model": "cato-completion", "prompt": PROMPT}
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["X-CATO-Model"] == "team-coder"


async def test_a_key_for_one_fine_tune_opens_neither_the_base_nor_another(tmp_path: Path) -> None:
    secret, key = a_key(models=("team",))
    async with (
        running(
            tmp_path, a_pool(), workflows=(COMPLETION,), access=an_access(Access((key,)))
        ) as kit,
        kit.http() as http,
    ):
        http.headers.update(bearer(secret))
        codes = {
            name: (
                await http.post("/v1/completions", json={"model": name, "prompt": "x"})
            ).status_code
            for name in ("team", "team-coder", "fast", "other-coder")
        }
    assert codes == {"team": 200, "team-coder": 200, "fast": 403, "other-coder": 403}


def test_a_prompt_in_the_cache_of_one_fine_tune_is_none_in_anothers() -> None:
    text = PROMPT * 50
    assert set(chain(text, 224, "a")).isdisjoint(chain(text, 224, "b"))
    assert chain(text, 224, "a") == chain(text, 224, "a")


def test_what_was_added_is_served_as_far_as_there_are_names_and_places() -> None:
    base = replace(BASE, adapter_places=2)
    topology = Topology((PoolSpec(PoolName("p"), base, ()),))
    added = [
        AdapterSpec(ModelName(name), "/lora", aliases, version=i)
        for i, (name, aliases) in enumerate(
            [("other-coder", ()), ("x", ("fast",)), ("one", ("uno",)), ("two", ()), ("three", ())],
            1,
        )
    ]
    (pool,) = topology.with_adapters({base.name: added}).pools
    assert [a.name for a in pool.model.adapters] == ["team-coder", "other-coder", "one", "two"]
    assert pool.model.called("uno") == "one"
    assert pool.model.adapter(ModelName("one")) == added[2]
    assert pool.model.adapter(base.name) is None
    assert topology.with_adapters({ModelName("gone"): added}) == topology


def test_a_model_without_adapters_has_one_group_of_names() -> None:
    assert replace(BASE, adapters=()).groups == (("sim-fast", "fast"),)
    assert BASE.names == ("sim-fast", "fast", "team-coder", "team", "other-coder")
    assert [BASE.called(n) for n in ("fast", "team")] == ["sim-fast", "team-coder"]
