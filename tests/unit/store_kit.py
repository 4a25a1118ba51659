"""Small builders for the tests of the store and the Profiler."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kits.builders import llm_facts

from cato.core.estimates import NodeMean
from cato.core.ids import NodeId, RunId, TaskName
from cato.core.receipt import LlmFacts, NodeReceipt, SlaReceipt
from cato.estimators.output_lengths import LengthSample

TASK, NODE, MODEL = TaskName("t"), NodeId("draft"), "m"


def a_sample(
    tokens: int = 10,
    *,
    task: str = TASK,
    prompt: int = 100,
    reason: str = "stop",
    features: tuple[float, ...] = (),
) -> LengthSample:
    return LengthSample(TaskName(task), NODE, MODEL, prompt, tokens, reason, features)


def a_mean(value: float = 1.0, *, samples: int = 1, node: str = NODE) -> NodeMean:
    return NodeMean(TASK, NodeId(node), MODEL, "service_s", value, samples)


def facts(
    *, tokens: int = 10, prompt: int = 100, reason: str = "stop", **changes: object
) -> LlmFacts:
    base = replace(llm_facts(tokens=tokens), prompt_tokens=prompt, finish_reason=reason)
    return replace(base, **changes)  # type: ignore[arg-type]


def an_execution(
    node: str = NODE,
    *,
    llm: LlmFacts | None = None,
    started_s: float = 0.0,
    spent_s: float = 1.0,
    status: str = "done",
    item: int | None = None,
    problem: str = "",
) -> NodeReceipt:
    kind = "retrieve" if llm is None else "llm"
    return NodeReceipt(
        NodeId(node), kind, 1, item, status, started_s, spent_s, None, None, problem, llm
    )


def a_receipt(
    *nodes: NodeReceipt,
    id: str = "req",
    task: str = TASK,
    status: str = "done",
    met: bool = True,
    problem: str = "",
    notes: Sequence[str] = (),
) -> SlaReceipt:
    return SlaReceipt(
        RunId(id), TaskName(task), status, "e2e", 1.0, 1.0, met, 0.5, 0.0, 1.0, 10, 0.0, 0.0, True,
        nodes or (an_execution(llm=facts()),), (), problem, tuple(notes),
    )  # fmt: skip


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    """What another program reads in the SQLite file."""
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()
