"""Cost of traces and log lines per call: two ingresses of one CATO, with and without, in turns.

Metrics are counted in the Profiler, off the path of a call; only the router's decision log is on
it, in both arms. Importing this module imports Ray, which then reads its settings: set the
environment first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ray import serve

from cato.config.schema import IngressArgs
from cato.lab.bench import otlp_sink
from cato.lab.bench.client import Client, Place, Prompts
from cato.lab.bench.companion import companion
from cato.lab.bench.local_ray import wait_until_answered
from cato.lab.bench.overhead import MODELS, READY_TIMEOUT_S, SIMULATED, WARM_UPS, Stage
from cato.lab.intervals import Rounds, paired_difference, summary
from cato.lab.live.rounds import Progress
from cato.serve.app import ingress_application
from cato.telemetry.logs import LEVEL_VARIABLE

OFF, ON = "off", "on"
OUTPUT_TOKENS = 16
# Blocks are short, so that disturbances of the machine affect both arms.
REQUESTS = 10
MS = 1000.0


@dataclass(frozen=True, slots=True)
class Settings:
    """`rounds` times ten requests for each arm, one at a time."""

    rounds: int
    seed: int


def measure(settings: Settings, say: Callable[[str], None], progress: Progress) -> dict[str, Any]:
    """Times of both arms in milliseconds, and the difference of their medians with its interval."""
    with companion(otlp_sink.__name__) as port, Stage((SIMULATED,), say) as stage:
        places = {}
        for arm, environment in _environments(f"http://127.0.0.1:{int(port)}").items():
            say(f"deploying an ingress with telemetry {arm}")
            spec = IngressArgs.model_validate({"workflows": "workflows"}).to_ingress()
            application = ingress_application(spec, environment)
            serve.run(application, name=f"telemetry-{arm}", route_prefix=f"/telemetry-{arm}")
            url = f"{stage.url}/telemetry-{arm}"
            wait_until_answered(f"{url}/readyz", READY_TIMEOUT_S)
            places[arm] = Place(f"{url}/v1/completions", MODELS[SIMULATED])
        progress.begin("asking in turns", len(places) * settings.rounds)
        ttft, e2e = asyncio.run(_in_turns(places, settings, progress))
    return {
        "ttft_ms": _compared(ttft, settings.seed),
        "e2e_ms": _compared(e2e, settings.seed),
    }


def _environments(collector: str) -> Mapping[str, Mapping[str, str]]:
    return {
        OFF: {LEVEL_VARIABLE: "ERROR", "OTEL_SDK_DISABLED": "true"},
        ON: {LEVEL_VARIABLE: "INFO", "OTEL_EXPORTER_OTLP_ENDPOINT": collector},
    }


async def _in_turns(
    places: Mapping[str, Place], settings: Settings, progress: Progress
) -> tuple[dict[str, list[list[float]]], dict[str, list[list[float]]]]:
    prompts = Prompts(settings.seed)
    ttft: dict[str, list[list[float]]] = {arm: [] for arm in places}
    e2e: dict[str, list[list[float]]] = {arm: [] for arm in places}
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for arm, place in places.items():
            clients[arm] = await stack.enter_async_context(Client(place, OUTPUT_TOKENS))
            await clients[arm].block([prompts.next() for _ in range(WARM_UPS)], 1)
        for number in range(settings.rounds):
            for arm in (OFF, ON) if number % 2 else (ON, OFF):
                block = await clients[arm].block([prompts.next() for _ in range(REQUESTS)], 1)
                ttft[arm].append([MS * t.ttft_s for t in block])
                e2e[arm].append([MS * t.e2e_s for t in block])
                progress.step()
    return ttft, e2e


def _compared(rounds: Mapping[str, Rounds], seed: int) -> dict[str, Any]:
    off, on = summary(rounds[OFF]), summary(rounds[ON])
    difference = paired_difference(rounds[ON], rounds[OFF], seed=seed)
    share = {name: value / off.p50 for name, value in asdict(difference).items()}
    return {OFF: asdict(off), ON: asdict(on), "p50_difference": asdict(difference), "share": share}
