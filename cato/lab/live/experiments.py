"""Live experiments: the tasks of `cato simulate`, and the arms that take turns.

A task is a `SimTask`, made with the simulator's seed: arrivals, DAG, lengths and objective are the
same on both sides. The time between calls that is not an LLM call (`before_s`, 10 to 50 ms) is
omitted on both sides; live, CATO's own overhead takes its place. The dynamic workload of
`coding-mixes` is omitted too: live, an answer decides whether a call happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cato.config.paths import resolve
from cato.core.errors import InputError, UnknownNameError
from cato.core.ids import PoolName
from cato.core.profile import Profile
from cato.core.topology import CPU_STEP_TOKENS, RAY_SERVE, PoolScaling, PoolSpec
from cato.lab.experiments import azure_replay, cato_rq, coding_mixes, coding_scaling, printed, saber
from cato.lab.live import paper_tasks, real, serve_llm
from cato.lab.live.experiment import (
    SERVE_SUFFIX,
    SESSIONS,
    UNBOUNDED,
    WARM_UP_SEED,
    Arm,
    LiveExperiment,
)
from cato.lab.live.traffic import SessionTraffic
from cato.lab.studies import agent_fleet, completions
from cato.lab.studies.agents import SESSION_RULES
from cato.policies import schedulers
from cato.profiles.load import load_profile
from cato.sim import mixed
from cato.sim.cato_workload import CATO_PRINTED_CLASSES, cato_tasks, load_per_task_s
from cato.sim.report import Setting
from cato.sim.tasks import SimTask
from cato.sim.tempo_workload import TEMPO_CHUNK_TOKENS
from cato.sim.trace_tasks import trace_beliefs, trace_tasks
from cato.sim.traces import load_azure
from cato.sim.workloads import saber_tasks


def _arm(scheduler: str, **policies: object) -> Arm:
    return Arm(scheduler, {"scheduler": scheduler, "max_queued": UNBOUNDED, **policies})


def _static_cap(cap: int) -> Arm:
    return replace(_arm("static-cap", cap=cap), name=saber.cap_name(cap))


_SERVE = Arm(RAY_SERVE, suffix=SERVE_SUFFIX)
_ROUND_ROBIN = _arm("round-robin")
_SERVE_LLM = Arm(serve_llm.NAME, completions=serve_llm.COMPLETIONS, has_twin=False)


# The coding tasks on fixed fleets


UTILIZATION = 0.5


def _cato_tasks(workload: str, seed: int, n: int) -> list[SimTask]:
    shares, classes = coding_mixes.WORKLOADS[workload]
    profile = coding_mixes.ONE_AT_A_TIME
    busy_s = sum(load_per_task_s(shares, classes, profile).values())
    rate_per_s = UTILIZATION * 2 * coding_mixes.REPLICAS / busy_s
    return cato_tasks(shares, rate_per_s, n, seed, profile=profile, classes=classes)


def coding_mixes_live(trace: Path | None) -> LiveExperiment:
    return LiveExperiment(
        "coding-mixes",
        "four coding tasks on 6 + 6 replicas of two models, one request at a time, "
        f"utilization {UTILIZATION:g}",
        {w: partial(_cato_tasks, w) for w in ("equal-shares", "mostly-completions")},
        (
            _arm(schedulers.FORESIGHT),
            _arm("cato"),
            _arm("power-of-two"),
            _ROUND_ROBIN,
            _SERVE,
        ),
        coding_mixes.TASKS,
        200,
    )


# CATO's research questions


def _research_question(
    name: str, utilizations: Sequence[float], slowdown: float, tasks: int
) -> Callable[[Path | None], LiveExperiment]:
    """At the paper's highest rate, and at fractions of the busier model's capacity."""
    ((mix, shares),) = printed.CODING[name].mixes.items()
    busy_s = max(load_per_task_s(shares, CATO_PRINTED_CLASSES, cato_rq.PROFILE).values())
    highest = printed.CODING[name].rates_per_s[-1]
    rates = {f"{mix} at {highest:g}/s": highest} | {
        f"{mix}, utilization {u:g}": u * printed.CODING_REPLICAS / busy_s for u in utilizations
    }
    whole = LiveExperiment(
        name,
        " and ".join(f"{share:.0%} {task}" for task, share in shares.items())
        + " on 6 + 6 replicas of two models, one request at a time",
        {
            workload: partial(paper_tasks.coding_tasks, shares, rate)
            for workload, rate in rates.items()
        },
        (
            _arm(schedulers.FORESIGHT),
            _arm("cato"),
            _arm("edf-bounded"),
            _ROUND_ROBIN,
            _SERVE,
        ),
        tasks,
        100,
        slowdown,
        runs_on="coding-mixes",
    )
    return lambda trace: whole


# SABER

SABER_RATES_PER_S = (5.0, 10.0)
SABER_CAPS = (10, 30, 100)


def _saber_tasks(workload: str, rate_per_s: float, seed: int, n: int) -> list[SimTask]:
    return saber_tasks(workload, rate_per_s, n, seed, saber.POOL)


def saber_rq1(trace: Path | None) -> LiveExperiment:
    return LiveExperiment(
        "saber",
        "SABER's workloads on one engine",
        {
            f"{w} at {rate:g}/s": partial(_saber_tasks, w, rate)
            for w in ("W1", "W2", "W3")
            for rate in SABER_RATES_PER_S
        },
        (_arm(schedulers.FORESIGHT), _arm("saber"), *map(_static_cap, SABER_CAPS), _SERVE),
        saber.REQUESTS,
        300,
        slowdown=5.0,
    )


# SLO-SA

LARGEST_BATCH = 4


def slo_sa_live(trace: Path | None) -> LiveExperiment:
    capped = {"cap": LARGEST_BATCH}
    return LiveExperiment(
        "slo-sa",
        f"bursts of {paper_tasks.BURST} chat and code calls on 2 instances of batches of "
        f"{LARGEST_BATCH}",
        {"chat-code": paper_tasks.burst_tasks},
        (
            _arm(schedulers.FORESIGHT),
            _arm("slo-sa", **capped),
            _arm("annealing", **capped),
            _arm("moore-smith", **capped),
            _ROUND_ROBIN,
            _SERVE,
        ),
        2 * paper_tasks.BURST,
        60,
    )


# Tempo

TEMPO_LOAD = 1.15


def tempo_live(trace: Path | None) -> LiveExperiment:
    return LiveExperiment(
        "tempo",
        "streams, calls with a deadline and collective tasks 3 : 1 : 1 on one engine",
        {f"load {TEMPO_LOAD:g}": partial(paper_tasks.mixed_tasks, TEMPO_LOAD)},
        (
            _arm(schedulers.FORESIGHT),
            _arm("tempo"),
            _arm("jitserve"),
            _arm("plas"),
            _ROUND_ROBIN,
            _SERVE,
        ),
        150,
        60,
        slowdown=3.0,
        chunk_tokens=TEMPO_CHUNK_TOKENS,
    )


# The Azure trace


def _azure_tasks(trace: Path | None, seed: int, n: int) -> list[SimTask]:
    """Tasks of `cato simulate azure-replay`: seeds below 100 and the warm-up replay the
    development rows.

    All believe what the rows before the reported ones teach, because a class has one workflow.
    """
    if trace is None:
        raise InputError("this experiment needs --trace FILE, a CSV file of the Azure LLM traces")
    is_development = seed < azure_replay.REPORT_SEEDS_FROM or seed == WARM_UP_SEED
    _, (begin, stop) = azure_replay.DEVELOPMENT if is_development else azure_replay.REPORT
    (first, end), _ = azure_replay.REPORT
    rows = load_azure(trace)
    if len(rows) <= begin:
        raise InputError(f"--trace: {trace} has {len(rows)} rows; {begin + 1} are needed")
    chosen = rows[begin : min(stop, begin + n)]
    return trace_tasks(chosen, trace_beliefs(rows[first:end]), PoolName("engine"), seed)


def azure(trace: Path | None) -> LiveExperiment:
    return LiveExperiment(
        "azure-replay",
        "replay of a production coding trace on 4 replicas, prompts in chunks",
        {"code": partial(_azure_tasks, trace)},
        (_arm(schedulers.FORESIGHT), _arm("cato"), _arm("saber"), _ROUND_ROBIN, _SERVE),
        500,
        300,
        chunk_tokens=azure_replay.CHUNK_TOKENS,
    )


# Short completions

COMPLETION_SHAPES = ((64, 20), (200, 20))
COMPLETION_LOADS = (0.5, 0.9)


def _completions(shape: tuple[int, int], load: float, seed: int, n: int) -> list[SimTask]:
    return completions.tasks(shape, load, 1, completions.TTFT_S[0], seed)[:n]


def short_completions(trace: Path | None) -> LiveExperiment:
    return LiveExperiment(
        "completions",
        "completions of 20 tokens on one replica that runs up to 32 of them at load .9",
        {
            f"{shape[0]}/{shape[1]} tokens, load {load:g}": partial(_completions, shape, load)
            for shape in COMPLETION_SHAPES
            for load in COMPLETION_LOADS
        },
        (
            *map(_arm, (schedulers.FORESIGHT, "power-of-two", "edf-bounded", "sjf-bounded")),
            _SERVE,
        ),
        400,
        200,
        # At full speed the shortest ones would arrive 123 times a second; this slows them to 38.
        slowdown=3.2,
        chunk_tokens=completions.CHUNK_TOKENS,
    )


# Recorded sessions of agents

AGENT_USERS = 12
# Engines do not retain blocks, so `continuum` would be `sticky`.
AGENT_ARMS = (
    schedulers.FORESIGHT,
    *(rule for rule in SESSION_RULES if rule != "continuum"),
    "power-of-two",
)


def _no_tasks(seed: int, n: int) -> list[SimTask]:
    return []


def recorded_agents(trace: Path | None) -> LiveExperiment:
    return LiveExperiment(
        "agents",
        "recorded sessions of coding agents with their think times, in a closed loop",
        {SESSIONS: _no_tasks},
        (*map(_arm, AGENT_ARMS), _SERVE),
        AGENT_USERS,
        60,
        slowdown=0.25,
        chunk_tokens=agent_fleet.STOCK.chunk_tokens,
        sessions=SessionTraffic(trace),
    )


# A real engine


LOADS = (0.5, 0.8, 1.1)
RANDOM_WEIGHTS = "dummy"  # vLLM's `--load-format`


def vllm_mix(trace: Path | None) -> LiveExperiment:
    profile = load_profile(resolve("profiles/demo-coder@cpu.yaml"))
    return mix_on(real.Mix(profile), "one vLLM engine with the demo model, on one core")


def mix_on(
    mix: real.Mix, what: str, step_tokens: int = CPU_STEP_TOKENS, prompt_cap_tokens: int = 0
) -> LiveExperiment:
    """`vllm-mix` on the engine of `mix`; the caps are fractions of its batch."""
    caps = dict.fromkeys(max(1, mix.full_batch // part) for part in (8, 4, 2, 1))
    return LiveExperiment(
        "vllm-mix",
        f"a mix like SABER's W3 on {what}",
        {f"W3-like, load {load:g}": partial(mix.tasks, load) for load in LOADS},
        (
            _arm(schedulers.FORESIGHT),
            _arm("saber"),
            *map(_static_cap, caps),
            *(() if serve_llm.missing_packages() else (_SERVE_LLM,)),
        ),
        200,
        150,
        slowdown=3.0,
        chunk_tokens=step_tokens,
        prompt_cap_tokens=prompt_cap_tokens,
        mix=mix,
    )


def mix_of(pool: PoolSpec, profile: Profile) -> LiveExperiment:
    """`vllm-mix` on the engine of the pool's first deployment."""
    deployment = pool.deployments[0]
    has_random_weights = RANDOM_WEIGHTS in deployment.engine.args
    endings = real.ENDLESS if has_random_weights else real.ENDINGS
    full = min(profile.max_running, deployment.engine.max_num_seqs)
    where = deployment.accelerator_type or deployment.accelerator
    weights = " (random weights)" if has_random_weights else ""
    what = f"one {deployment.engine.kind} engine with {pool.model.name}{weights}, on {where}"
    engine = deployment.engine.on(deployment.accelerator)
    return mix_on(
        real.Mix(profile, full, endings, pool.name),
        what,
        engine.max_num_batched_tokens or CPU_STEP_TOKENS,
        engine.long_prefill_token_threshold or 0,
    )


