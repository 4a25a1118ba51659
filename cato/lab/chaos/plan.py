"""Fault drill plans: the plan file, and the schedule that its seed gives."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from cato.config.fields import Duration, StrictModel
from cato.config.problems import validate
from cato.config.yaml_file import read_yaml
from cato.core.profile import Profile
from cato.core.topology import PoolPolicies


class Fault(StrEnum):
    """Kinds of faults. A pause is a stalled process, as under swapping or a stopped VM."""

    ENGINE_CRASH = "engine_crash"
    FAILED_START = "failed_start"  # an engine crash, and its next start fails too
    REPLICA_KILL = "replica_kill"
    REPLICA_PAUSE = "replica_pause"
    ROUTER_KILL = "router_kill"
    PROFILER_KILL = "profiler_kill"
    PROVISIONER_KILL = "provisioner_kill"
    EVICTION_KILL = "eviction_kill"
    CONTROLLER_KILL = "controller_kill"
    HOST_KILL = "host_kill"  # all processes of a host that has no ingress proxy
    HOST_DRAIN = "host_drain"  # a host is told to go, ends what it has, and is gone then
    INGRESS_KILL = "ingress_kill"
    HAPROXY_KILL = "haproxy_kill"
    ENGINE_STOP = "engine_stop"  # SIGSTOP: its connections stay open
    ZYGOTE_KILL = "zygote_kill"  # the process that a host's engines are forked from; they die too
    STORE_LOCK = "store_lock"
    STORE_FULL = "store_full"
    CLOCK_JUMP = "clock_jump"  # the wall clock; the monotonic clock cannot jump

    @property
    def hits_one_of_several(self) -> bool:
        """Whether it targets a replica or a host."""
        return self in _REPLICA_FAULTS or self in HOST_FAULTS


_REPLICA_FAULTS = frozenset(
    {Fault.ENGINE_CRASH, Fault.FAILED_START, Fault.REPLICA_KILL, Fault.REPLICA_PAUSE,
     Fault.ENGINE_STOP, Fault.ZYGOTE_KILL}
)  # fmt: skip
HOST_FAULTS = frozenset({Fault.HOST_KILL, Fault.HOST_DRAIN})
NEED_PROCESSES = frozenset({Fault.ENGINE_STOP, Fault.ZYGOTE_KILL})
"""Faults that need real engines with their own processes."""
CUT_CONNECTIONS = frozenset({Fault.INGRESS_KILL, Fault.HOST_KILL, Fault.HAPROXY_KILL})
"""Faults that may cut clients' connections."""


