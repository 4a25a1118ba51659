"""Accelerator measurements through CATO: a deployment file on its own Ray.

Importing this module imports Ray, which then reads its settings: set the environment first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from ray import serve

from cato.config.deploy_file import DeployFile
from cato.control import actors
from cato.control.measured_replica import ReplicaCaller, engine_steps, find_replica
from cato.control.measured_replica import whole as whole_number
from cato.core.ids import PoolName
from cato.lab.accelerator import alone
from cato.lab.bench import overhead, plain, report
from cato.lab.client import BenchError, events
from cato.lab.experiments import saber
from cato.lab.live.experiment import Arm
from cato.lab.live.rounds import Progress, ReplicaPoint
from cato.lab.live.session import Options, Session
from cato.lab.live.stage import Stage
from cato.measure.check import CALLS, Verdict, check, mixed_run
from cato.measure.evaluation import evaluate
from cato.measure.points import Plan, Target
from cato.measure.sweep import Sweep
from cato.profiles.schema import ProfileFile, Provenance

CONTROL_TIMEOUT_S = 30.0
BACK_TIMEOUT_S = 600.0
POLL_S = 0.2
# Where a stream is resumed, the text is tokenized again, perhaps into other tokens.
TOKENS_OFF = 3
# Characters of each stream received before the engine is killed.
CHUNKS_BEFORE = 3
# Schedulers on a mix; a third arm lets the engine run as many calls as it can.
ARMS = ("foresight", "saber")


@dataclass(frozen=True, slots=True)
class Form:
    """How much to measure."""

    plan: Plan
    check_calls: int
    overhead: overhead.Settings
    workloads: tuple[str, ...]
    tasks: int
    warm_up: int
    streams: int
    stream_tokens: int


def whole(seed: int) -> Form:
    settings = overhead.Settings((overhead.VLLM,), 64, 4, (1, 16, 64), 16, seed)
    loads = ("W3-like, load 0.8", "W3-like, load 1.1")
    return Form(alone.WHOLE.plan, CALLS, settings, loads, 400, 300, 64, 128)


def small(seed: int) -> Form:
    settings = overhead.Settings((overhead.VLLM,), 4, 2, (1, 3), 8, seed)
    return Form(alone.SMALL.plan, 8, settings, ("W3-like, load 0.5",), 8, 4, 4, 48)


class Served:
    """CATO with one deployment file. Use it as a context manager."""

    def __init__(
        self, deploy: DeployFile, folder: Path, form: Form, seed: int, say: Callable[[str], None]
    ) -> None:
        self._pool = deploy.topology.pools[0]
        self._deployment = self._pool.deployments[0]
        is_cpu = self._deployment.accelerator == "cpu"
        options = Options(
            "vllm-mix",
            deploy,
            form.workloads,
            (*ARMS, saber.cap_name(self._deployment.engine.max_num_seqs)),
            (seed,),
            form.tasks,
            # On a CPU the client shares the engine's cores; nothing slows an accelerator.
            slowdown=None if is_cpu else 1.0,
            warm_up=form.warm_up,
            has_one_engine=True,
        )
        self._form, self._seed = form, seed
        self._session = Session(options)
        self._stage = self._session.stage(folder, say)
        self._places: Mapping[str, Any] = {}

    def __enter__(self) -> Served:
        self._stage.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stage.__exit__(*exc)

    # b

    def predicted(self, progress: Progress) -> dict[str, Any]:
        """Run `cato profile` and its checks."""
        return asyncio.run(self._predicted(progress))

    async def _predicted(self, progress: Progress) -> dict[str, Any]:
        found = await find_replica(self._pool, self._deployment)
        caller = ReplicaCaller(self._deployment.name, found.replica)
        load, steps = await caller.load(), await engine_steps(caller, found)
        target = Target(
            model=self._pool.model.name,
            accelerator=found.profile.accelerator,
            engine=self._deployment.engine.kind,
            context_tokens=found.context_tokens,
            max_running=found.max_running,
            kv_capacity_tokens=whole_number(load.get("kv_capacity_tokens")),
            load_s=found.load_s,
            step_tokens=steps.step_tokens,
            prompt_cap_tokens=steps.prompt_cap_tokens,
            block_tokens=steps.block_tokens,
        )
        progress.begin("a sweep through CATO", 1)
        sweep = Sweep(caller, target, self._form.plan, self._seed)
        result = evaluate(target, await sweep.run((), lambda done, total, what: None))
        shares = steps.block_tokens > 0
        calls = mixed_run(result.profile, self._seed, self._form.check_calls, shares=shares)
        progress.begin("a mixed run, twice", 2 * len(calls))
        checked = await check(caller, result.profile, steps, calls, self._seed, progress.step)
        verdicts = {}
        for kind, is_cached in {"cold": False, "cached": True}.items():
            some = [c for c in checked if (c.call.shared_tokens > 0) == is_cached]
            if some:
                verdict = Verdict.of(some)
                verdicts[kind] = {**asdict(verdict), "is_good": verdict.is_good}
        profile = ProfileFile.of(result.profile, Provenance(samples=result.samples))
        return {"verdicts": verdicts, "profile": profile.model_dump()}

    # c

    def overhead(self, progress: Progress) -> dict[str, Any]:
        """`cato bench overhead` on this engine."""
        if not self._places:
            socket = overhead.engine_socket(self._deployment.name)
            name = self._pool.model.name
            inner = plain.plain_vllm(socket)
            self._places = overhead.serve_plain(self._stage.url, overhead.VLLM, name, socket, inner)
        settings, results = self._form.overhead, []
        for concurrency in settings.concurrencies:
            if concurrency > self._deployment.engine.max_num_seqs:
                continue
            arms = len(overhead.ARMS) + 1
            progress.begin(f"{concurrency} at a time", arms * settings.rounds)
            run = overhead.measure(
                overhead.VLLM,
                concurrency,
                dict(self._places),
                self._stage.url,
                settings,
                lambda what, requests: progress.step(),
                overhead.frames_of(self._pool.name, self._deployment.name),
            )
            results.append(asyncio.run(run))
        return report.as_json(results, settings, {}, "")

    # d

    def mix(self, progress: Progress) -> dict[str, Any]:
        """`cato bench live vllm-mix` on this engine, with an empty prefix cache for each arm."""
        stage = _Fresh(self._stage, overhead.engine_socket(self._deployment.name))
        return self._session.run_on(stage, progress, {}, "")

    # e

    def killed(self, progress: Progress) -> dict[str, Any]:
        """All streams' answers: twice undisturbed, and once with the engine killed meanwhile."""
        return asyncio.run(self._killed(progress))

    async def _killed(self, progress: Progress) -> dict[str, Any]:
        n = min(self._form.streams, self._deployment.engine.max_num_seqs)
        tokens = self._form.stream_tokens
        prompts = [f"# {i}\ndef value_{i}(" for i in range(n)]
        progress.begin("streams: undisturbed, twice; then with their engine killed", 3)
        handle: Any = serve.get_deployment_handle(
            self._deployment.name, app_name=actors.ENGINES_APP
        )
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(BACK_TIMEOUT_S)) as http:
            calm = await self._streams(http, prompts, tokens)
            progress.step()
            again = await self._streams(http, prompts, tokens)
            progress.step()
            pid = (await handle.load.remote())["pid"]
            streams = [_Stream() for _ in prompts]
            reading = asyncio.gather(
                *(self._read(http, p, tokens, s) for p, s in zip(prompts, streams, strict=True))
            )
            await asyncio.gather(*(s.has_begun.wait() for s in streams))
            sent = [len(s.text) for s in streams]
            running = sum(not s.ended for s in streams)
            killed_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            back_s = await _back(handle, pid) - killed_s
            await reading
            progress.step()
        return verdict_of_kill(calm, again, streams, sent, tokens) | {
            "running": running,
            "engine_back_s": back_s,
            "last_answer_s": max(s.ended for s in streams) - killed_s,
        }

    async def _streams(
        self, http: aiohttp.ClientSession, prompts: Sequence[str], tokens: int
    ) -> list[str]:
        streams = [_Stream() for _ in prompts]
        await asyncio.gather(
            *(self._read(http, p, tokens, s) for p, s in zip(prompts, streams, strict=True))
        )
        if problem := next((s.problem for s in streams if s.problem), ""):
            raise BenchError(f"an undisturbed stream failed: {problem}")
        return [s.text for s in streams]

    async def _read(
        self, http: aiohttp.ClientSession, prompt: str, tokens: int, stream: _Stream
    ) -> None:
        body = {
            "model": self._pool.model.name,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        url = f"{self._stage.url}/v1/completions"
        try:
            async with http.post(url, json=body) as response:
                if response.status != 200:
                    stream.problem = f"{response.status}: {(await response.text())[:200]}"
                    return
                async for event in events(response):
                    stream.take(event)
        except aiohttp.ClientError as error:
            stream.problem = repr(error)
        finally:
            stream.ended = time.monotonic()
            stream.has_begun.set()


@dataclass(slots=True)
class _Stream:
    """One streamed answer."""

    text: str = ""
    chunks: int = 0
    tokens: int = 0
    is_whole: bool = False
    ended: float = 0.0
    problem: str = ""
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, event: dict[str, Any] | None) -> None:
        """Process an event of the answer; None is its end."""
        if event is None:
            self.is_whole = True
            return
        if "error" in event:
            self.problem = str(event["error"])[:200]
        for choice in event.get("choices", ()):
            self.text += choice.get("text") or ""
            self.chunks += 1
            if self.chunks >= CHUNKS_BEFORE:
                self.has_begun.set()
        if event.get("usage"):
            self.tokens = event["usage"]["completion_tokens"]


