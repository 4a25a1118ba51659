"""Rollouts under 50 streams: a good canary is promoted, a slow one rolled back, none is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cato.core.profile import Profile
from cato.engines.simulated import simulated_text
from cato.profiles.load import load_profile_file, save_profile
from cato.serve.ports import free_port
from tests.live.conftest import ROOT, wait_ready
from tests.live.test_serve_cli import BIN, env

__all__ = ["env"]  # the fixture of `cato serve`

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(590),
    pytest.mark.skipif("CATO_DRILLS" not in os.environ, reason="takes minutes: `make drills`"),
]

STREAMS, TOKENS, SEED = 50, 16, 7
STEP_S = 0.15  # so long that a busy machine keeps it
PATH = "/v1/admin/rollouts"
# What a slow canary cannot keep: its steps take twice as long.
PACE_MS = 1.5 * STEP_S * 1000
# The limits that a rollout has without these want hours of traffic.
RULE = [
    "--shadow", "0", "--min-calls", "40", "--hold", "1",
    "--miss-limit", "0.2", "--error-limit", "0.2", "--ttft-limit", "0.5",
]  # fmt: skip
DECIDED_WITHIN_S = 180.0


def a_profile(name: str, *, times: float) -> Profile:
    """Steps of 150 ms and prompts of 100 ms, or so many `times` as long."""
    profile = load_profile_file(ROOT / "profiles" / "saber@gpu.yaml").to_profile()
    return replace(
        profile,
        model=name,
        prefill_per_batch_token_s=0.0,
        prefill_base_s=0.1 * times,
        decode_per_request_s=0.0,
        decode_base_s=STEP_S * times,
        load_s=0.2,
    )


@pytest.fixture
def url(tmp_path: Path, env: dict[str, str]) -> Iterator[str]:
    """`cato serve` with two ingress replicas and three versions of a model."""
    file = load_profile_file(ROOT / "profiles" / "saber@gpu.yaml")
    (tmp_path / "profiles").mkdir()
    for name, times in (("usual", 1.0), ("slow", 2.0)):
        save_profile(
            tmp_path / "profiles" / f"{name}@gpu.yaml",
            a_profile(name, times=times),
            file.provenance,
        )
    config = yaml.safe_load((ROOT / "deployments" / "simulated.yaml").read_text())
    config["http_options"]["port"] = port = free_port()
    engines, ingress = config["applications"]
    versions = {"coder-1": "usual", "coder-2": "usual", "coder-3": "slow"}
    engines["args"] |= {
        "profiles": str(tmp_path / "profiles"),
        "store": str(tmp_path / "metadata.db"),
        "models": {
            "coder-1": {
                "source": "simulated", "family": "qwen",
                "aliases": ["coder", "coder-fast", "coder-large", "coder-review"],
            },
            "coder-2": {"source": "simulated", "family": "qwen"},
            "coder-3": {"source": "simulated", "family": "qwen"},
        },
        "pools": {
            model: {
                "model": model,
                "scaling": {"policy": "none"},
                "deployments": {
                    f"{model}-sim": {
                        "accelerator": "cpu",
                        "cpus": 0.1,
                        "profile": f"{profile}@gpu",
                        "engine": {"kind": "simulated", "max_num_seqs": 64, "seed": SEED},
                    }
                },
            }
            for model, profile in versions.items()
        },
    }  # fmt: skip
    ingress["args"]["replicas"] = 2
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump(config))
    process = subprocess.Popen(
        [str(BIN / "cato"), "serve", str(path)], env=env, cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    try:
        wait_ready(f"http://127.0.0.1:{port}", 200, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(90)


@dataclass
class Traffic:
    """Streams of new sessions, one after the other in `STREAMS` places, until told to end."""

    url: str
    models: list[tuple[float, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    ends: bool = False
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=STREAMS, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, limits=limits, timeout=60) as http:
            await asyncio.gather(*(self._place(http) for _ in range(STREAMS)))

    async def _place(self, http: httpx.AsyncClient) -> None:
        while not self.ends:
            n = next(self._numbers)
            try:
                await self._stream(http, n)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.lost.append(f"{n}: {error!r}")

    async def _stream(self, http: httpx.AsyncClient, n: int) -> None:
        prompt, text, last, model = f"# file {n}\n", "", "", ""
        began_s = time.monotonic()
        body = {"model": "coder", "prompt": prompt, "max_tokens": TOKENS, "stream": True}
        headers = {"X-CATO-Session": f"session-{n}", "X-CATO-TPOT-Ms": f"{PACE_MS:g}"}
        request = http.stream(
            "POST", "/v1/completions", json=body | {"ignore_eos": True}, headers=headers
        )
        async with request as answer:
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code} {await answer.aread()!r}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    text += "".join(choice["text"] for choice in chunk["choices"])
                    model = chunk["model"]
                last = line or last
        if last != "data: [DONE]" or text != simulated_text(SEED, prompt, TOKENS):
            raise ValueError(f"broke off after {text!r}")
        self.models.append((began_s, model))


def cato(url: str, *words: str) -> str:
    """What `cato rollout` says."""
    done = subprocess.run(
        [str(BIN / "cato"), "rollout", *words, "--url", url],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


async def ended(http: httpx.AsyncClient, traffic: Traffic, canary: str) -> dict[str, Any]:
    """The rollout to `canary` when it is over; an ingress may not have heard of it yet."""
    give_up_s = time.monotonic() + DECIDED_WITHIN_S
    while time.monotonic() < give_up_s:
        found_now = (await http.get(PATH)).json()["data"]
        rollout = found_now[0] if found_now else {"phase": "", "canary": ""}
        is_over = rollout["phase"] in ("promoted", "rolled-back")
        if is_over and rollout["canary"] == canary:
            found: dict[str, Any] = rollout
            return found
        assert not traffic.lost, traffic.lost[:3]
        await asyncio.sleep(0.5)
    raise AssertionError(f"not decided: {rollout}")


async def test_a_good_canary_is_promoted_and_a_slow_one_rolled_back_without_a_lost_stream(
    url: str,
) -> None:
    traffic = Traffic(url)
    running = asyncio.create_task(traffic.run())
    no_idle = httpx.Limits(max_keepalive_connections=0)  # a server may close it just then
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=no_idle) as http:
        await asyncio.sleep(2)
        said = await asyncio.to_thread(cato, url, "start", "coder", "--canary", "coder-2", *RULE)
        assert "5 %" in said
        good = await ended(http, traffic, "coder-2")
        promoted_s = time.monotonic()
        await asyncio.sleep(9)
        await asyncio.to_thread(cato, url, "start", "coder", "--canary", "coder-3", *RULE)
        started_s = time.monotonic()
        slow = await ended(http, traffic, "coder-3")
        rolled_back_s = time.monotonic()
        await asyncio.sleep(9)
        traffic.ends = True
        await running
        await _sessions_stay_where_they_are(url, http)
    print(_told(good), _told(slow), Counter(m for _, m in traffic.models), sep="\n")
    assert good["phase"] == "promoted", good
    assert [c["share"] for c in good["history"]] == [0.05, 0.25, 1.0]
    assert slow["phase"] == "rolled-back", slow
    assert [c["share"] for c in slow["history"]] == [0.05, 0.0]
    assert (slow["stable"], slow["canary"]) == ("coder-2", "coder-3")
    assert traffic.lost == []
    # An ingress hears of a step within a second, on a busy machine later.
    between = {m for at_s, m in traffic.models if promoted_s + 6 < at_s < started_s - 0.5}
    after = {m for at_s, m in traffic.models if at_s > rolled_back_s + 6}
    assert between == after == {"coder-2"}
    assert {m for _, m in traffic.models} == {"coder-1", "coder-2", "coder-3"}


async def _sessions_stay_where_they_are(url: str, http: httpx.AsyncClient) -> None:
    """Whichever ingress replica a call comes to."""
    words = ("--share", "0.5", "--shadow", "0", "--min-calls", "100000", "--max-calls", "100000")
    await asyncio.to_thread(cato, url, "start", "coder", "--canary", "coder-1", *words)
    await asyncio.sleep(2.5)
    seen = []
    for n in range(12):
        body = {"model": "coder", "prompt": "a", "max_tokens": 1}
        headers = {"X-CATO-Session": f"sticky-{n}", "Connection": "close"}
        answers = [await http.post("/v1/completions", json=body, headers=headers) for _ in range(5)]
        seen.append({answer.json()["model"] for answer in answers})
    assert all(len(models) == 1 for models in seen), seen
    assert set().union(*seen) == {"coder-1", "coder-2"}
    assert "50 %" in await asyncio.to_thread(cato, url, "status")
    assert "rolled-back" in await asyncio.to_thread(cato, url, "rollback", "coder")


def _told(rollout: dict[str, Any]) -> str:
    changes = "; ".join(f"{c['share']:g}: {c['why']}" for c in rollout["history"])
    return f"{rollout['canary']} {rollout['phase']}: {changes}"
