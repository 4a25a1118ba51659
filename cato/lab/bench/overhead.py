"""CATO's overhead per call: the engine's own server, plain Serve and CATO, measured in turns.

Importing this module imports Ray, which then reads its settings: set the environment first.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from ray import serve

from cato.config.paths import resolve
from cato.config.schema import EnginesArgs, IngressArgs
from cato.control import actors
from cato.core.ids import PoolName
from cato.core.topology import EngineSpec
from cato.lab.bench import bare_server, plain
from cato.lab.bench.client import Client, Place, Prompts, Timing
from cato.lab.bench.companion import companion
from cato.lab.bench.cpu import cpu_s
from cato.lab.bench.deployment import on_accelerator
from cato.lab.bench.local_ray import start_ray, wait_until_answered
from cato.lab.client import BenchError
from cato.profiles.load import load_profile
from cato.serve.app import build_engines, build_ingress

ENGINE, PLAIN, CATO = "engine", "plain", "cato"
ARMS = (ENGINE, PLAIN, CATO)
HTTP_ONLY = "http only"

SIMULATED, VLLM = "simulated", "vllm"
SLOTS = {SIMULATED: 64, VLLM: 16}
MODELS = {SIMULATED: "zero", VLLM: "demo-coder"}
ZERO_PROFILE = "zero@none"
WARM_UPS = 20
LEAST_PER_STREAM = 4
# Receipts read after the measurement, evenly spread over the rounds.
MAX_RECEIPTS = 300
RECEIPT_LAG_S = 2.0
# On an accelerator vLLM compiles its model first.
READY_TIMEOUT_S = 600.0
START_TIMEOUT_S = 30.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Settings:
    """Measurement size: `rounds` blocks of `requests` for each arm and concurrency."""

    engines: tuple[str, ...]
    requests: int
    rounds: int
    concurrencies: tuple[int, ...]
    output_tokens: int
    seed: int

    def block(self, concurrency: int) -> int:
        """Requests of a block: enough that it is not mostly its beginning and its end."""
        return max(self.requests, LEAST_PER_STREAM * concurrency)


@dataclass(slots=True)
class Measurement:
    """One engine at one concurrency: per arm, the timings of each round.

    `messages` are the frames that CATO's calls took on links.
    """

    engine: str
    concurrency: int
    rounds: dict[str, list[list[Timing]]] = field(default_factory=dict)
    receipts: list[tuple[Timing, dict[str, Any]]] = field(default_factory=list)
    # Per arm: CPU seconds by process during its blocks.
    cpu_s: dict[str, dict[str, float]] = field(default_factory=dict)
    # Per arm: seconds of its blocks by the clock.
    wall_s: dict[str, float] = field(default_factory=dict)
    messages: int = 0


def order(number: int) -> tuple[str, ...]:
    """Order of the arms in round `number`: ABC, BCA, CAB, ABC, ..."""
    first = number % len(ARMS)
    return ARMS[first:] + ARMS[:first]


class Stage:
    """A local Ray with all measured applications. Use it as a context manager."""

    def __init__(
        self,
        engines: Sequence[str],
        say: Callable[[str], None],
        accelerator: str | None = None,
        profile: str | None = None,
    ) -> None:
        """`accelerator` and `profile` are vLLM's; None: a CPU core, and its profile."""
        self._engines = tuple(engines)
        self._accelerator, self._profile = accelerator, profile
        self._say = say
        self._close = contextlib.ExitStack()
        self.url = ""
        self.places: dict[str, dict[str, Place]] = {}

    def __enter__(self) -> Stage:
        try:
            self._start()
        except BaseException:
            self._close.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._say("stopping Ray")
        # Ray logs calls that it broke itself; real failures still raise.
        with contextlib.redirect_stderr(io.StringIO()):
            self._close.close()

    def _start(self) -> None:
        folder = Path(self._close.enter_context(tempfile.TemporaryDirectory(prefix="cato-b-")))
        self._say("starting Ray")
        port = start_ray(folder, self._close)
        self.url = f"http://127.0.0.1:{port}"
        self._say(f"deploying CATO with {' and '.join(self._engines)}")
        args = EnginesArgs.model_validate(
            engines_args(self._engines, self._accelerator, self._profile)
        )
        serve.run(
            build_engines(args),
            name=actors.ENGINES_APP,
            route_prefix=None,
            external_scaler_enabled=True,
        )
        ingress = IngressArgs.model_validate({"workflows": "workflows"})
        serve.run(build_ingress(ingress), name=actors.INGRESS_APP, route_prefix="/")
        wait_until_answered(f"{self.url}/readyz", READY_TIMEOUT_S)
        for engine in self._engines:
            self._say(f"deploying plain Serve in front of {engine}")
            if engine == SIMULATED:
                socket = str(folder / "bare.sock")
                self._close.enter_context(_bare_server(socket))
                inner = _plain_simulated()
            else:
                socket = engine_socket("bench-vllm")
                inner = plain.plain_vllm(socket)
            self.places[engine] = serve_plain(self.url, engine, MODELS[engine], socket, inner)


