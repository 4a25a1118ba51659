"""OpenTelemetry spans of runs, their nodes, LLM calls and queues, and of model loads.

Configured by the standard environment variables: `OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_TRACES_EXPORTER` (`otlp`, `console`, `none`), `OTEL_EXPORTER_OTLP_PROTOCOL`,
`OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`, `OTEL_SDK_DISABLED`. Without an endpoint or an exporter
tracing is off: OpenTelemetry is not imported, and each request costs only one header look-up.

A run's span starts on arrival, and its context is passed to the engines. The child spans are built
from the run's receipt when it ends, with the receipt's times: nothing is measured twice, and they
contain no prompt or answer text.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cato.core.receipt import LlmFacts, NodeReceipt, SlaReceipt

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext, SpanKind, Status

log = logging.getLogger("cato.tracing")

TRACEPARENT: ContextVar[str] = ContextVar("cato_traceparent", default="")
"""W3C trace context of the current request: the client's until its run starts, then the run's;
empty without a trace."""

HEADER = "traceparent"
SERVICE_NAME = "cato"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_NS = 1_000_000_000

Attributes = Mapping[str, str | bool | int | float]


def is_on(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment enables tracing."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "")
    if exporter:
        return exporter != "none"
    return any(environment.get(name) for name in _ENDPOINTS)


def from_environment() -> Tracing | None:
    """Tracing as the environment configures it; None when it is off or unavailable (logged).

    Call it once per process.
    """
    if not is_on():
        return None
    try:
        return Tracing(*_provider())
    except (ImportError, ValueError) as error:
        log.warning("tracing is off: %s", error)
        return None


class RunTrace:
    """The span of a run that is in progress."""

    def __init__(self, tracing: Tracing, span: _Span) -> None:
        self._tracing, self._span = tracing, span

    def end(self, receipt: SlaReceipt) -> None:
        """Close the span, with the receipt's nodes as children."""
        if self._span.context.trace_flags.sampled:
            self._tracing.write(self._span, receipt.without_text())


@dataclass(frozen=True, slots=True)
class _Span:
    """A span that has not ended; `began_ns` since the epoch."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    began_ns: int
    attributes: Attributes


class Tracing:
    """Spans through one processor.

    They are built here with the sampler, ids and resource of the SDK's provider: creating a
    finished span at once costs a third of the SDK's own span.
    """

    def __init__(self, provider: TracerProvider, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._provider, self._processor = provider, processor
        self._ids = provider.id_generator
        self._scope = InstrumentationScope("cato")

    def begin(self, task: str, request_id: str) -> RunTrace:
        """Open a run's span under the context of `TRACEPARENT`, and set that to the new span."""
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import SpanKind, get_current_span

        parent_context = _extracted(TRACEPARENT.get())
        parent = None
        if parent_context is not None:
            known = get_current_span(parent_context).get_span_context()
            parent = known if known.is_valid else None
        name = f"run {task}"
        attributes: Attributes = {"cato.task": task, "cato.request_id": request_id}
        trace_id = self._ids.generate_trace_id() if parent is None else parent.trace_id
        sampled = self._provider.sampler.should_sample(
            parent_context, trace_id, name, SpanKind.SERVER, dict(attributes)
        )
        context = self._context(trace_id, sampled.decision is Decision.RECORD_AND_SAMPLE)
        TRACEPARENT.set(
            f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        )
        span = _Span(name, context, parent, time.time_ns(), {**attributes, **sampled.attributes})
        return RunTrace(self, span)

    def loaded(self, model: str, replica: str, load_s: float) -> None:
        """Record that a model was loaded in `load_s` seconds, just now."""
        end_ns = time.time_ns()
        attributes = {"gen_ai.request.model": model, "cato.replica": replica}
        context = self._context(self._ids.generate_trace_id(), True)
        span = _Span(f"load {model}", context, None, end_ns - _ns(load_s), attributes)
        self._end(span, end_ns)

    def write(self, span: _Span, receipt: SlaReceipt) -> None:
        """Close the span of a run after its children."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        for node in receipt.nodes:
            self._write_node(span, node)
        status = Status(StatusCode.ERROR) if receipt.status == "failed" else Status()
        whole = replace(span, attributes={**span.attributes, **_of_run(receipt)})
        self._end(whole, span.began_ns + _ns(receipt.e2e_s), SpanKind.SERVER, status)

    def close(self) -> None:
        """Flush pending spans."""
        self._processor.shutdown()

    def _write_node(self, run: _Span, node: NodeReceipt) -> None:
        began_ns = run.began_ns + _ns(node.started_s)
        ended_ns = began_ns + _ns(node.spent_s)
        below = self._below(run, f"node {node.node}", began_ns, _of_node(node))
        self._end(below, ended_ns)
        if node.llm is None:
            return
        leased_ns = min(ended_ns, began_ns + _ns(node.llm.queue_s))
        pool = {"cato.pool": node.llm.pool}
        self._end(self._below(below, f"queue {node.llm.pool}", began_ns, pool), leased_ns)
        if node.llm.replica:
            name, facts = f"invocation {node.llm.model}", _of_call(node.llm)
            self._end(self._below(below, name, leased_ns, facts), ended_ns)

    def _context(self, trace_id: int, is_sampled: bool) -> SpanContext:
        from opentelemetry.trace import SpanContext, TraceFlags

        flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
        return SpanContext(trace_id, self._ids.generate_span_id(), False, flags)

    def _below(self, parent: _Span, name: str, began_ns: int, attributes: Attributes) -> _Span:
        context = self._context(parent.context.trace_id, True)
        return _Span(name, context, parent.context, began_ns, attributes)

    def _end(
        self, span: _Span, ended_ns: int, kind: SpanKind | None = None, status: Status | None = None
    ) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status

        self._processor.on_end(
            ReadableSpan(
                span.name,
                span.context,
                span.parent,
                self._provider.resource,
                span.attributes,
                kind=kind or SpanKind.INTERNAL,
                status=status or Status(),
                start_time=span.began_ns,
                end_time=ended_ns,
                instrumentation_scope=self._scope,
            )
        )


def _extracted(traceparent: str) -> Context | None:
    """The context of a W3C header; None without one."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not traceparent:
        return None
    return TraceContextTextMapPropagator().extract({HEADER: traceparent})


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
        **_of_turn(receipt),
    }


def _of_turn(receipt: SlaReceipt) -> dict[str, str | int]:
    if not receipt.session:
        return {}
    return {
        "gen_ai.conversation.id": receipt.session,
        "cato.turn": receipt.turn,
        "cato.parent": receipt.parent,
        "cato.client": receipt.client,
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


def _provider() -> tuple[TracerProvider, SpanProcessor]:
    """Raise `ValueError` for an unknown exporter, `ImportError` for a missing one."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SynchronousMultiSpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # The SDK reads the sampler and the rest of the resource from the environment itself.
    name = os.environ.get("OTEL_SERVICE_NAME", SERVICE_NAME)
    processor = SynchronousMultiSpanProcessor()  # type: ignore[no-untyped-call]  # the SDK's
    for exporter in _exporters():
        processor.add_span_processor(BatchSpanProcessor(exporter))
    resource = Resource.create({"service.name": name})
    return TracerProvider(resource=resource, active_span_processor=processor), processor


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