def verdict_of_kill(
    calm: Sequence[str],
    again: Sequence[str],
    streams: Sequence[_Stream],
    sent: Sequence[int],
    tokens: int,
) -> dict[str, Any]:
    """Compares the streams of a killed engine; `sent`: characters each had received at the kill.

    A greedy answer depends on its batch: the number of undisturbed answers that differ between two
    runs is the number that may differ here. `changed_before` counts answers that differ
    from both undisturbed ones within the text received before the kill.
    """
    whole = [s.is_whole and not s.problem and abs(s.tokens - tokens) <= TOKENS_OFF for s in streams]
    both = list(zip(calm, again, strict=True))
    return {
        "streams": len(streams),
        "whole": sum(whole),
        "problems": list(dict.fromkeys(s.problem for s in streams if s.problem))[:3],
        "changed_before": sum(
            all(s.text[:n] != text[:n] for text in pair)
            for s, n, pair in zip(streams, sent, both, strict=True)
        ),
        "other_after": sum(s.text not in pair for s, pair in zip(streams, both, strict=True)),
        "other_undisturbed": sum(a != b for a, b in both),
    }


async def _back(handle: Any, killed: int) -> float:
    """Time when an engine other than the killed one answers."""
    deadline_s = time.monotonic() + BACK_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(Exception):  # the replica may not answer while its engine is dead
            load = await handle.load.remote()
            if load["state"] == "ready" and load["pid"] not in (None, killed):
                return time.monotonic()
        await asyncio.sleep(POLL_S)
    raise BenchError(f"no engine was ready {BACK_TIMEOUT_S:.0f} s after the kill")


class _Fresh:
    """A stage that empties the prefix cache before each arm: all arms send the same prompts."""

    def __init__(self, stage: Stage, socket: str) -> None:
        self.url = stage.url
        self._stage, self._socket = stage, socket

    def configure(self, arm: Arm) -> None:
        self._stage.configure(arm)
        transport = httpx.HTTPTransport(uds=self._socket)
        with httpx.Client(transport=transport, timeout=CONTROL_TIMEOUT_S) as engine:
            answer = engine.post("http://engine/reset_prefix_cache")
        if answer.status_code != 200:
            raise BenchError(
                f"the engine kept its prefix cache ({answer.status_code}): its deployment needs "
                'env: {VLLM_SERVER_DEV_MODE: "1"}'
            )

    def reset(self, arm: Arm) -> None:
        self._stage.reset(arm)

    def forget_sessions(self) -> None:
        self._stage.forget_sessions()

    def replicas(self, since_s: float) -> dict[PoolName, list[ReplicaPoint]]:
        return self._stage.replicas(since_s)