class Dialect(StrEnum):
    """Request formats of a drill's clients; all but `whole` stream."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    TASK = "task"  # a workflow, under its model's name
    WHOLE = "whole"


# Answer lengths are uniform between these and the plan's tokens.
LEAST_TOKENS = 2
PREFILL_S = 0.005
LOAD_S = 0.2
CONTEXT_TOKENS = 16_384

Weight = Annotated[float, Field(ge=0)]
_ALL_DIALECTS: Mapping[Dialect, float] = dict.fromkeys(Dialect, 1.0)


class OverloadFile(StrictModel):
    """More load than the pool can serve, then half of its capacity."""

    factor: Annotated[float, Field(gt=1, description="Offered load / capacity of the pool.")] = 5.0
    lasts: Annotated[Duration, Field(gt=0)] = 300.0
    after: Annotated[Duration, Field(gt=0, description="Time at half the capacity.")] = 60.0
    slo: Annotated[Duration, Field(gt=0, description="E2E target.")] = 10.0
    max_queued: Annotated[int, Field(ge=1)] = 500

    def to_overload(self) -> Overload:
        return Overload(self.factor, self.lasts, self.after, self.slo, self.max_queued)


class HostileFile(StrictModel):
    """Callers whose texts take a grammar minutes, in every second spell."""

    callers: Annotated[int, Field(ge=1, description="Concurrent requests of 64 kB.")] = 24
    spell: Annotated[Duration, Field(gt=0)] = 10.0
    slo: Annotated[Duration, Field(gt=0, description="TTFT target of the others.")] = 1.0

    def to_hostile(self) -> Hostile:
        return Hostile(self.callers, self.spell, self.slo)


class PlanFile(StrictModel):
    """A plan as written in a file. Gaps between faults are exponential with mean `gap`."""

    seed: Annotated[int, Field(ge=0, description="For faults, victims, prompts.")] = 0
    streams: Annotated[int, Field(ge=1, description="Concurrent streams.")] = 100
    tokens: Annotated[int, Field(ge=LEAST_TOKENS, description="Longest answer.")] = 200
    faults: Annotated[int, Field(ge=0)] = 100
    gap: Annotated[Duration, Field(gt=0)] = 1.0
    within: Annotated[
        Duration | None, Field(gt=0, description="No fault begins later; the rest is skipped.")
    ] = None
    pause: Annotated[Duration, Field(gt=0, description="How long a process is paused.")] = 1.0
    duration: Annotated[
        Duration, Field(ge=0, description="Minimum time under load, faults or not.")
    ] = 0.0
    step: Annotated[Duration, Field(gt=0, description="Time per token of a stream.")] = 0.02
    replicas: Annotated[int, Field(ge=2, description="Replicas of the pool.")] = 4
    hosts: Annotated[
        int, Field(ge=1, description="Raylets, with --ray; from three on, hosts are lost too.")
    ] = 1
    mix: dict[str, Weight] = Field(default_factory=dict)
    dialects: dict[str, Weight] = Field(default_factory=dict)
    engine: Annotated[
        Literal["simulated", "vllm"], Field(description="vllm: the demo model, with --ray.")
    ] = "simulated"
    overload: OverloadFile | None = None
    hostile: HostileFile | None = None

    @model_validator(mode="after")
    def _names_are_known(self) -> PlanFile:
        for field, given, known in (
            ("mix", self.mix, Fault),
            ("dialects", self.dialects, Dialect),
        ):
            unknown = sorted(set(given) - set(known))
            if unknown:
                raise ValueError(f"{field}: no {unknown[0]!r}; known: {', '.join(known)}")
            if given and not any(given.values()):
                raise ValueError(f"{field}: one weight must be above 0")
        if self.overload is not None and set(self.dialects) != {Dialect.TASK}:
            raise ValueError("overload: only a task has an SLO; write `dialects: {task: 1}`")
        return self

    def to_plan(self) -> Plan:
        mix = {Fault(n): w for n, w in self.mix.items()} or dict.fromkeys(Fault, 1.0)
        dialects = {Dialect(n): w for n, w in self.dialects.items()} or _ALL_DIALECTS
        return Plan(
            self.seed, self.streams, self.tokens, self.faults, self.gap, self.pause,
            self.duration, self.step, self.replicas, self.hosts, mix, dialects,
            None if self.overload is None else self.overload.to_overload(),
            None if self.hostile is None else self.hostile.to_hostile(), self.engine == "vllm",
            inf if self.within is None else self.within,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Overload:
    """See `OverloadFile`."""

    factor: float
    lasts_s: float
    after_s: float
    slo_s: float
    max_queued: int


@dataclass(frozen=True, slots=True)
class Hostile:
    """See `HostileFile`."""

    callers: int
    spell_s: float
    slo_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """See `PlanFile`."""

    seed: int
    streams: int
    tokens: int
    faults: int
    gap_s: float
    pause_s: float
    duration_s: float
    step_s: float
    replicas: int
    hosts: int
    mix: Mapping[Fault, float]
    dialects: Mapping[Dialect, float]
    overload: Overload | None = None
    hostile: Hostile | None = None
    is_real: bool = False
    within_s: float = inf

    @property
    def asked_s(self) -> float:
        """The minimum time that clients send requests."""
        extra_s = 0.0 if self.overload is None else self.overload.lasts_s + self.overload.after_s
        return max(self.duration_s, extra_s)

    @property
    def capacity_per_s(self) -> float:
        """Answers per second of all replicas with all batch slots busy."""
        mean_s = PREFILL_S + self.step_s * (LEAST_TOKENS + self.tokens) / 2
        return self.slots * self.replicas / mean_s

    @property
    def policies(self) -> PoolPolicies:
        """Policies of the pool: under overload it refuses calls that it could not serve in time."""
        if self.overload is None:
            return PoolPolicies()
        return PoolPolicies(max_queued=self.overload.max_queued, refuse_late=True)

    @property
    def slots(self) -> int:
        """Batch slots per replica: half of the replicas have room for all streams.

        Recovery is measured with spare capacity; without it, it would measure the queue's length.
        """
        return -(-2 * self.streams // self.replicas)

    def profile(self) -> Profile:
        """Profile of the simulated engines."""
        return Profile(
            model="drill",
            accelerator="none",
            engine="simulated",
            prefill_per_batch_token_s=0.0,
            prefill_per_request_s=0.0,
            prefill_per_token_s=0.0,
            prefill_base_s=PREFILL_S,
            decode_per_context_token_s=0.0,
            decode_per_request_s=0.0,
            decode_base_s=self.step_s,
            # Room for whole contexts in all slots; more would only let the drill's caches grow.
            kv_capacity_tokens=CONTEXT_TOKENS * self.slots,
            max_running=self.slots,
            context_tokens=CONTEXT_TOKENS,
            load_s=LOAD_S,
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault: its time after the drill's start, and its victim as a fraction in [0, 1)."""

    at_s: float
    fault: Fault
    victim: float


def load_plan(path: Path) -> Plan:
    """Read and check a plan; raise `ConfigError`."""
    return validate(PlanFile, read_yaml(path), str(path)).to_plan()


def schedule(plan: Plan, possible: frozenset[Fault]) -> list[Planned]:
    """The faults of `plan` that are `possible`; the same for the same seed."""
    kinds = [fault for fault in plan.mix if fault in possible]
    weights = [plan.mix[fault] for fault in kinds]
    if plan.faults and not any(weights):
        raise ValueError("none of the plan's faults is possible here")
    draw = random.Random(plan.seed)
    planned, at_s = [], 0.0
    for _ in range(plan.faults):
        at_s += draw.expovariate(1 / plan.gap_s)
        (fault,) = draw.choices(kinds, weights)
        planned.append(Planned(at_s, fault, draw.random()))
    return planned
