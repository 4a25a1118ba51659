"""A deployment file's contents as frozen values: models, pools, deployments, engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from operator import attrgetter

from cato.core.brownout import BrownoutStep
from cato.core.checkers import CheckerSpec
from cato.core.errors import UnknownNameError
from cato.core.ids import DeploymentName, ModelName, PoolName
from cato.core.pool.prefill import MOST_S
from cato.core.prices import NO_PRICES, Prices
from cato.core.profile import Profile
from cato.core.record import record
from cato.core.reuse import ReuseLimits
from cato.core.sign_in import SignInSpec

RESERVED_PREFIX = "cato-"
"""Model names under which the HTTP interface offers workflows, such as `cato-code-completion`."""

MAX_CALLED_CHARS = 256
"""Longest model name matched against patterns, because names come from clients."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A LoRA adapter: a fine-tune served by its base model's replicas and called like a model.

    `source`: a folder or a Hugging Face id. `version`: 0 for adapters that the engines start with;
    one added later has a version that no earlier adapter of its name had.
    """

    name: ModelName
    source: str
    aliases: tuple[str, ...] = ()
    version: int = 0


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What the model's chat template supports.

    `is_system_first`: its system text comes before the tools. `takes_late_system`: a system text
    among the messages stays in its place; otherwise it is refused, dropped or moved.
    """

    renders_tools: bool = True
    renders_system: bool = True
    is_system_first: bool = False
    takes_late_system: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model and the names it answers to.

    `source`: a folder, `demo` for the model that ships with CATO, or a Hugging Face id. `family`
    names the fill-in-the-middle form (see `cato.workflows.fim`). `adapter_places`: how many
    adapters may be added to those that the engines start with. `patterns` are aliases with `*` or
    `?`, such as `claude-*`; clients may call them, but lists of models do not show them.
    """

    name: ModelName
    source: str
    family: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[AdapterSpec, ...] = ()
    adapter_places: int = 0
    patterns: tuple[str, ...] = ()

    @property
    def of_engine(self) -> ModelSpec:
        """What an engine has to know: not the further names that ingresses resolve."""
        adapters = tuple(replace(a, aliases=()) for a in self.adapters)
        return replace(self, aliases=(), patterns=(), adapters=adapters)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of the model, then those of each adapter; the first of each is its own."""
        adapters = ((a.name, *a.aliases) for a in self.adapters)
        return ((self.name, *self.aliases), *adapters)

    @property
    def names(self) -> tuple[str, ...]:
        """All names shown to clients, including adapters."""
        return tuple(name for group in self.groups for name in group)

    def called(self, name: str) -> ModelName:
        """The adapter called `name`, or else this model."""
        return ModelName(next((g[0] for g in self.groups if name in g), self.name))

    def adapter(self, name: ModelName) -> AdapterSpec | None:
        """The adapter of that name; None if the name is this model's own."""
        return next((a for a in self.adapters if a.name == name), None)


def model_called(name: str, models: Iterable[ModelSpec]) -> ModelSpec | None:
    """The model that answers to `name`: by name, else by the longest pattern that fits.

    No pattern fits the names of workflows.
    """
    known = tuple(models)
    for model in known:
        if name in model.names:
            return model
    if len(name) > MAX_CALLED_CHARS or name.rpartition(":")[2].startswith(RESERVED_PREFIX):
        return None
    fitting = [(p, m) for m in known for p in m.patterns if fnmatchcase(name, p)]
    # The deployment file may not contain patterns of equal length that fit the same name.
    return max(fitting, key=lambda found: (len(found[0]), found[0]))[1] if fitting else None


def is_pattern(alias: str) -> bool:
    """Whether `alias` contains a wildcard."""
    return "*" in alias or "?" in alias


