"""Which adapters an engine holds, also when a call that needs one is cancelled."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from cato.core.errors import EngineError
from cato.core.ids import ModelName
from cato.core.topology import AdapterSpec
from cato.engines.vllm.adapters import AddedAdapters

TEAM = AdapterSpec(ModelName("team"), "acme/cobol-lora", version=1)


class Server:
    """Loads an adapter once `may_load` is set, even if its caller has left, as vLLM does."""

    def __init__(self) -> None:
        self.may_load = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.held: set[str] = set()
        self._loads: list[asyncio.Task[bytes]] = []

    async def post(self, path: str, body: bytes | None) -> bytes:
        self._loads.append(asyncio.create_task(self._load(json.loads(body or b"{}"))))
        return await asyncio.shield(self._loads[-1])

    async def _load(self, asked: dict[str, object]) -> bytes:
        self.has_begun.set()
        await self.may_load.wait()
        name = str(asked["lora_name"])
        if name in self.held and not asked["load_inplace"]:
            raise EngineError(f"The lora adapter '{name}' has already been loaded.", 400)
        self.held.add(name)
        return b"{}"


async def test_a_caller_that_leaves_does_not_end_the_load_of_an_adapter(tmp_path: Path) -> None:
    server = Server()
    adapters = AddedAdapters(server.post, tmp_path / "links")
    left = asyncio.create_task(adapters.hold(TEAM, None))
    await server.has_begun.wait()
    left.cancel()
    await asyncio.wait([left])
    assert left.cancelled()
    server.may_load.set()
    await adapters.hold(TEAM, None)
    assert server.held == {"team"}


async def test_an_adapter_loaded_by_a_server_that_has_ended_is_loaded_by_the_next(
    tmp_path: Path,
) -> None:
    server = Server()
    adapters = AddedAdapters(server.post, tmp_path / "links")
    asked = asyncio.create_task(adapters.hold(TEAM, None))
    await server.has_begun.wait()
    adapters.forget()
    server.may_load.set()
    await asked
    server.held.clear()  # the next server's
    await adapters.hold(TEAM, None)
    assert server.held == {"team"}
