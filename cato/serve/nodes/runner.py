"""Runs workflow nodes that are not LLM calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import assert_never

from cato.core.checkers import CheckerSpec
from cato.core.errors import WorkLimitError
from cato.core.ids import NodeId
from cato.core.workflow import (
    AnalyzeSettings,
    CallSettings,
    LlmSettings,
    NodeSettings,
    RetrieveSettings,
    TransformSettings,
    ValidateSettings,
)
from cato.serve.nodes import analyze, parsing, retrieve, transform, validate
from cato.serve.nodes.checkers import Checkers
from cato.serve.nodes.code_index import CodeIndex
from cato.workflows.work import little_work


class NodeRunner:
    """Runs nodes with the deployment's code indexes and checkers."""

    def __init__(
        self, indexes: Mapping[str, CodeIndex], checkers: Mapping[str, CheckerSpec] | None = None
    ) -> None:
        self._indexes = dict(indexes)
        self._checkers = Checkers(checkers or {})

    async def warm_up(self) -> None:
        """Start the parser and read each index once: their first use takes longer than the time
        limit of a completion's nodes."""
        await parsing.parsed("analyze", "x = 1\n", language="python", cursor=0)
        for index in self._indexes.values():
            with suppress(OSError, ValueError):  # not built yet, or damaged: its nodes say so
                await asyncio.to_thread(index.search, "def read open file return", 2)

    async def run(
        self, node: NodeId, settings: NodeSettings, names: Mapping[str, object]
    ) -> Mapping[str, object]:
        """The node's result. Raise `NodeError` or `WorkLimitError` if it fails, `TypeError` if it
        calls a model."""
        match settings:
            case RetrieveSettings():
                return await asyncio.to_thread(retrieve.run, node, settings, names, self._indexes)
            case AnalyzeSettings():
                return await analyze.run(node, settings, names)
            case ValidateSettings():
                return await validate.run(node, settings, names, self._checkers)
            case TransformSettings():
                # Most renderings are too short to be worth a thread.
                try:
                    with little_work():
                        return transform.run(node, settings, names)
                except WorkLimitError:
                    return await asyncio.to_thread(transform.run, node, settings, names)
            case LlmSettings() | CallSettings():
                raise TypeError(f"node {node!r} calls a model; the ingress runs those")
            case _:
                assert_never(settings)
