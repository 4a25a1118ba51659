"""Small fleets and workloads: a test mentions only what matters to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from kits.builders import a_profile

from cato.core.commands import Command
from cato.core.events import Event
from cato.core.eviction import Wanted
from cato.core.ids import InvocationId, PoolName, TaskName
from cato.core.length import LengthBelief
from cato.core.orchestrator import PoolOrchestrator, PoolPicture
from cato.core.policies import Policies
from cato.core.profile import Profile
from cato.core.slo import SloMetric
from cato.estimators.usl import UslFit
from cato.policies import schedulers
from cato.policies.ordering.tempo import GainDensity
from cato.sim.card_workload import OUTPUT_TOKENS, SLO_S, CardArrival, model_name
from cato.sim.fleet import Fleet, PoolSetup, Recorder
from cato.sim.tasks import SimNode, SimTask

POOL = PoolName("p")
# Steps of 10 ms and 1 ms a request, prompts at 10,000 tokens a second, a KV cache that can fill up.
PROFILE = replace(
    a_profile(prefill_s=0.01, token_s=0.01, batch_token_s=0.001),
    prefill_per_batch_token_s=1e-4,
    decode_per_context_token_s=1e-7,
    kv_capacity_tokens=1_400,
)
SPEED = UslFit(lambda_tokens_per_s=90.0, sigma=0.08, kappa=0.0, r2=1.0)


OPPONENTS = ("edf-bounded", "ray-serve", "block-cost", "prefix-affinity", "working-set")


def whole_schedulers() -> dict[str, Policies]:
    """Every scheduler of `cato.policies.schedulers`, by name."""
    early = {n: schedulers.early(n) for n in ("round-robin", "power-of-two", "least-wait")}
    return early | {
        "cato": schedulers.cato(),
        "static-cap": schedulers.static_cap(4),
        "saber": schedulers.saber(SPEED),
        "foresight": schedulers.foresight(),
        "sjf": schedulers.sjf(),
        "edf": schedulers.edf(),
        **{n: schedulers.OF_PROFILE[n](PROFILE, 1) for n in OPPONENTS},
        "plas": schedulers.plas(PROFILE),
        "tempo": schedulers.tempo(GainDensity(PROFILE)),
        "jitserve": schedulers.jitserve(PROFILE),
        "annealing": schedulers.mapped("annealing", 4),
        "slo-sa": schedulers.slo_sa(4),
    }


SCHEDULERS = whole_schedulers()


def a_task(
    id: str,
    at_s: float = 0.0,
    *,
    prompt: int = 100,
    output: int = 10,
    expected: int | None = None,
    target_s: float = 10.0,
    metric: SloMetric = SloMetric.E2E,
    nodes: Sequence[SimNode] = (),
    draw: float = 0.0,
) -> SimTask:
    """One call, or `nodes`."""
    nodes = tuple(nodes) or (SimNode(POOL, prompt, output, expected or output),)
    return SimTask(id, TaskName("t"), at_s, metric, target_s, nodes, (draw,) * len(nodes))


def random_tasks(seed: int, n: int, rate_per_s: float) -> list[SimTask]:
    """Single calls of mixed sizes, objectives and tightness, and beliefs that are often wrong."""
    rng = np.random.default_rng(seed)
    tasks, at_s = [], 0.0
    for i in range(n):
        at_s += float(rng.exponential(1 / rate_per_s))
        prompt, output = int(rng.integers(1, 600)), int(rng.integers(1, 120))
        belief = LengthBelief.of(float(x) for x in rng.integers(1, 121, 16))
        metric = SloMetric.TTFT if rng.random() < 0.3 else SloMetric.E2E
        alone_s = seconds_alone(PROFILE, prompt, output if metric is SloMetric.E2E else 1)
        has_slo = rng.random() < 0.9
        tasks.append(
            SimTask(
                f"t{i:03d}",
                TaskName("t"),
                at_s,
                metric,
                alone_s * float(rng.uniform(0.8, 6.0)) if has_slo else inf,
                (SimNode(POOL, prompt, output, round(belief.mean), belief),),
                (float(rng.random()),),
                float(rng.choice([0.02, inf])) if metric is SloMetric.TTFT else inf,
            )
        )
    return tasks


def seconds_alone(profile: Profile, prompt: int, output: int, batch: int = 1) -> float:
    """Time of a replica that a call takes at least, as one of at most `batch`.

    A step is shared evenly but for each one's own context: base/batch + per_request + own context.
    """
    steps = output - 1
    contexts = sum(prompt + k for k in range(1, steps + 1))
    step_s = profile.decode_base_s / batch + profile.decode_per_request_s
    return (
        profile.prefill_s(prompt) + steps * step_s + profile.decode_per_context_token_s * contexts
    )


def a_fleet(
    policies: Policies,
    *,
    replicas: int = 1,
    max_running: int = 8,
    profile: Profile = PROFILE,
    report_steps: int = 10,
    chunk_tokens: int | None = None,
    cold_start_s: float = 0.0,
    dispatch_s: float = 0.0,
    news_s: float = 0.0,
    recorder: Recorder | None = None,
) -> Fleet:
    setup = PoolSetup(
        POOL,
        (profile,) * replicas,
        policies,
        max_running,
        chunk_tokens,
        report_steps,
        prefill_together=False,
        cold_start_s=cold_start_s,
        dispatch_s=dispatch_s,
        news_s=news_s,
    )
    return Fleet([setup], recorder)


@dataclass(slots=True)
class Scribe:
    """A pool's orchestrator, and a list of what it ordered."""

    orchestrator: PoolOrchestrator
    orders: list[tuple[Command, ...]] = field(default_factory=list)

    def handle(self, event: Event) -> tuple[Command, ...]:
        self.orders.append(self.orchestrator.handle(event))
        return self.orders[-1]

    def picture(self, now_s: float) -> PoolPicture:
        return self.orchestrator.picture(now_s)


def a_card_arrival(id: str, language: str, kind: str, at_s: float, user: str = "") -> CardArrival:
    """A call of the `kind` model for `language`, with a prompt and an answer of usual lengths."""
    tokens = OUTPUT_TOKENS[kind][0]
    deadline_s = at_s + SLO_S[kind]
    model = model_name(language, kind)
    wanted = Wanted(InvocationId(id), model, at_s, deadline_s, tokens, user=user)
    return CardArrival(wanted, kind, 600, round(tokens))
