"""A new engine has answered, and the ingress has parsed and searched, before anybody is served."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cato.core.errors import EngineError
from cato.core.ids import NodeId
from cato.core.workflow import RetrieveSettings
from cato.engines.base import Engine, EngineChunk, EngineRequest
from cato.serve.engine_start import started
from cato.serve.nodes import parsing
from cato.serve.nodes.code_index import CodeIndex
from cato.serve.nodes.runner import NodeRunner
from cato.wire.endpoint import Endpoint
from cato.workflows.templates import compile_template


class FakeEngine:
    """Notes what it is asked; `status` is that of its refusals of completions."""

    def __init__(self, context_tokens: int | None = 1024, status: int = 0) -> None:
        self.facts = SimpleNamespace(simulated=False, context_tokens=context_tokens)
        self.status = status
        self.asked: list[EngineRequest] = []
        self.is_stopped = False

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self.is_stopped = True

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        self.asked.append(request)
        if self.status and request.endpoint is Endpoint.COMPLETIONS:
            raise EngineError("no", self.status)
        yield EngineChunk(finish_reason="stop")


async def start(engine: FakeEngine) -> None:
    await started(cast("Engine", engine))


async def test_prompts_of_a_screen_of_code_are_answered_before_it_is_ready() -> None:
    engine = FakeEngine()
    await start(engine)
    prompts = [str(cast("Any", r.body)["prompt"]) for r in engine.asked]
    assert len(prompts) == 2
    assert prompts[0][:3] != prompts[1][:3], "nothing of the second is cached"
    assert all(len(p) > 300 for p in prompts)


async def test_a_prompt_fits_a_small_context() -> None:
    engine = FakeEngine(context_tokens=64)
    await start(engine)
    assert all(len(str(cast("Any", r.body)["prompt"])) < 64 for r in engine.asked)


async def test_a_model_that_does_not_generate_is_asked_to_embed() -> None:
    engine = FakeEngine(status=404)
    await start(engine)
    assert engine.asked[-1].endpoint is Endpoint.EMBEDDINGS


async def test_an_engine_that_cannot_answer_is_stopped() -> None:
    engine = FakeEngine(status=500)
    with pytest.raises(EngineError):
        await start(engine)
    assert engine.is_stopped


async def test_the_parser_runs_and_indexes_answer_after_the_warm_up(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("def read(path):\n    return open(path).read()\n")
    parsing._SHORT.close()
    runner = NodeRunner({"code": CodeIndex.open(tmp_path / "code", tmp_path / "store")})
    await runner.warm_up()
    assert parsing._SHORT.pid is not None
    settings = RetrieveSettings("code", compile_template("read path"), 1)
    found = await runner.run(NodeId("n"), settings, {})
    assert cast("Any", found)["snippets"][0]["path"] == "a.py"
    with contextlib.suppress(OSError):
        parsing._SHORT.close()