def patterns_meet(one: str, other: str) -> bool:
    """Whether any name fits both patterns."""
    # ends[j]: whether some name fits both the rest of `one` from here on and `other[j:]`.
    ends = [not other[j:].strip("*") for j in range(len(other) + 1)]
    for i in range(len(one) - 1, -1, -1):
        after, ends = ends, [False] * (len(other) + 1)
        ends[-1] = one[i] == "*" and after[-1]
        for j in range(len(other) - 1, -1, -1):
            if one[i] == "*":
                ends[j] = after[j] or ends[j + 1]
            elif other[j] == "*":
                ends[j] = ends[j + 1] or after[j]
            else:
                ends[j] = after[j + 1] and (one[i] == other[j] or "?" in (one[i], other[j]))
    return ends[0]


CPU_KV_CACHE_BYTES = 1 << 30
"""KV cache of a vLLM engine on a CPU: by default vLLM takes 92 % of the host's memory."""

CPU_STEP_TOKENS = 256
"""Step budget of a vLLM engine on a CPU. Running streams wait for whole steps; this budget reduced
the 99th percentile of their wait from 1006 to 146 ms on two cores."""

CARD_STEP_TOKENS = 2048
CARD_PROMPT_TOKENS = 256
"""Step budget of a vLLM engine on a GPU or NPU, and one prompt's limit in it beside other calls:
short prompts then pass long ones (median TTFT 2 s without the cap, 0.1 s with it), and running
streams are as steady as with a budget of 256 tokens. Less than that on slow accelerators, see
`card_prompt_tokens`."""

CARD_PIECE_S, LEAST_CARD_PROMPT_TOKENS = 0.040, 64


def card_prompt_tokens(profile: Profile | None = None, window_tokens: int | None = None) -> int:
    """One prompt's limit in a step on a GPU or NPU with this profile (None: not measured).

    `CARD_PROMPT_TOKENS`, halved until so many tokens in the middle of the context window (None: the
    profile's) take at most `CARD_PIECE_S`: running streams wait that long for a long prompt.
    """
    tokens = CARD_PROMPT_TOKENS
    if profile is None:
        return tokens
    window = min(profile.context_tokens, window_tokens or profile.context_tokens)
    token_s = profile.prompt_token_s + profile.prefill_per_attended_token_s * window / 2
    while tokens > LEAST_CARD_PROMPT_TOKENS and tokens * token_s > CARD_PIECE_S:
        tokens //= 2
    return tokens


OFFLOADING_FLAGS = ("--kv-offloading-size", "--kv-transfer-config")
"""vLLM arguments with which an operator configures offloading directly."""


def flags_set(args: Iterable[str], flags: Iterable[str]) -> tuple[str, ...]:
    """Those of vLLM's `flags` that `args` set, in any spelling that vLLM's parser takes.

    The parser takes `_` for `-`, a value after `=`, a field of a config after `.`, and the
    beginning of a long flag if no other flag begins like it.
    """
    words = {w.split("=")[0].split(".")[0].replace("_", "-") for w in args if w.startswith("-")}
    long = tuple(word for word in words if len(word) > len("--") and word.startswith("--"))
    return tuple(f for f in flags if f in words or any(f.startswith(word) for word in long))


