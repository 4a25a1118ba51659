"""The schedulers that Tempo is compared with, and Tempo without its parts, on one replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from cato.core.ids import PoolName
from cato.core.policies import Policies
from cato.lab.experiments import printed
from cato.policies import schedulers
from cato.policies.ordering.fcfs import FirstComeFirstServed
from cato.policies.ordering.tempo import GainDensity
from cato.policies.preemption.tempo import TempoPreemption
from cato.sim.fleet import Fleet, PoolSetup
from cato.sim.tasks import Outcome, SimTask
from cato.sim.tempo_workload import TEMPO_CALL, TEMPO_CHUNK_TOKENS, TEMPO_ENGINE
from cato.sim.workloads import with_known_lengths

POOL = PoolName("tempo")
QUANTUM_TOKENS = 20
TOLD = "foresight, told lengths"
DENSITY = GainDensity(TEMPO_ENGINE)
TEMPO, JITSERVE = "tempo", "jitserve"


@dataclass(frozen=True, slots=True)
class Variant:
    """A scheduler, its view of the tasks, and after how many steps it may preempt.

    `chunk_tokens` None: the engine takes prompts whole, and no token comes meanwhile.
    """

    policies: Callable[[], Policies]
    shown: Callable[[Sequence[SimTask]], Sequence[SimTask]] = list
    report_steps: int = QUANTUM_TOKENS
    chunk_tokens: int | None = TEMPO_CHUNK_TOKENS


def without_stages(tasks: Sequence[SimTask]) -> list[SimTask]:
    """No graph matching: a call of any stage has the time to the task's own deadline."""
    return [replace(t, nodes=tuple(replace(n, downstream_s=0.0) for n in t.nodes)) for t in tasks]


def without_lengths(tasks: Sequence[SimTask]) -> list[SimTask]:
    """No length prediction: every call is expected to have the mean length."""
    mean = TEMPO_CALL[1]
    return [
        replace(t, nodes=tuple(replace(n, length=None, expected_tokens=mean) for n in t.nodes))
        for t in tasks
    ]


def _tempo(density: GainDensity = DENSITY) -> Policies:
    return schedulers.tempo(density)


def _foresight() -> Policies:
    """Tempo counts the gain and tokens of late work too, so its users never leave."""
    return replace(schedulers.foresight(), patience_s=inf)


def _plas() -> Policies:
    return schedulers.plas(TEMPO_ENGINE)


def _fcfs() -> Policies:
    return schedulers.in_order(FirstComeFirstServed())


def _opponent(name: str) -> Policies:
    return replace(schedulers.OF_PROFILE[name](TEMPO_ENGINE, 0), patience_s=inf)


def _jitserve(frame_s: float = 1.0, group: float = 1.25) -> Policies:
    return schedulers.jitserve(TEMPO_ENGINE, frame_s, group)


SCHEDULERS: Mapping[str, Variant] = {
    schedulers.FORESIGHT: Variant(_foresight),
    TOLD: Variant(_foresight, shown=with_known_lengths),
    TEMPO: Variant(_tempo),
    JITSERVE: Variant(_jitserve),
    "plas": Variant(_plas),
    "sjf": Variant(schedulers.sjf),
    "edf": Variant(schedulers.edf),
    **{name: Variant(partial(_opponent, name)) for name in printed.OPPONENTS},
    "fcfs": Variant(_fcfs),
    "fcfs, prompts whole": Variant(_fcfs, chunk_tokens=None),
}
"""The paper's baselines: vLLM is `fcfs` with whole prompts, Sarathi-Serve `fcfs`, Autellix
`plas`, Tempo (SJF) `sjf`; Tempo-Precise is `told lengths` of the ablation."""

PARTS: Mapping[str, Variant] = {
    TEMPO: Variant(_tempo),
    "over the time budget": Variant(lambda: _tempo(replace(DENSITY, over_budget=True))),
    "no quantum": Variant(
        lambda: replace(_tempo(), preemption=TempoPreemption(DENSITY, quantum_tokens=1)),
        report_steps=1,
    ),
    "no quantum, loss not counted": Variant(
        lambda: replace(
            _tempo(), preemption=TempoPreemption(DENSITY, quantum_tokens=1, counts_loss=False)
        ),
        report_steps=1,
    ),
    "loss not counted": Variant(
        lambda: replace(_tempo(), preemption=TempoPreemption(DENSITY, counts_loss=False))
    ),
    "no preemption": Variant(lambda: replace(_tempo(), preemption=None)),
    "no reserve": Variant(lambda: schedulers.tempo(DENSITY, reserve=0.0)),
    "no fairness": Variant(lambda: schedulers.tempo(DENSITY, fairness=0.0)),
    "bounds not refined": Variant(lambda: _tempo(replace(DENSITY, is_refined=False))),
    "medians for bounds": Variant(lambda: _tempo(replace(DENSITY, level=0.5))),
    "told lengths": Variant(_tempo, shown=with_known_lengths),
    "no graph matching": Variant(_tempo, shown=without_stages),
    "no predicted lengths": Variant(_tempo, shown=without_lengths),
    "fcfs": Variant(_fcfs),
    JITSERVE: Variant(_jitserve),
    "jitserve, nothing waits for its time": Variant(partial(_jitserve, frame_s=inf)),
    "jitserve, no groups": Variant(partial(_jitserve, group=1.0)),
    "jitserve, no preemption": Variant(lambda: replace(_jitserve(), preemption=None)),
    "jitserve, told lengths": Variant(_jitserve, shown=with_known_lengths),
    schedulers.FORESIGHT: Variant(_foresight),
}
"""Tempo, Tempo without one of its parts, its successor likewise, and the default. All collective
tasks have the same stages, so that graphs are matched without error."""


def ran(variant: Variant, tasks: Sequence[SimTask]) -> tuple[Fleet, Sequence[Outcome]]:
    """Run the tasks on a fresh replica, to the end."""
    setup = PoolSetup(
        POOL,
        (TEMPO_ENGINE,),
        variant.policies(),
        chunk_tokens=variant.chunk_tokens,
        report_steps=variant.report_steps,
    )
    fleet = Fleet([setup])
    return fleet, fleet.run(variant.shown(tasks))
