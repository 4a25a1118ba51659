"""Models that are added to a shared pool at run time: measured, kept, there after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_shared_pool import an_invocation
from typer.testing import CliRunner

from cato.cli.models import app
from cato.control import eviction
from cato.control.eviction import EvictionManager
from cato.core.errors import ContextLengthError, InputError, UnknownNameError
from cato.core.ids import DeploymentName, ModelName, PoolName
from cato.core.profile import UNMEASURED
from cato.core.topology import (
    DeploymentSpec,
    EngineSpec,
    HostedModel,
    ModelSpec,
    SharedPoolPolicies,
    SharedPoolSpec,
)
from cato.profiles.schema import ProfileFile, Provenance
from cato.serve.staging import checked_path, weight_files
from cato.serve.staging_slot import StagingSlot
from cato.store.in_thread import with_store
from cato.store.store import MetadataStore

CARDS = PoolName("cards")
JAVA, GO = ModelName("java"), ModelName("go")
SLOTS = DeploymentSpec(
    DeploymentName("cards-slots"), "cpu", EngineSpec("simulated", max_num_seqs=4), standby=0
)
# A simulated engine that answers in the sweep's time.
QUICK = replace(
    UNMEASURED,
    load_s=0.02,
    prefill_base_s=0.002,
    prefill_per_batch_token_s=0.00001,
    decode_base_s=0.001,
    decode_per_request_s=0.0,
)


def a_model(name: ModelName, *aliases: str) -> HostedModel:
    return HostedModel(ModelSpec(name, "simulated", "qwen", aliases), load_s=2.0, reload_s=0.5)


def a_spec() -> SharedPoolSpec:
    return SharedPoolSpec(CARDS, (a_model(JAVA),), (SLOTS,))


def a_file() -> ProfileFile:
    return ProfileFile.of(QUICK, Provenance(simulated=True))


async def registered(manager: EvictionManager, store: Path, slo_s: float = 1.5) -> None:
    spec = replace(a_spec(), models=(replace(a_model(JAVA), slo_s=slo_s),))
    await manager.register(
        [(spec, {JAVA: {SLOTS.name: QUICK}})], {CARDS: SharedPoolPolicies()}, str(store)
    )


async def served(manager: EvictionManager) -> list[str]:
    return [p.name for p in await manager.parts() or ()]


def test_the_store_keeps_every_measurement_of_a_model(tmp_path: Path) -> None:
    store = MetadataStore.open(tmp_path / "m.db")
    first = store.add_model(CARDS, a_model(GO, "golang"), a_file())
    second = store.add_model(CARDS, replace(a_model(GO), load_s=3.0), a_file())
    assert (first.version, second.version) == (1, 2)
    assert store.models() == (first, second)
    assert store.remove_model(CARDS, GO)
    assert not store.remove_model(CARDS, GO)
    assert store.models() == ()
    store.close()


def test_an_added_model_is_offered_now_and_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        file = tmp_path / "m.db"
        store = MetadataStore.open(file)
        first = EvictionManager()
        assert await first.parts() is None  # nothing was told yet: what was known stays valid
        await registered(first, file)
        await first.add_model(store.add_model(CARDS, a_model(GO), a_file()))
        await first.add_model(store.add_model(CARDS, replace(a_model(GO), slo_s=9.0), a_file()))
        second = EvictionManager()
        await registered(second, file)
        for manager in (first, second):
            parts = await manager.parts()
            assert parts is not None
            assert [p.name for p in parts] == ["cards/go", "cards/java"]
        await second.remove_model(CARDS, GO)
        with pytest.raises(UnknownNameError, match="no model named 'go'"):
            await second.remove_model(CARDS, GO)
        store.close()

    asyncio.run(scenario())


def test_a_taken_name_is_refused_and_the_model_of_the_file_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        manager = EvictionManager()
        await registered(manager, tmp_path / "m.db")
        store = MetadataStore.open(tmp_path / "m.db")
        with pytest.raises(InputError, match="'java' is the name of another model"):
            await manager.add_model(store.add_model(CARDS, a_model(GO, "java"), a_file()))
        with pytest.raises(InputError, match="'java' is a model of the deployment file"):
            await manager.add_model(store.add_model(CARDS, a_model(JAVA), a_file()))
        with pytest.raises(InputError, match="deployment file"):
            await manager.remove_model(CARDS, JAVA)
        store.close()

    asyncio.run(scenario())


def test_a_store_that_cannot_be_read_does_not_stop_the_pool(tmp_path: Path) -> None:
    async def scenario() -> None:
        manager = EvictionManager()
        await registered(manager, tmp_path)  # a folder is no database
        parts = await manager.parts()
        assert parts is not None
        assert [p.name for p in parts] == ["cards/java"]

    asyncio.run(scenario())


def test_what_the_store_could_not_tell_is_asked_for_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        manager, file = EvictionManager(), tmp_path / "m.db"
        file.mkdir()  # no database
        await registered(manager, file)
        file.rmdir()
        store = MetadataStore.open(file)
        store.add_model(CARDS, a_model(GO), a_file())
        store.close()
        await registered(manager, file)  # the control plane tells its pools every two seconds
        parts = await manager.parts()
        assert parts is not None
        assert [p.name for p in parts] == ["cards/go", "cards/java"]

    asyncio.run(scenario())


async def test_a_model_that_is_removed_while_its_pool_is_redeployed_is_gone(
    tmp_path: Path,
) -> None:
    manager, file = EvictionManager(), tmp_path / "m.db"
    await registered(manager, file)
    store = MetadataStore.open(file)
    await manager.add_model(store.add_model(CARDS, a_model(GO), a_file()))
    asked = asyncio.create_task(manager._shared[CARDS].offer(an_invocation("1"), 0, GO))
    await asyncio.sleep(0)
    removed = asyncio.create_task(manager.remove_model(CARDS, GO))
    await asyncio.sleep(0)
    await registered(manager, file, slo_s=9.0)
    asked.cancel()  # its link has ended
    await removed
    store.remove_model(CARDS, GO)
    assert await served(manager) == ["cards/java"]
    store.close()


async def test_a_model_that_is_added_while_its_pool_is_redeployed_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, file = EvictionManager(), tmp_path / "m.db"
    await registered(manager, file)
    has_read, may_go_on = asyncio.Event(), asyncio.Event()

    async def slowly(location: str | None, use: Callable[[MetadataStore], object]) -> object:
        found = await with_store(location, use)
        has_read.set()
        await may_go_on.wait()
        return found

    monkeypatch.setattr(eviction, "with_store", slowly)
    redeployed = asyncio.create_task(registered(manager, file, slo_s=9.0))
    await has_read.wait()
    store = MetadataStore.open(file)
    added = asyncio.create_task(manager.add_model(store.add_model(CARDS, a_model(GO), a_file())))
    await asyncio.sleep(0)
    may_go_on.set()
    await asyncio.gather(redeployed, added)
    assert await served(manager) == ["cards/go", "cards/java"]
    store.close()


def test_a_simulated_model_is_measured_as_its_profile_says() -> None:
    staged = asyncio.run(StagingSlot(SLOTS).measure(a_model(GO), QUICK))
    assert staged.hosted.load_s == pytest.approx(QUICK.load_s, abs=0.05)
    assert staged.hosted.reload_s is not None
    assert staged.hosted.reload_s <= staged.hosted.load_s
    profile = staged.profile.to_profile()
    assert staged.profile.provenance.simulated
    assert staged.profile.provenance.samples > 0
    assert profile.decode_step_s(1, 100) >= 0.5 * QUICK.decode_step_s(1, 100)
    assert (profile.model, profile.max_running) == (GO, 4)


def test_a_source_that_is_no_model_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config\.json"):
        checked_path(str(tmp_path), "vllm")
    (tmp_path / "config.json").write_text("{}")
    assert checked_path(str(tmp_path), "vllm") == str(tmp_path)
    (tmp_path / "model-1.safetensors").write_bytes(b"12345")
    assert [f.name for f in weight_files(str(tmp_path))] == ["model-1.safetensors"]


@pytest.mark.parametrize(
    ("files", "loaded"),
    [
        ("model-1.safetensors model-2.safetensors consolidated.safetensors pytorch_model.bin", 2),
        ("consolidated-1.safetensors consolidated-2.safetensors pytorch_model.bin", 2),
        ("pytorch_model-1.bin pytorch_model-2.bin", 2),
        ("model.gguf", 1),
        ("tokenizer.json", 0),
    ],
)
def test_weights_that_a_folder_holds_in_several_formats_count_once(
    tmp_path: Path, files: str, loaded: int
) -> None:
    names = files.split()
    for name in names:
        (tmp_path / name).write_bytes(b"12345")
    assert [f.name for f in weight_files(str(tmp_path))] == names[:loaded]


def test_an_engine_too_small_to_measure_says_so() -> None:
    tiny = replace(SLOTS, engine=EngineSpec("simulated", max_num_seqs=4, max_model_len=16))
    with pytest.raises((InputError, ContextLengthError)):
        asyncio.run(StagingSlot(tiny).measure(a_model(GO), QUICK))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add", "cato-mine"), "names with 'cato-' belong to the workflows"),
        (("add", "mine", "--alias", "a b"), "a model name has at most 128 letters"),
        (("add", "mine", "--family", "lama"), "--family must be one of"),
    ],
)
def test_a_wrong_name_ends_the_command_before_it_looks_for_a_cluster(
    words: tuple[str, ...], said: str
) -> None:
    result = CliRunner().invoke(app, [*words, "--source", "simulated"])
    assert result.exit_code == 1
    assert said in result.output
