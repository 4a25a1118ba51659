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
    gap. `profile` is the name of a file in the profiles folder, without `.yaml`.
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


@dataclass(frozen=True, slots=True)
class PoolPolicies:
    """Named policies of a pool; changeable at run time through `user_config`.

    `binding` is `late` (wait in the pool's queue) or `early` (bound to a replica's queue on
    arrival, as the published methods do). `max_queued` bounds the pool's queue.
    """

    routing: str = "cato"
    ordering: str = "late-last"
    binding: str = "late"
    max_queued: int = 1000


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """All deployments that serve one model, possibly on different accelerators."""

    name: PoolName
    model: ModelSpec
    deployments: tuple[DeploymentSpec, ...]
    policies: PoolPolicies = PoolPolicies()


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything the `engines` application runs."""

    pools: tuple[PoolSpec, ...]
    profiles_dir: str = "profiles"


@dataclass(frozen=True, slots=True)
class IngressSpec:
    """Everything the `cato` application (the HTTP ingress) needs.

    `indexes` maps an index name of a retrieve node to a folder of code. `max_body_bytes`
    bounds a request.
    """

    workflows_dir: str = "workflows"
    indexes: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 1
    max_body_bytes: int = 4_000_000