DUE_DATE = "due-date"
"""The engine-internal scheduler with the rule of `cato.core.pool.prefill`."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How a replica starts its engine; `args` and `env` are passed to a vLLM server unchanged.

    `kind` is `vllm`, `simulated` or `scripted`. `python` names the interpreter that has vLLM (None:
    the replica's own). `zygote` forks engines from a preloaded process (CPU only).
    `max_num_batched_tokens` is the token budget of a step, `long_prefill_token_threshold` the most
    of it that one prompt gets beside other calls (0: all of it). `scheduler`: the scheduler inside
    the engine, `DUE_DATE` (then only its own limits apply to prompts) or the engine's own (None);
    `prefill_step_s` is the most that `DUE_DATE` takes for prompts in a step beside streams.
    `host_memory`: KV blocks evicted from the cache stay in the host's memory, in this many bytes.
    True: as many as available, for a simulated engine those of its profile, for vLLM its share of
    the free memory at its start. None: True for vLLM on a GPU, else False. `profile` and `seed`
    belong to the simulated engine: its timings and its text. `script` is the file with the scripted
    engine's answers; it takes its sizes from the profile. `swap`: checkpoints of one architecture
    replace each other's weights in a running vLLM, for slots of shared pools. `sleep`: a model that
    leaves a slot keeps its vLLM engine, which sleeps with the weights in the host's memory, within
    the limit of the pool's `host_memory` (GPU and NPU).
    """

    kind: str
    python: str | None = None
    zygote: bool = False
    dtype: str = "auto"
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    scheduler: str | None = None
    prefill_step_s: float = MOST_S
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
    script: str | None = None
    swap: bool = False
    sleep: bool = False
    host_memory: bool | int | None = None

    @property
    def mixes_prompts(self) -> bool:
        """Whether it computes short prompts beside long ones that came before."""
        return bool(self.long_prefill_token_threshold) or self.scheduler == DUE_DATE

    @property
    def is_simulated(self) -> bool:
        """Whether its answers come without a model."""
        return self.kind != "vllm"

    def on(self, accelerator: str, profile: Profile | None = None) -> EngineSpec:
        """With CATO's defaults for vLLM on `cpu`, `gpu` or `npu`, with the model's profile there,
        where nothing is set."""
        if self.is_simulated:
            return self
        is_cpu = accelerator == "cpu"
        step, prompt = self.max_num_batched_tokens, self.long_prefill_token_threshold
        # Limits for steps in case the engine falls back to its own scheduler.
        is_small = is_cpu and self.scheduler is None
        if step is None:  # vLLM requires at least as many tokens as batch slots
            step = max(CPU_STEP_TOKENS if is_small else CARD_STEP_TOKENS, self.max_num_seqs)
        if prompt is None:
            limit = card_prompt_tokens(None if is_cpu else profile, self.max_model_len)
            prompt = 0 if is_small else min(limit, self.max_model_len or step)
        return replace(
            self,
            max_num_batched_tokens=step,
            long_prefill_token_threshold=prompt,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes
            or (CPU_KV_CACHE_BYTES if is_cpu else None),
            enforce_eager=self.enforce_eager or is_cpu,  # dynamo is off there
            host_memory=self._offloads(accelerator),
        )

    def _offloads(self, accelerator: str) -> bool | int:
        """Default for offloading: vLLM's needs an NVIDIA GPU and a prefix cache.

        A sleeping engine's memory belongs to others, and KV blocks of swapped-out weights are wrong
        for the weights that replaced them.
        """
        if self.host_memory is not None:
            return self.host_memory
        has_own = bool(flags_set(self.args, OFFLOADING_FLAGS))
        is_shared = self.sleep or self.swap
        return accelerator == "gpu" and self.prefix_caching and not (has_own or is_shared)


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """One Serve deployment: one resource shape. A replica takes `cards` accelerators of one host.

    `accelerator` is `cpu`, `gpu` or `npu`; `accelerator_type` is Ray's type label, if it matters.
    `start_first`: an update starts a new replica before an old one ends, with resources to spare.
    `standby`: invocations that a replica may hold beyond `engine.max_num_seqs`, to hide the message
    delay. `profile` is the name of a file in the profiles folder, without `.yaml`. `cost` is a
    replica's cost per time, in any unit shared by all deployments of the pool. `memory_bytes` is
    the room for a model's weights in a slot of a shared pool (None: all its models fit).
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
    start_first: bool = False
    standby: int = 1
    profile: str | None = None
    cost: float = 1.0
    memory_bytes: int | None = None

    @property
    def of_replica(self) -> DeploymentSpec:
        """What a replica has to know: not how many there are, nor what they are worth."""
        return replace(
            self,
            min_replicas=1,
            initial_replicas=1,
            max_replicas=1,
            start_first=False,
            profile=None,
            cost=1.0,
        )


RAY_SERVE = "ray-serve"
"""The scheduler of a pool that uses Ray Serve's own router and queue. A baseline."""


