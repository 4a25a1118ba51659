"""The host agent waits for vLLM's import as long as the engine's start may take."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest

from cato.config.places import RUN_DIR_VARIABLE
from cato.control.host_agent import HostAgent
from cato.core.errors import EngineError


async def test_an_import_may_take_as_long_as_the_start_of_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="cato-h-") as folder:
        Path(folder, "torch.py").write_text("import time; time.sleep(600)")
        monkeypatch.setenv("PYTHONPATH", folder)
        monkeypatch.setenv(RUN_DIR_VARIABLE, folder)
        with pytest.raises(EngineError, match=r"not imported within 0\.1 s \(`start_timeout`"):
            await HostAgent().zygote_socket(sys.executable, 0.1)


async def test_an_interpreter_that_hangs_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one on a network disk that does not answer."""
    with tempfile.TemporaryDirectory(prefix="cato-h-") as folder:
        monkeypatch.setenv(RUN_DIR_VARIABLE, folder)
        hangs = a_python(folder, "hangs", "exec sleep 600")
        works = a_python(folder, "works", 'touch "$3"; exec sleep 600')  # its socket
        agent = HostAgent()
        waiting = asyncio.create_task(agent.zygote_socket(hangs, 30.0))
        await asyncio.sleep(0)  # it is first
        try:
            assert Path(await agent.zygote_socket(works, 30.0)).exists()
            assert not waiting.done()
        finally:
            waiting.cancel()
            for zygote in agent._zygotes.values():
                await zygote.stop()


def a_python(folder: str, name: str, does: str) -> str:
    path = Path(folder, name)
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o700)
    return str(path)
