"""The Profiler lives as long as its deployment: what it keeps is bounded."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from ingress_kit import until
from store_kit import a_receipt

from cato.cli.serve import EAGER, QUIET
from cato.control import learning as learning_module
from cato.control import profiler as profiler_actor
from cato.control.fitting import has_first_forest, refitted_apart
from cato.control.learning import Learning
from cato.control.profiler import Profiler
from cato.core.ids import NodeId, TaskName
from cato.core.receipt import SlaReceipt
from cato.estimators.output_lengths import (
    KEPT_SAMPLES,
    MIN_FOREST_SAMPLES,
    Due,
    LengthHistory,
    LengthSample,
    OutputLengths,
    Taken,
    refitted,
)
from cato.estimators.prompt_features import NAMES, Asked, features_of
from cato.store.store import MetadataStore

ROOT = Path(__file__).resolve().parents[3]
TASK, NODE = TaskName("t"), NodeId("n")


def some_samples(samples: int, model: str = "m") -> list[LengthSample]:
    """Answers half as long as their prompts."""
    return [
        LengthSample(TASK, NODE, model, tokens := 10 + 37 * n % 4_000, 1 + tokens // 2, "stop")
        for n in range(samples)
    ]


def some_taken(samples: int, model: str = "m") -> Taken:
    history = LengthHistory()
    history.add(some_samples(samples, model))
    return history.taken(history.due(OutputLengths()))


def test_what_is_learnt_apart_is_what_would_be_learnt_here() -> None:
    known = refitted(OutputLengths(), some_taken(20, "other"), 1, 0)
    apart = refitted_apart(known, some_taken(500), 2, 0)
    here = refitted(known, some_taken(500), 2, 0)
    assert apart.version == 2
    assert apart.keys.keys() == here.keys.keys()
    assert apart.keys[TASK, NODE, "m"].forest is not None
    for tokens in (50, 1_000, 3_000):
        asked = (TASK, NODE, "m", features_of(Asked(tokens)), 10_000)
        assert apart.belief(*asked) == here.belief(*asked)


def test_only_the_first_forest_of_a_node_is_urgent() -> None:
    nothing = OutputLengths()
    key = (TASK, NODE, "m")
    assert not has_first_forest({key: MIN_FOREST_SAMPLES - 1}, nothing)
    assert has_first_forest({key: MIN_FOREST_SAMPLES}, nothing)
    quantiles = refitted(nothing, some_taken(MIN_FOREST_SAMPLES - 1), 1, 0)
    assert has_first_forest({key: MIN_FOREST_SAMPLES}, quantiles)
    grown = refitted(nothing, some_taken(MIN_FOREST_SAMPLES), 1, 0)
    assert not has_first_forest({key: 2 * MIN_FOREST_SAMPLES}, grown)


async def test_outputs_that_wait_for_their_next_forest_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every finished run asks whether a fit is due."""
    learning, copied = Learning(), list[Due]()

    def taken(self: LengthHistory, due: Due) -> Taken:
        copied.append(due)
        return {}

    monkeypatch.setattr(LengthHistory, "taken", taken)
    monkeypatch.setattr(learning_module, "RELEARN_S", 0.0)
    learning.restore(some_samples(MIN_FOREST_SAMPLES), ())
    for _ in range(5):
        learning.refit_when_due()
        await asyncio.sleep(0.001)
    assert copied == [{(TASK, NODE, "m"): MIN_FOREST_SAMPLES}]


async def test_lengths_are_learnt_where_no_forest_can_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a restart on a host without memory to spare."""

    def fails(*_: object) -> OutputLengths:
        raise subprocess.CalledProcessError(-9, "fitting")

    monkeypatch.setattr(learning_module, "refitted_apart", fails)
    learning = Learning()
    learning.restore(some_samples(MIN_FOREST_SAMPLES), ())
    await until(lambda: learning.lengths(0) is not None, within_s=20)
    lengths = learning.lengths(0)
    assert lengths is not None
    known = lengths.keys[TASK, NODE, "m"]
    assert (known.forest, known.seen) == (None, MIN_FOREST_SAMPLES)


def test_growing_forests_leaves_nothing_in_the_process() -> None:
    code = """
import sys
from test_profiler_memory import some_taken
from cato.control.fitting import refitted_apart
from cato.control.profiler import Profiler
from cato.estimators.output_lengths import OutputLengths
assert refitted_apart(OutputLengths(), some_taken(500), 1, 0).keys
assert not {"sklearn", "quantile_forest"} & set(sys.modules), "learning was done here"
"""
    here = Path(__file__)
    folders = ":".join(map(str, (ROOT, here.parent, here.parents[1], here.parents[2])))
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": folders})


def test_the_memory_of_a_node_s_samples_never_grows() -> None:
    history = LengthHistory()
    gc.collect()
    tracemalloc.start()
    sizes = []
    for n in range(2 * KEPT_SAMPLES):
        features = (n / 7,) * len(NAMES)
        history.add([LengthSample(TASK, NODE, "m", 10_000 + n, 1_000 + n, "stop", features)])
        if n % KEPT_SAMPLES == 0:
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert max(sizes) < 350_000
    assert sizes[-1] - sizes[0] < 10_000


async def test_receipts_beyond_those_kept_are_in_the_store_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler_actor, "KEPT_RECEIPTS", 50)
    profiler = Profiler(tmp_path / "metadata.db")
    store = MetadataStore.open(tmp_path / "metadata.db")
    before = receipts_in_memory()
    for n in range(300):
        await profiler.record(((a_receipt(id=f"r{n}"), ()),))
    await until(lambda: store.receipt("r299", None) is not None, within_s=60)
    kept = receipts_in_memory() - before
    oldest = await profiler.receipt("r0", None)
    await profiler.close()
    store.close()
    assert 50 <= kept < 60
    assert oldest is not None


def receipts_in_memory() -> int:
    gc.collect()
    return sum(type(o) is SlaReceipt for o in gc.get_objects())


@pytest.mark.parametrize("name", [*EAGER, *QUIET])
def test_ray_is_started_without_brakes_and_what_grows_everywhere(name: str) -> None:
    assert (QUIET | EAGER)[name] == "0"
    for file in ("docker/Dockerfile", "README.md", "deployments/README.md"):
        assert f"{name}=0" in (ROOT / file).read_text(), file