# Patience of a person, and of most HTTP clients and proxies.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class PoolPolicies:
    """The policies of a pool, by name; changeable at run time through `user_config`.

    `scheduler` names a whole scheduler; the other names replace parts of it (None: its own).
    `binding` is `late` (wait in the pool's queue) or `early` (bound to a replica's queue on
    arrival, as in the published methods). `cap` is how many calls a replica runs, for schedulers
    that limit it (None: its profile's bound). `max_queued` and `max_queued_tokens` (of prompts;
    None: no bound) bound the pool's queue. With `refuse_late` calls that will miss their SLO are
    refused: on arrival if too much work is ahead, in the queue once they could not meet it even
    alone. Admitted calls are served by deadline, unless `ordering` says otherwise. A call whose
    client would leave before its first token is refused: clients leave when they announced it, the
    others after `patience_s`, and not before their SLO (None: all may wait without limit).
    `by_turns` is set by a shared pool that serves all its models in one order.
    """

    scheduler: str = "foresight"
    routing: str | None = None
    ordering: str | None = None
    binding: str | None = None
    cap: int | None = None
    max_queued: int = 1000
    max_queued_tokens: int | None = None
    refuse_late: bool = False
    patience_s: float | None = PATIENCE_S
    by_turns: bool = False


@dataclass(frozen=True, slots=True)
class PoolScaling:
    """How the replicas of a pool follow demand; changeable at run time through `user_config`.

    `policy` is a name of `cato.policies.scaling.registry`, called `every_s`. A pool with a minimum
    of 0 has no replicas after `idle_timeout_s` without work. The policy `cato` also stops each
    single replica that was idle for this long.
    """

    policy: str = "forecast"
    idle_timeout_s: float = 300.0
    every_s: float = 1.0


@record
class Shards:
    """The router shards of a pool: the first `owners` have replicas of their own, the `standby`
    after them only while an owner is being restarted."""

    owners: int = 1
    standby: int = 0

    @property
    def count(self) -> int:
        return self.owners + self.standby