def engine_socket(deployment: str) -> str:
    """Socket of the engine of a deployment's only replica."""
    handle: Any = serve.get_deployment_handle(deployment, app_name=actors.ENGINES_APP)
    load = handle.load.remote().result(timeout_s=START_TIMEOUT_S)
    socket = str(load.get("socket") or "")
    if not socket:
        raise BenchError(f"the replica of {deployment} reports no socket of its engine")
    return socket


def _plain_simulated() -> serve.Application:
    profile = load_profile(resolve(f"profiles/{ZERO_PROFILE}.yaml"))
    return plain.plain_simulated(profile, EngineSpec("simulated", max_num_seqs=SLOTS[SIMULATED]))


def serve_plain(
    url: str, engine: str, model: str, socket: str, inner: serve.Application
) -> dict[str, Place]:
    """Deploy plain Serve around `inner`, beside CATO at `url`; returns each arm's place."""
    name = f"plain-{engine}"
    serve.run(plain.build_plain(inner, f"{name}-ingress"), name=name, route_prefix=f"/{name}")
    wait_until_answered(f"{url}/{name}/health", READY_TIMEOUT_S)
    return {
        ENGINE: Place("http://engine/v1/completions", model, socket),
        PLAIN: Place(f"{url}/{name}/v1/completions", model),
        CATO: Place(f"{url}/v1/completions", model),
        HTTP_ONLY: Place(f"{url}/{name}/http-only", model),
    }


_VLLM_ON_CPU: Mapping[str, Any] = {
    "accelerator": "cpu",
    "cpus": 1,
    "profile": "demo-coder@cpu",
    "engine": {
        "kind": "vllm",
        "zygote": True,
        # bfloat16 prefill takes five times as long on a CPU without bfloat16 instructions.
        "dtype": "float32",
        "max_num_seqs": SLOTS[VLLM],
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "kv_cache_memory": "256MiB",
        "enforce_eager": True,
    },
}


def engines_args(
    engines: Sequence[str], accelerator: str | None = None, profile: str | None = None
) -> dict[str, Any]:
    """`args` of the application with these engines; see `Stage`."""
    pools = {
        SIMULATED: {
            "model": MODELS[SIMULATED],
            "deployments": {
                "bench-simulated": {
                    "accelerator": "cpu",
                    "cpus": 0.1,
                    "profile": ZERO_PROFILE,
                    "engine": {"kind": "simulated", "max_num_seqs": SLOTS[SIMULATED]},
                }
            },
        },
        VLLM: {
            "model": MODELS[VLLM],
            "deployments": {
                "bench-vllm": on_accelerator(_VLLM_ON_CPU, accelerator, profile),
            },
        },
    }
    models = {
        SIMULATED: {"source": "simulated", "family": "qwen"},
        VLLM: {"source": "demo", "family": "qwen"},
    }
    return {
        "models": {MODELS[e]: models[e] for e in engines},
        "pools": {e: pools[e] for e in engines},
    }


@contextlib.contextmanager
def _bare_server(socket: str) -> Iterator[None]:
    profile = str(resolve(f"profiles/{ZERO_PROFILE}.yaml"))
    with companion(bare_server.__name__, profile, socket, str(SLOTS[SIMULATED])) as said:
        if said != bare_server.READY:
            raise BenchError("the bare server of the simulated engine did not start")
        yield


