"""The host agent waits for vLLM's import as long as the engine's start may take."""

from __future__ import annotations

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