# Fixed fleets end here; the following ones scale


# As described in their papers; the default keeps the pool's usual settings.
_SCALED = (
    ("foresight + forecast", schedulers.FORESIGHT, PoolScaling("forecast")),
    ("cato + cato", "cato", PoolScaling("cato", idle_timeout_s=60.0)),
    ("foresight + queue-length", schedulers.FORESIGHT, PoolScaling("queue-length")),
)


def _scaled_arms() -> tuple[Arm, ...]:
    ours, *others = (
        replace(_arm(scheduler), name=name, scaling=scaling) for name, scheduler, scaling in _SCALED
    )
    # Serve takes ten minutes to remove its replicas, so in each round another arm runs before it.
    # Its autoscaler's delays are Serve's own, which the simulator's scaling does not have.
    return (ours, replace(_SERVE, has_twin=False), *others)


def _scaling_tasks(utilization: float, seed: int, n: int) -> list[SimTask]:
    setting: Setting = {
        "utilization": utilization,
        "arrivals": "poisson",
        "duration_s": coding_scaling.LONG_S,
    }
    return coding_scaling.tasks_of(setting, seed)[:n]


def coding_scaling_live(trace: Path | None) -> LiveExperiment:
    return LiveExperiment(
        "coding-scaling",
        "four coding tasks on 1 to 6 replicas of two models each, "
        f"{coding_scaling.COLD_START_S:g} s from the order of a replica to its first call",
        {f"utilization {u:g}": partial(_scaling_tasks, u) for u in coding_scaling.UTILIZATIONS},
        _scaled_arms(),
        300,
        100,
        cold_start_s=coding_scaling.COLD_START_S,
        ours=_SCALED[0][0],
    )