ONE_SHARD = Shards()


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """All deployments that serve one model, possibly on different accelerators.

    `router_shards` is the number of its router actors; they own disjoint replicas. With
    `router_standby` another one takes over while one of them is being restarted.
    """

    name: PoolName
    model: ModelSpec
    deployments: tuple[DeploymentSpec, ...]
    policies: PoolPolicies = PoolPolicies()
    scaling: PoolScaling = PoolScaling()
    router_shards: int = 1
    router_standby: bool = False

    @property
    def shards(self) -> Shards:
        return Shards(self.router_shards, int(self.router_standby))

    @property
    def may_be_empty(self) -> bool:
        """Whether it may have no replicas without work; the first call then starts one."""
        return all(d.min_replicas == 0 for d in self.deployments)

    @property
    def of_shard(self) -> PoolPolicies:
        """The policies for each router shard: with its share of the queue bounds."""
        tokens = self.policies.max_queued_tokens
        return replace(
            self.policies,
            max_queued=-(-self.policies.max_queued // self.router_shards),
            max_queued_tokens=None if tokens is None else -(-tokens // self.router_shards),
        )

    def fastest(self, profiles: Mapping[DeploymentName, Profile]) -> Profile:
        """The profile of its fastest deployment, which its router uses."""
        return min((profiles[d.name] for d in self.deployments), key=attrgetter("typical_call_s"))


@dataclass(frozen=True, slots=True)
class HostedOn:
    """What differs on one deployment of the pool from `HostedModel` (None: nothing)."""

    profile: str | None = None
    load_s: float | None = None
    reload_s: float | None = None


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A model of a shared pool: the cost of loading it, and its speed.

    `profile` as of a deployment. `load_s` from storage and `reload_s` from the host's memory (None:
    the profile's value, at most the storage value). `slo_s` is the time to first token that its
    users expect: it determines how much a load hurts. At least `min_copies` stay loaded; at most
    `max_copies` are loaded. `on` has what differs on some deployments of the pool. `measured_on`
    is the only deployment of a model that was added at run time: nothing is known about the others.
    """

    model: ModelSpec
    profile: str | None = None
    load_s: float | None = None
    reload_s: float | None = None
    weights_bytes: int = 0
    slo_s: float = 1.5
    min_copies: int = 0
    max_copies: int = 1
    on: Mapping[DeploymentName, HostedOn] = field(default_factory=dict)
    measured_on: DeploymentName | None = None

    def at(self, deployment: DeploymentName) -> HostedModel:
        """With the values of `deployment` in its own fields."""
        there = self.on.get(deployment)
        if there is None:
            return self
        return replace(
            self,
            profile=there.profile or self.profile,
            load_s=self.load_s if there.load_s is None else there.load_s,
            reload_s=self.reload_s if there.reload_s is None else there.reload_s,
        )

    def fits(self, deployment: DeploymentSpec) -> bool:
        """Whether the slots of `deployment` can hold it; without a known size all can."""
        if self.measured_on not in (None, deployment.name):
            return False
        room_bytes = deployment.memory_bytes
        return room_bytes is None or self.weights_bytes <= room_bytes


@dataclass(frozen=True, slots=True)
class SharedPoolPolicies:
    """Which models a shared pool keeps and loads next; changeable at run time.

    `eviction`, `dispatch` and `placement` are names of `cato.policies.eviction.registry`: which
    model is unloaded, which is loaded next, and on which accelerators. `host_memory_bytes` is
    the room of each host for the weights of models that are not loaded. The other fields apply to
    each model's queue, as in `PoolPolicies`.
    """

    eviction: str = "foresight"
    dispatch: str = "queue-aware"
    placement: str = "urgent-on-fast"
    host_memory_bytes: int = 0
    max_queued: int = 1000
    scheduler: str = "fcfs"
    refuse_late: bool = False
    patience_s: float | None = None

    @property
    def of_models(self) -> PoolPolicies:
        """The policies of each model's queue."""
        return PoolPolicies(
            scheduler=self.scheduler,
            max_queued=self.max_queued,
            refuse_late=self.refuse_late,
            patience_s=self.patience_s,
        )


def slots_name(pool: str) -> DeploymentName:
    """The deployment of a shared pool's `slots`, the short form for pools with one shape."""
    return DeploymentName(f"{pool}-slots")


@dataclass(frozen=True, slots=True)
class SharedPoolSpec:
    """Slots that several models share, one model at a time each.

    The slots are the replicas of `deployments`, one for each resource shape; their number is fixed.
    Each model fits at least one of them.
    """

    name: PoolName
    models: tuple[HostedModel, ...]
    deployments: tuple[DeploymentSpec, ...]
    policies: SharedPoolPolicies = SharedPoolPolicies()

    def part_of(self, model: ModelName) -> PoolName:
        """Name of one model's part of the pool: for ingresses, receipts and metrics."""
        return PoolName(f"{self.name}/{model}")

    def deployment(self, name: DeploymentName) -> DeploymentSpec:
        """Its deployment of that name; raise `UnknownNameError`."""
        known = {d.name: d for d in self.deployments}
        if name not in known:
            raise UnknownNameError("deployment", name, tuple(known))
        return known[name]

    def path_of(self, name: DeploymentName) -> str:
        """Where the deployment file has that deployment."""
        is_short = name == slots_name(self.name)
        return f"shared_pools.{self.name}." + ("slots" if is_short else f"deployments.{name}")

    def where_fits(self, hosted: HostedModel) -> tuple[DeploymentSpec, ...]:
        """Its deployments whose slots can hold the model."""
        return tuple(d for d in self.deployments if hosted.fits(d))


@dataclass(frozen=True, slots=True)
class Kept:
    """What the metadata store keeps.

    Receipts of at most `receipts_per_s` runs are kept and learned from; all runs are counted. One
    core keeps four times as many as by default. Usage and accelerator time are kept for
    `usage_days`, the audit log for `audit_days`.
    """

    receipts_per_s: float = 1000.0
    usage_days: int = 400
    audit_days: int = 1_100


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything the `engines` application runs.

    `event_log`: the folder where every router logs its events and commands (None: no log). `store`:
    file or URL of the metadata store (None: `cato.store.location.default_location`).
    """

    pools: tuple[PoolSpec, ...]
    profiles_dir: str = "profiles"
    event_log: str | None = None
    store: str | None = None
    shared_pools: tuple[SharedPoolSpec, ...] = ()
    kept: Kept = Kept()

    def with_adapters(self, added: Mapping[ModelName, Sequence[AdapterSpec]]) -> Topology:
        """With adapters `added` to each base, as far as their names and places are free."""
        taken = {name for pool in self.pools for name in pool.model.names}
        pools = []
        for pool in self.pools:
            model = pool.model
            more = [a for a in added.get(model.name, ()) if taken.isdisjoint((a.name, *a.aliases))]
            adapters = (*model.adapters, *more[: model.adapter_places])
            pools.append(replace(pool, model=replace(model, adapters=adapters)))
        return replace(self, pools=tuple(pools))


@dataclass(frozen=True, slots=True)
class OutputCaps:
    """Output-token limits of calls that a client sends to a model directly, by kind.

    The caps of a task are in its workflow. Without a cap a model that does not stop would write
    until its context is full: Codex, for one, sends no limit.
    """

    completion: int = 8192
    chat: int = 4096
    agent: int = 8192


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits on a tenant's batches.

    `file_bytes` is per upload, `lines` per file, `total_bytes` for all its files; results count
    too, but are never cut short. Files are deleted after `keep_s`.
    """

    file_bytes: int = 100_000_000
    total_bytes: int = 1_000_000_000
    lines: int = 50_000
    open_batches: int = 20
    keep_s: float = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """Files and batches; `folder` holds prompts and answers.

    None: in the state folder, which belongs to one host. `at_once` lines run in each ingress
    replica.
    """

    folder: str | None = None
    limits: BatchLimits = BatchLimits()
    at_once: int = 8


@dataclass(frozen=True, slots=True)
class IngressSpec:
    """Everything the `cato` application (the HTTP ingress) needs.

    `indexes` maps an index name of a retrieve node to a folder of code, `checkers` a checker's name
    of a validate node to a command. `max_body_bytes` limits a request. `keys` says when a request
    needs an API key; see `cato.serve.access.control.KeyRule`. `output_caps` limits the output of
    one call. `brownout` says what runs skip while their pools are full. `prompt_rules_off` names
    disabled rules of `cato.wire.stable`. `proxies` are the addresses and networks of proxies whose
    client addresses are trusted. `origins` are those of web pages that may call the API, `hosts`
    further names by which clients without an API key may call the server. With `shared_prompts` a
    tenant's prompts use engines' caches of other tenants' prompts. With `reuse` identical
    deterministic calls of a tenant share answers. Without `batches` no files are kept. `prices`
    gives the cost of usage. With `sign_in` people sign in with tokens of an identity provider.
    """

    workflows_dir: str = "workflows"
    indexes: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 1
    max_body_bytes: int = 4_000_000
    keys: str = "auto"
    output_caps: OutputCaps = OutputCaps()
    brownout: tuple[BrownoutStep, ...] = ()
    prompt_rules_off: frozenset[str] = frozenset()
    proxies: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    shared_prompts: bool = False
    reuse: ReuseLimits | None = None
    batches: BatchSpec | None = None
    prices: Prices = NO_PRICES
    sign_in: SignInSpec | None = None
    checkers: Mapping[str, CheckerSpec] = field(default_factory=dict)
