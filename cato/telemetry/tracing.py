"""OpenTelemetry spans of runs, their nodes, LLM calls and queues, and of model loads.

The standard environment variables choose everything: `OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_TRACES_EXPORTER` (`otlp`, `console`, `none`), `OTEL_EXPORTER_OTLP_PROTOCOL`,
`OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`, `OTEL_SDK_DISABLED`. Without an endpoint or an exporter
tracing is off: OpenTelemetry is not even imported, and a request pays for one look at a header.

A run's span begins when it arrives, and its context goes to the engines. The spans below it are
made from its receipt when it has ended, with the times that the receipt has: nothing is measured
twice, and no prompt or answer text is in them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from cato.core.receipt import LlmFacts, NodeReceipt, SlaReceipt

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger("cato.tracing")

TRACEPARENT: ContextVar[str] = ContextVar("cato_traceparent", default="")
"""W3C trace context of the request in hand: the client's until its run starts, the run's from then
on; empty when nobody traces it."""

HEADER = "traceparent"
SERVICE_NAME = "cato"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_NS = 1_000_000_000

Attributes = Mapping[str, str | bool | int | float]


def is_on(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for traces."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "")
    if exporter:
        return exporter != "none"
    return any(environment.get(name) for name in _ENDPOINTS)


def from_environment() -> Tracing | None:
    """Tracing as the environment wants it; None when it is off or cannot be had, which is logged.

    Call it once in a process.
    """
    if not is_on():
        return None
    try:
        return Tracing(_provider())
    except (ImportError, ValueError) as error:
        log.warning("no traces: %s", error)
        return None


class RunTrace:
    """The span of one run that is under way."""

    def __init__(self, tracing: Tracing, span: Span, began_ns: int) -> None:
        self._tracing, self._span, self._began_ns = tracing, span, began_ns

    def end(self, receipt: SlaReceipt) -> None:
        """Close the span, with all that the receipt tells below it."""
        self._tracing.write(self._span, self._began_ns, receipt.without_text())


class Tracing:
    """Spans through one provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("cato")

    def begin(self, task: str, request_id: str) -> RunTrace:
        """Open the span of a run under the context of `TRACEPARENT`, and put its own there."""
        from opentelemetry.trace import SpanKind, format_span_id, format_trace_id
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = None
        if known := TRACEPARENT.get():
            parent = TraceContextTextMapPropagator().extract({HEADER: known})
        began_ns = time.time_ns()
        span = self._tracer.start_span(
            f"run {task}",
            parent,
            SpanKind.SERVER,
            {"cato.task": task, "cato.request_id": request_id},
            start_time=began_ns,
        )
        # As the propagator would write it (W3C Trace Context, section 3.2), in less time.
        own = span.get_span_context()
        trace_id, span_id = format_trace_id(own.trace_id), format_span_id(own.span_id)
        TRACEPARENT.set(f"00-{trace_id}-{span_id}-{own.trace_flags:02x}" if own.is_valid else "")
        return RunTrace(self, span, began_ns)

    def loaded(self, model: str, replica: str, load_s: float) -> None:
        """A model has just been loaded in `load_s` seconds."""
        end_ns = time.time_ns()
        attributes = {"gen_ai.request.model": model, "cato.replica": replica}
        self._span(f"load {model}", None, end_ns - _ns(load_s), end_ns, attributes)

    def write(self, span: Span, began_ns: int, receipt: SlaReceipt) -> None:
        """Close `span`, which began at `began_ns`, after writing what is below it."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        if span.is_recording():
            below = set_span_in_context(span)
            for node in receipt.nodes:
                self._write_node(below, began_ns, node)
            span.set_attributes(_of_run(receipt))
            if receipt.status == "failed":
                span.set_status(Status(StatusCode.ERROR))
        span.end(began_ns + _ns(receipt.e2e_s))

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()

    def _write_node(self, parent: Context, run_ns: int, node: NodeReceipt) -> None:
        began_ns = run_ns + _ns(node.started_s)
        ended_ns = began_ns + _ns(node.spent_s)
        below = self._span(f"node {node.node}", parent, began_ns, ended_ns, _of_node(node))
        if node.llm is None:
            return
        leased_ns = min(ended_ns, began_ns + _ns(node.llm.queue_s))
        pool = {"cato.pool": node.llm.pool}
        self._span(f"queue {node.llm.pool}", below, began_ns, leased_ns, pool)
        if node.llm.replica:
            name = f"invocation {node.llm.model}"
            self._span(name, below, leased_ns, ended_ns, _of_call(node.llm))

    def _span(
        self,
        name: str,
        parent: Context | None,
        began_ns: int,
        ended_ns: int,
        attributes: Attributes,
    ) -> Context:
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=began_ns)
        span.end(ended_ns)
        return set_span_in_context(span)


def _ns(seconds: float) -> int:
    return round(seconds * _NS)


def _of_run(receipt: SlaReceipt) -> Attributes:
    return {
        "cato.status": receipt.status,
        "cato.slo.metric": receipt.metric,
        "cato.slo.target_s": receipt.target_s,
        "cato.slo.met": receipt.met,
        "cato.tenant": receipt.tenant,
        "cato.queue_s": receipt.queue_s,
        "gen_ai.usage.output_tokens": receipt.output_tokens,
    }


def _of_node(node: NodeReceipt) -> Attributes:
    found: dict[str, str | bool | int | float] = {
        "cato.node.kind": node.kind,
        "cato.node.round": node.round,
        "cato.status": node.status,
    }
    if node.item is not None:
        found["cato.node.item"] = node.item
    if node.budget_s is not None:
        found["cato.node.budget_s"] = node.budget_s
    return found


def _of_call(call: LlmFacts) -> Attributes:
    return {
        "cato.pool": call.pool,
        "cato.replica": call.replica,
        "cato.deployment": call.deployment,
        "cato.attempts": call.attempts,
        "cato.slack_s": call.slack_s,
        "cato.reason": call.reasons[-1] if call.reasons else "",
        "gen_ai.request.model": call.model,
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": call.output_tokens,
        "gen_ai.response.finish_reasons": call.finish_reason,
    }


def _provider() -> TracerProvider:
    """Raise `ValueError` for an exporter that is none, `ImportError` for one that is missing."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # The sampler, and what else belongs to the resource, the SDK reads itself.
    name = os.environ.get("OTEL_SERVICE_NAME", SERVICE_NAME)
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    for exporter in _exporters():
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporters() -> Sequence[SpanExporter]:
    from importlib.metadata import entry_points

    names = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    found = []
    for name in (n.strip() for n in names):
        if name == "otlp":
            protocol = os.environ.get(
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
                os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
            )
            name = _OTLP.get(protocol, protocol)
        points = tuple(entry_points(group="opentelemetry_traces_exporter", name=name))
        if not points:
            raise ValueError(
                f"no exporter named {name!r} is installed for OTEL_TRACES_EXPORTER; "
                "`pip install 'cato[otlp]'` brings OTLP over HTTP"
            )
        exporter: Any = points[0].load()
        found.append(exporter())
    return found