# Accelerators of two speeds

# Accelerators that are declared but not present: engines are simulated.
MIXED_HOSTS: tuple[Mapping[str, object], ...] = (
    {"num_gpus": 2},
    {"resources": {"NPU": 2}},
    {"resources": {"NPU": 2}},
)


def mixed_pool(trace: Path | None) -> LiveExperiment:
    return LiveExperiment(
        "mixed",
        "one model on 2 fast cards and 4 that are 2.5 times slower, on 3 hosts",
        {w: partial(mixed.tasks_of, w) for w in ("W2", "W3")},
        tuple(
            map(
                _arm, (schedulers.FORESIGHT, "power-of-two", "least-wait", schedulers.KNOWS_BATCHES)
            )
        ),
        400,
        300,
        slowdown=6.0,
        others=MIXED_HOSTS,
    )


EXPERIMENTS: Mapping[str, Callable[[Path | None], LiveExperiment]] = {
    "coding-mixes": coding_mixes_live,
    "cato-rq1": _research_question("cato-rq1", (), 1.0, 100),
    "cato-rq2": _research_question("cato-rq2", (0.83,), 4.0, 300),
    "slo-sa": slo_sa_live,
    "tempo": tempo_live,
    "saber": saber_rq1,
    "coding-scaling": coding_scaling_live,
    "azure-replay": azure,
    "vllm-mix": vllm_mix,
    "mixed": mixed_pool,
    "completions": short_completions,
    "agents": recorded_agents,
}


def live_experiment(name: str, trace: Path | None = None) -> LiveExperiment:
    """Raise `UnknownNameError` for an unknown name."""
    if name not in EXPERIMENTS:
        raise UnknownNameError("live experiment", name, tuple(EXPERIMENTS))
    return EXPERIMENTS[name](trace)
