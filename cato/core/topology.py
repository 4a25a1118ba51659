"""What a deployment file says, as frozen values: models, pools, deployments, engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cato.core.ids import DeploymentName, ModelName, PoolName


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model and the names it answers to.

    `source`: a folder, `demo` for the model that ships with CATO, or a Hugging Face id.
    `family` names the fill-in-the-middle form (see `cato.workflows.fim`).
    """

    name: ModelName
    source: str
    family: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How a replica starts its engine; `args` and `env` go to a vLLM server as they are.

    `kind` is `vllm` or `simulated`. `python` names the interpreter that has vLLM (None: the
    replica's own). `zygote` forks engines from a preloaded process (CPU only). `profile` and
    `seed` belong to the simulated engine: its timings and its text.
    """

    kind: str
    python: str | None = None
    zygote: bool = False
    dtype: str = "auto"
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    prefix_caching: bool = True
    priority_scheduling: bool = True
    enforce_eager: bool = False
    start_timeout_s: float = 600.0
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    profile: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """One Serve deployment: one resource shape. A replica takes `cards` cards of one host.

    `accelerator` is `cpu`, `gpu` or `npu`; `accelerator_type` Ray's type label, if it matters.
    `standby`: invocations a replica may hold beyond `engine.max_num_seqs`, to hide the message
    gap. `profile` is the name of a file in the profiles folder, without `.yaml`. `cost` is what
    a replica costs in a time, in any unit that all deployments of the pool share.
    """

    name: DeploymentName
    accelerator: str
    engine: EngineSpec
    cards: int = 0
    cpus: float = 1.0
    accelerator_type: str | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    min_replicas: int = 1
    initial_replicas: int = 1
    max_replicas: int = 1
    standby: int = 1
    profile: str | None = None
    cost: float = 1.0


RAY_SERVE = "ray-serve"
"""The scheduler of a pool that CATO leaves to Ray Serve: its router, its queue. A baseline."""


@dataclass(frozen=True, slots=True)
class PoolPolicies:
    """Named policies of a pool; changeable at run time through `user_config`.

    `scheduler` names a whole; the other names replace parts of it (None: its own). `binding` is
    `late` (wait in the pool's queue) or `early` (bound to a replica's queue on arrival, as the
    published methods do). `cap` is that of the scheduler `static-cap`. `max_queued` bounds the
    pool's queue.
    """

    scheduler: str = "foresight"
    routing: str | None = None
    ordering: str | None = None
    binding: str | None = None
    cap: int | None = None
    max_queued: int = 1000


@dataclass(frozen=True, slots=True)
class PoolScaling:
    """How the replicas of a pool follow its demand; changeable at run time through `user_config`.

    `policy` is a name of `cato.policies.scaling.registry`; it is asked `every_s`. A pool whose
    minimum is 0 has no replica once it had no work for `idle_timeout_s`. The policy `cato` also
    lets each single replica go that was idle for so long.
    """

    policy: str = "forecast"
    idle_timeout_s: float = 300.0
    every_s: float = 1.0


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """All deployments that serve one model, possibly on different accelerators."""

    name: PoolName
    model: ModelSpec
    deployments: tuple[DeploymentSpec, ...]
    policies: PoolPolicies = PoolPolicies()
    scaling: PoolScaling = PoolScaling()

    @property
    def may_be_empty(self) -> bool:
        """Without work it has no replica; the first call starts one."""
        return all(d.min_replicas == 0 for d in self.deployments)


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything the `engines` application runs.

    `event_log`: the folder where every router logs its events and commands (None: it does not).
    `store`: file or URL of the metadata store (None: `cato.store.location.default_location`).
    """

    pools: tuple[PoolSpec, ...]
    profiles_dir: str = "profiles"
    event_log: str | None = None
    store: str | None = None


@dataclass(frozen=True, slots=True)
class IngressSpec:
    """Everything the `cato` application (the HTTP ingress) needs.

    `indexes` maps an index name of a retrieve node to a folder of code. `max_body_bytes`
    bounds a request. `keys` says when one needs an API key; see
    `cato.serve.access.control.KeyRule`.
    """

    workflows_dir: str = "workflows"
    indexes: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 1
    max_body_bytes: int = 4_000_000
    keys: str = "auto"
