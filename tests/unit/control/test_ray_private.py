"""What stands in for Ray's private parts; a new version of Ray may differ."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.replica import Replica

from cato.control.ray_private import hold_early_requests


@pytest.mark.parametrize("path", ["/v1/completions", "/-/healthz"])
async def test_a_request_waits_until_serve_lets_the_replica_answer_and_a_probe_does_not(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    assert "self._user_callable_initialized" in inspect.getsource(Replica._direct_ingress_asgi)
    was_ready: list[bool] = []

    async def answer(self: Any, scope: Any, receive: Any, send: Any) -> None:
        was_ready.append(self._user_callable_initialized)

    monkeypatch.setattr(Replica, "_direct_ingress_asgi", answer)
    hold_early_requests()
    replica = SimpleNamespace(_user_callable_initialized=False)
    asked = asyncio.create_task(Replica._direct_ingress_asgi(replica, {"path": path}, None, None))
    await asyncio.sleep(0.05)
    is_probe = path == "/-/healthz"
    assert was_ready == ([False] if is_probe else [])
    replica._user_callable_initialized = True
    await asyncio.wait_for(asked, 5)
    assert was_ready == [not is_probe]
