"""One pool on accelerators of two speeds: 2 fast replicas and 4 that are 2.5 times slower."""

from __future__ import annotations

import random
from dataclasses import replace

from cato.core.ids import PoolName, TaskName
from cato.core.profile import Profile
from cato.sim.tasks import SimTask
from cato.sim.workloads import SABER_CLASSES, SABER_ENGINE, SABER_SHARES, saber_tasks

POOL = PoolName("mixed")
SLOTS = 16
SLOWER = 2.5
LOAD = 0.8
# Half of the calls have this much more time than the others.
PATIENCE = 3.0
PATIENT = "patient-"


FAST = replace(SABER_ENGINE, max_running=SLOTS)
SLOW = FAST.slowed(SLOWER)
FLEET = (FAST, FAST, SLOW, SLOW, SLOW, SLOW)


def capacity_per_s(workload: str) -> float:
    """Calls per second that the fleet completes with all batches full."""
    return sum(1 / _call_s(workload, profile) for profile in FLEET)


def _call_s(workload: str, profile: Profile) -> float:
    """Replica seconds of a mean call, with each step shared by the whole batch."""
    return sum(
        share * (profile.prefill_s(prompt) + output * _step_s(profile, prompt, output) / SLOTS)
        for name, share in SABER_SHARES[workload].items()
        for prompt, output, _ in (SABER_CLASSES[name],)
    )


def _step_s(profile: Profile, prompt: int, output: int) -> float:
    return profile.decode_step_s(SLOTS, prompt + output / 2)


def tasks_of(workload: str, seed: int, n: int) -> list[SimTask]:
    """`n` calls of SABER's `workload` at `LOAD` of the fleet's capacity, half of them patient."""
    draw = random.Random(seed)
    made = saber_tasks(workload, LOAD * capacity_per_s(workload), n, seed, POOL)
    return [_patient(task) if draw.random() < 0.5 else task for task in made]


def _patient(task: SimTask) -> SimTask:
    return replace(task, name=TaskName(f"{PATIENT}{task.name}"), target_s=task.target_s * PATIENCE)
