"""Find one replica of a running deployment and call it directly, to measure it.

Importing this module imports Ray, which reads its settings at import.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError

from cato.control import actors
from cato.core.errors import CatoError, ReplicaLostError
from cato.core.profile import Profile
from cato.core.shards import merged
from cato.core.topology import AdapterSpec, DeploymentSpec, PoolSpec
from cato.engines.base import Endpoint, EngineChunk, EngineRequest
from cato.engines.simulated import DEFAULT_BATCHED_TOKENS
from cato.measure.check import EngineSteps


@dataclass(frozen=True, slots=True)
class Found:
    """The replica to measure, and what the control plane knows about it."""

    pool: PoolSpec
    spec: DeploymentSpec
    replica: str
    held: int
    max_running: int
    context_tokens: int
    load_s: float
    profile: Profile


async def find_replica(pool: PoolSpec, spec: DeploymentSpec) -> Found:
    """The replica with the least work."""
    routers = actors.routers_of(pool)
    picture = merged(pool.name, [await actors.get(name).picture.remote() for name in routers])
    ready = [r for r in picture.replicas if r.deployment == spec.name and r.accepting]
    if not ready:
        raise CatoError(f"no replica of {spec.name!r} is ready; see `cato status`")
    best = min(ready, key=lambda r: (r.held, r.id))
    residents = await actors.get(actors.EVICTION_MANAGER).residents.remote()
    load_s = next((r.load_s for r in residents if r.replica_id == best.id), 0.0)
    return Found(
        pool,
        spec,
        best.id,
        best.held,
        best.max_running,
        best.profile.context_tokens,
        load_s,
        best.profile,
    )


class ReplicaCaller:
    """The pinned calls of one replica; see `cato.measure.sweep.EngineCaller`."""

    def __init__(self, deployment: str, replica: str, adapter: AdapterSpec | None = None) -> None:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # they break the progress bar
        handle: Any = serve.get_deployment_handle(deployment, app_name=actors.ENGINES_APP)
        self._handle = handle
        self._stream = handle.options(stream=True)
        self._replica = replica
        self._adapter = adapter
        self._prefix = f"profile-{secrets.token_hex(4)}"
        self._numbers = itertools.count()

    async def stream(self, body: Mapping[str, object]) -> AsyncGenerator[EngineChunk, None]:
        id = f"{self._prefix}.{next(self._numbers)}"
        pin = {"replica": self._replica, "invocation": id, "attempt": 1}
        request = EngineRequest(id, Endpoint.COMPLETIONS, body, adapter=self._adapter)
        response = self._stream.generate.remote(request, cato=pin)
        try:
            async for chunk in response:
                yield chunk
        except RayTaskError as error:
            if isinstance(error.cause, CatoError):
                raise error.cause from error
            raise
        except RayError as error:
            raise ReplicaLostError(self._replica, "its stream broke") from error
        finally:
            response.cancel()

    async def held(self) -> int:
        return whole((await self.load())["held"])

    async def load(self) -> dict[str, object]:
        load: dict[str, object] = await self._handle.load.remote(cato={"replica": self._replica})
        return load


async def engine_steps(caller: ReplicaCaller, found: Found) -> EngineSteps:
    """How the replica's engine schedules a step, as reported by the engine and the deployment."""
    engine = found.spec.engine
    load = await caller.load()
    block_tokens = whole(load.get("block_tokens"))
    return EngineSteps(
        engine.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
        engine.long_prefill_token_threshold or 0,
        block_tokens if engine.prefix_caching else 0,
        whole(load.get("host_tokens")),
    )


def whole(value: object) -> int:
    """A number that a replica reports; 0 if it reports none."""
    return value if isinstance(value, int) else 0
