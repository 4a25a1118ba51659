"""A live experiment: its pools, its tasks, and the arms that take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from cato.core.errors import UnknownNameError
from cato.core.profile import Profile
from cato.core.topology import RAY_SERVE, PoolPolicies, PoolScaling
from cato.lab.live import real
from cato.lab.live.traffic import SessionTraffic
from cato.policies import schedulers
from cato.sim.tasks import SimTask

# The queue is unbounded, as in the simulator: refusals would make it another experiment.
UNBOUNDED = schedulers.UNBOUNDED
WARM_UP_SEED = 77_003
SERVE_SUFFIX = "-serve"
"""Suffix of pools that CATO leaves to Ray Serve; otherwise they are named as those it serves."""
SESSIONS = "recorded sessions"
TaskMaker = Callable[[int, int], list[SimTask]]
"""Makes tasks of a workload from seed and count."""
_FIXED = PoolScaling("none")


@dataclass(frozen=True, slots=True)
class Arm:
    """A combination of policies. `policies` and `scaling` are the pools' `user_config`; `suffix`
    selects separate pools, for options that cannot change at run time; `completions` is the path of
    an OpenAI endpoint to ask instead of CATO. `has_twin`: the simulator has the same rule.
    """

    name: str
    policies: Mapping[str, object] = field(default_factory=dict)
    suffix: str = ""
    scaling: PoolScaling = _FIXED
    completions: str = ""
    has_twin: bool = True

    def pool_policies(self) -> PoolPolicies:
        if self.suffix:  # for a pool that Ray Serve routes
            return PoolPolicies(scheduler=RAY_SERVE, max_queued=UNBOUNDED)
        return PoolPolicies(**self.policies)  # type: ignore[arg-type]  # checked by the live side

    def user_config(self) -> dict[str, object]:
        """One pool's `user_config`, as in a deployment file."""
        scaling = {"policy": self.scaling.policy, "idle_timeout": f"{self.scaling.idle_timeout_s}s"}
        return {**self.policies, "scaling": scaling}


@dataclass(frozen=True, slots=True)
class LiveExperiment:
    """Workloads and arms; `chunk_tokens` applies to the simulated side (None: whole prompts), where
    one prompt gets `prompt_cap_tokens` per step beside other calls (0: the whole budget).

    `tasks`, `warm_up` and `slowdown` are defaults: tasks per run, tasks before the first run, and
    the factor on all times, so that two cores can produce the tokens. A real engine (`mix`) has its
    own speed: there only arrivals and targets are scaled. With `cold_start_s`, from ordering a
    replica to its first call, pools are scaled; otherwise their replicas are fixed. With `sessions`
    users play them in a closed loop, there is one workload, and `tasks` is the number of users.
    `ours` is compared with all other arms. `others` are hosts besides the first, see
    `cato.lab.bench.local_ray.Hosts`. `runs_on` names another experiment whose deployment file this
    one shares.
    """

    name: str
    title: str
    workloads: Mapping[str, TaskMaker]
    arms: tuple[Arm, ...]
    tasks: int
    # From few samples the Profiler overestimates a class: by a quarter after 13 answers.
    warm_up: int
    slowdown: float = 1.0
    chunk_tokens: int | None = None
    prompt_cap_tokens: int = 0
    mix: real.Mix | None = None
    cold_start_s: float | None = None
    ours: str = schedulers.FORESIGHT
    others: tuple[Mapping[str, object], ...] = ()
    runs_on: str = ""
    sessions: SessionTraffic | None = None

    @property
    def is_real(self) -> bool:
        return self.mix is not None

    @property
    def deployment(self) -> str:
        """The name of its deployment file."""
        return f"deployments/bench/{self.runs_on or self.name}.yaml"

    def chosen(self, workloads: Sequence[str], arms: Sequence[str]) -> LiveExperiment:
        """The experiment restricted to these (empty: all); raise `UnknownNameError`."""
        for name in workloads:
            if name not in self.workloads:
                raise UnknownNameError("workload", name, tuple(self.workloads))
        known = {a.name: a for a in self.arms}
        for name in arms:
            if name not in known:
                raise UnknownNameError("arm", name, tuple(known))
        return replace(
            self,
            workloads={n: w for n, w in self.workloads.items() if not workloads or n in workloads},
            arms=tuple(a for a in self.arms if not arms or a.name in arms),
        )


def scaled(task: SimTask, slowdown: float) -> SimTask:
    """`task` with all times multiplied by `slowdown`, without the time of other nodes."""
    nodes = tuple(
        replace(n, before_s=0.0, downstream_s=n.downstream_s * slowdown) for n in task.nodes
    )
    return replace(
        task,
        arrived_at_s=task.arrived_at_s * slowdown,
        target_s=task.target_s * slowdown,
        tpot_target_s=task.tpot_target_s * slowdown if task.tpot_target_s < inf else inf,
        nodes=nodes,
    )


def scaled_profile(profile: Profile, slowdown: float, load_s: float) -> Profile:
    """Service times multiplied by `slowdown`; loading takes `load_s`."""
    return replace(profile.slowed(slowdown), load_s=load_s)