Progress = Callable[[str, int], None]
"""Called after every block with the arm measured and its number of requests."""

Frames = Callable[[], Awaitable[int]]
"""The number of frames that CATO's links have carried so far."""


async def measure(
    engine: str,
    concurrency: int,
    places: dict[str, Place],
    url: str,
    settings: Settings,
    progress: Progress,
    frames: Frames,
) -> Measurement:
    """All rounds of one engine at one concurrency."""
    found = Measurement(engine, concurrency)
    prompts = Prompts(settings.seed)
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            arm: await stack.enter_async_context(Client(place, settings.output_tokens))
            for arm, place in places.items()
        }
        for client in clients.values():
            await client.block([prompts.next() for _ in range(WARM_UPS)], concurrency)
        for number in range(settings.rounds):
            for arm in (*order(number), HTTP_ONLY):
                block = [prompts.next() for _ in range(settings.block(concurrency))]
                had = await frames() if arm == CATO else 0
                before, began_s = cpu_s(), time.perf_counter()
                timings = await clients[arm].block(block, concurrency)
                took_s = time.perf_counter() - began_s
                _add(found.cpu_s.setdefault(arm, {}), before, cpu_s())
                found.wall_s[arm] = found.wall_s.get(arm, 0.0) + took_s
                if arm == CATO:
                    found.messages += await frames() - had
                found.rounds.setdefault(arm, []).append(timings)
                progress(f"{engine}, {concurrency} at a time: {arm}", len(block))
    found.receipts = await _receipts(url, [t for r in found.rounds[CATO] for t in r])
    return found


def frames_of(pool: str, deployment: str) -> Frames:
    """Counts frames on the links of a pool's router and of the deployment's only replica."""

    async def frames() -> int:
        router: Any = actors.get(actors.router_name(PoolName(pool)))
        handle: Any = serve.get_deployment_handle(deployment, app_name=actors.ENGINES_APP)
        load = await handle.load.remote()
        told: int = await router.frames.remote()
        return told + int(load["frames"])

    return frames


def _add(total: dict[str, float], before: dict[str, float], after: dict[str, float]) -> None:
    for name, value in after.items():
        total[name] = total.get(name, 0.0) + value - before.get(name, value)


async def _receipts(url: str, timings: Sequence[Timing]) -> list[tuple[Timing, dict[str, Any]]]:
    """Receipts of some of CATO's requests, read after the measurement."""
    await asyncio.sleep(RECEIPT_LAG_S)
    some = timings[:: max(1, len(timings) // MAX_RECEIPTS)]
    found = []
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        for timing in some:
            answer = await http.get(f"/v1/requests/{timing.request_id}")
            if answer.status_code == 200:
                found.append((timing, answer.json()))
    return found


@dataclass(frozen=True, slots=True)
class Part:
    """One part of CATO's time for a call, in seconds: median and 90th percentile."""

    name: str
    p50_s: float
    p90_s: float


def breakdown(measurement: Measurement) -> list[Part]:
    """Parts of a call's time, from the client's timings and receipts of the same requests.

    The first four add up to the TTFT, the last two to the rest of the E2E latency, except for
    the difference between medians of sums and sums of medians.
    """
    parts: dict[str, list[float]] = {}
    for timing, receipt in measurement.receipts:
        llm = next((n["llm"] for n in receipt["nodes"] if n["llm"] is not None), None)
        if llm is None or receipt["ttft_s"] is None or llm["engine_ttft_s"] is None:
            continue
        ttft_s, e2e_s = receipt["ttft_s"], receipt["e2e_s"]
        planned_s = ttft_s - llm["queue_s"] - llm["engine_ttft_s"]
        for name, value in (
            (
                "HTTP in and out, reading the body",
                timing.ttft_s - ttft_s,
            ),
            ("planning the run", planned_s),
            ("lease from the pool's router", llm["queue_s"]),
            ("lease to first token", llm["engine_ttft_s"]),
            ("remaining tokens", e2e_s - ttft_s),
            ("ending", timing.e2e_s - timing.ttft_s - (e2e_s - ttft_s)),
        ):
            parts.setdefault(name, []).append(value)
    return [Part(name, statistics.median(values), _p90(values)) for name, values in parts.items()]


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))]
