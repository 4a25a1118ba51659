"""Tasks of a simulated fleet, as DAGs of LLM calls, and their outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, nan

import numpy as np

from cato.core.ids import InvocationId, NodeId, PoolName, RunId, TaskName
from cato.core.length import LengthBelief
from cato.core.slo import SloMetric, tpot_s
from cato.core.snapshot import Invocation


@dataclass(frozen=True, slots=True)
class SimNode:
    """One LLM call. `output_tokens` is its true length; policies see `expected_tokens` and
    `length`. `needs` are indexes of earlier nodes; `before_s` is the time between them and
    it that is not an LLM call (retrieval, analysis). `downstream_s`: see `Invocation`. `blocks`
    name the whole blocks of its prompt (`Invocation.prefix`). `calls_tool`: its answer calls a
    tool, so its session returns when the tool has run.
    """

    pool: PoolName
    prompt_tokens: int
    output_tokens: int
    expected_tokens: int
    length: LengthBelief | None = None
    needs: tuple[int, ...] = ()
    before_s: float = 0.0
    downstream_s: float = 0.0
    blocks: tuple[int, ...] = ()
    calls_tool: bool = False


@dataclass(frozen=True, slots=True)
class SimTask:
    """A task with its SLO; nodes are in a topological order and the last one is streamed.

    `target_s` inf: no SLO. `tpot_target_s` is a second objective, on the pace of the stream. Among
    tasks with the same `buffer` the latest supersedes the others. `session`: see `Invocation`.
    `patience_s`: its client leaves without a first token after that time, and announces it at the
    start (inf: the client announces nothing and stays).
    """

    id: str
    name: TaskName
    arrived_at_s: float
    metric: SloMetric
    target_s: float
    nodes: tuple[SimNode, ...]
    draws: tuple[float, ...]
    tpot_target_s: float = inf
    tenant: str = ""
    buffer: str = ""
    session: str = ""
    patience_s: float = inf

    @property
    def deadline_s(self) -> float:
        return self.arrived_at_s + self.target_s

    def is_stream(self, index: int) -> bool:
        """Whether the first token of node `index` decides the SLO."""
        return index == len(self.nodes) - 1 and self.metric is SloMetric.TTFT

    def invocation(self, index: int, now_s: float, served_s: float) -> Invocation:
        """Node `index` as an invocation offered now."""
        node = self.nodes[index]
        is_last = index == len(self.nodes) - 1
        return Invocation(
            InvocationId(f"{self.id}/{index}"),
            RunId(self.id),
            self.name,
            NodeId(str(index)),
            node.prompt_tokens,
            node.expected_tokens,
            now_s,
            self.deadline_s,
            node.downstream_s,
            self.is_stream(index),
            self.draws[index],
            1,
            self.tpot_target_s if is_last else inf,
            node.length,
            0,
            served_s,
            prefix=node.blocks,
            session=self.session,
            tenant=self.tenant,
            buffer=self.buffer,
            began_at_s=self.arrived_at_s,
            leaves_at_s=self.arrived_at_s + self.patience_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTask(SimTask):
    """A task of one call that is offered unchanged."""

    offered: Invocation

    def invocation(self, index: int, now_s: float, served_s: float) -> Invocation:
        return self.offered


@dataclass(slots=True)
class Outcome:
    """Outcome of a task; times are absolute, nan for events that never happened.

    `sent`: times and token counts of the streamed answer, as far as its replica reported them.
    `retry_after_s`: of a refusal, when the client may ask again.
    `lost_tokens`: tokens generated in vain before the task was superseded or failed.
    """

    task: SimTask
    first_token_at_s: float = nan
    ended_at_s: float = nan
    queue_s: float = 0.0
    refused: bool = False
    retry_after_s: float = 0.0
    lost_tokens: int = 0
    # Tokens of all its prompts found in prefix caches.
    cached_tokens: int = 0
    sent: list[tuple[float, int]] = field(default_factory=list)

    def is_streaming(self, index: int) -> bool:
        """Whether the pace of node `index` is judged token by token."""
        task = self.task
        return task.tpot_target_s < inf and index == len(task.nodes) - 1

    @property
    def calls(self) -> Sequence[SimNode]:
        """The LLM calls that the task will make or has made."""
        return self.task.nodes

    @property
    def answer_tokens(self) -> int:
        """Length of the streamed answer."""
        return self.task.nodes[-1].output_tokens

    @property
    def is_finished(self) -> bool:
        return self.ended_at_s == self.ended_at_s

    @property
    def ttft_s(self) -> float:
        return self.first_token_at_s - self.task.arrived_at_s

    @property
    def e2e_s(self) -> float:
        return self.ended_at_s - self.task.arrived_at_s

    @property
    def tpot_s(self) -> float:
        return tpot_s(self.ttft_s, self.e2e_s, self.answer_tokens)

    @property
    def is_met(self) -> bool:
        """Refused and unfinished tasks count as missed."""
        if not self.is_finished:
            return False
        task = self.task
        achieved_s = {
            SloMetric.TTFT: self.ttft_s,
            SloMetric.E2E: self.e2e_s,
            SloMetric.TPOT: self.tpot_s,
        }[task.metric]
        # Virtual time adds up many small floats: exactly on time counts as met.
        slop = 1 + 1e-9
        return achieved_s <= task.target_s * slop and self.tpot_s <= task.tpot_target_s * slop


def service_gain(outcome: Outcome, w_in: float = 1.0, w_out: float = 2.0, a: float = 1.0) -> float:
    """Gain of a task (Tempo, section "service gain"): weighted tokens × min(1, (target/actual)^a).

    All LLM calls count; times are since the task's arrival. A streamed task with a TTFT objective
    earns per token: the prompt by the first token, output token i by its expected time,
    which is the pace from min(arrival + TTFT target, first token) on (ALGORITHMS.md, section 6,
    pitfall b). Between two points of `sent` tokens are taken to come evenly. Without an SLO a
    finished task earns its tokens.
    """
    task = outcome.task
    if not outcome.is_finished:
        return 0.0
    tokens_in = sum(n.prompt_tokens for n in outcome.calls)
    tokens_out = sum(n.output_tokens for n in outcome.calls)
    if task.target_s == inf:
        return w_in * tokens_in + w_out * tokens_out
    if task.metric is SloMetric.TTFT:
        first = _kept(task.target_s, outcome.ttft_s, a)
        return w_in * tokens_in * first + w_out * tokens_out * _pace_kept(outcome, a)
    if task.metric is SloMetric.TPOT:
        kept = _kept(task.target_s, outcome.tpot_s, a)
        return (w_in * tokens_in + w_out * tokens_out) * kept
    return (w_in * tokens_in + w_out * tokens_out) * _kept(task.target_s, outcome.e2e_s, a)


def _kept(target_s: float, actual_s: float, a: float) -> float:
    return float(min(1.0, (target_s / max(actual_s, 1e-9)) ** a))


def _pace_kept(outcome: Outcome, a: float) -> float:
    """Mean over the tokens of a stream of min(1, (expected/actual)^a)."""
    task, tokens = outcome.task, outcome.answer_tokens
    if task.tpot_target_s == inf:
        return 1.0
    known = [(outcome.ttft_s, 1)]
    known += [(t - task.arrived_at_s, n) for t, n in outcome.sent if 1 < n < tokens]
    if tokens > 1:
        known.append((outcome.e2e_s, tokens))
    at_s, at = zip(*known, strict=True)
    i = np.arange(1, tokens + 1)
    actual_s = np.maximum(1e-9, np.interp(i, at, at_s))
    expected_s = min(task.target_s, outcome.ttft_s) + task.tpot_target_s * (i - 1)
    return float(np.minimum(1.0, (expected_s / actual_s) ** a).mean())


def task_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Attainment, goodput and latencies of a run; see GLOSSARY.md for the definitions."""
    done = [o for o in outcomes if o.is_finished]
    with_slo = [o for o in outcomes if o.task.target_s < inf]
    met = sum(o.is_met for o in with_slo)
    span_s = max((o.ended_at_s for o in done), default=0.0) - min(
        (o.task.arrived_at_s for o in outcomes), default=0.0
    )
    metrics = {
        "slo_attainment": met / len(with_slo) if with_slo else nan,
        "goodput_per_s": met / span_s if span_s > 0 else 0.0,
        "finished": len(done) / len(outcomes) if outcomes else nan,
        "refused": sum(o.refused for o in outcomes) / len(outcomes) if outcomes else nan,
        "longest_wait_s": max((o.queue_s for o in outcomes), default=0.0),
        "service_gain": sum(service_gain(o) for o in outcomes),
        "tokens_per_s": (
            sum(n.output_tokens for o in done for n in o.calls) / span_s if span_s > 0 else 0.0
        ),
    }
    for name, values in (
        ("ttft_s", [o.ttft_s for o in done]),
        ("tpot_s", [o.tpot_s for o in done]),
        ("e2e_s", [o.e2e_s for o in done]),
    ):
        metrics |= _spread(name, values)
    timed = [o for o in done if o.task.target_s < inf and o.task.metric is not SloMetric.TPOT]
    ratios = [o.e2e_s / o.task.target_s for o in timed]
    mean = float(np.mean(ratios)) if ratios else nan
    metrics["cv_completion_over_sla"] = float(np.std(ratios)) / mean if ratios and mean else nan
    return metrics


def _spread(name: str, values: Iterable[float]) -> dict[str, float]:
    array = np.array(list(values), dtype=np.float64)
    if array.size == 0:
        return {f"{name}_mean": nan, f"{name}_p95": nan, f"{name}_p99": nan}
    p95, p99 = np.quantile(array, [0.95, 0.99])
    return {
        f"{name}_mean": float(array.mean()),
        f"{name}_p95": float(p95),
        f"{name}_p99": float(p99),
    }
