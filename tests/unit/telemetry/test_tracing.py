"""Spans of runs: the times of their receipts, under the client's context, without text."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ingress_kit import COMPLETION, GENERATION, Kit, a_fast_pool, an_access, until, workflows_of
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cato.engines.base import EngineRequest
from cato.lab.chaos.local_pools import LocalPool, LocalPools, LocalRecords
from cato.serve.ingress.app import create_app
from cato.serve.nodes.runner import NodeRunner
from cato.serve.service import TaskService
from cato.telemetry import logs
from cato.telemetry.tracing import Tracing, is_on

SECRET = "my_secret_code"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


async def traced(
    folder: Path, pool: LocalPool, path: str, body: object, headers: dict[str, str]
) -> tuple[Sequence[ReadableSpan], dict[str, Any]]:
    """The spans of one request, and its receipt."""
    exporter = InMemorySpanExporter()
    tracing = Tracing(TracerProvider(), SimpleSpanProcessor(exporter))
    async with LocalPools(pool) as pools:
        records = LocalRecords(pools)
        workflows = workflows_of(folder, COMPLETION, GENERATION)
        service = TaskService(workflows, pools, NodeRunner({}), records, seed=1, tracing=tracing)
        app = create_app(
            service, max_body_bytes=10_000, ready=lambda: (True, ""), access=an_access()
        )
        async with Kit(service, records, app, None).http() as http:  # type: ignore[arg-type]
            answer = await http.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
        (receipt,) = records.receipts.values()

        def has_ended() -> bool:
            return any(s.name.startswith("run ") for s in exporter.get_finished_spans())

        if not headers.get("traceparent", "").endswith("-00"):
            await until(has_ended, within_s=5)
    return exporter.get_finished_spans(), receipt.as_dict()


GENERATE = ("/v1/tasks/code-generation", {"inputs": {"instruction": SECRET}})


async def test_a_run_is_a_tree_of_spans_with_the_receipts_times(tmp_path: Path) -> None:
    spans, receipt = await traced(tmp_path, a_fast_pool(), *GENERATE, {})
    by_name = {s.name: s for s in spans}
    assert set(by_name) == {
        "run code-generation",
        "node draft",
        "queue sim-fast-pool",
        "invocation sim-fast",
        "node final",
    }
    parents = {
        s.name: next(
            (p.name for p in spans if s.parent and p.context.span_id == s.parent.span_id), ""
        )
        for s in spans
    }
    assert parents["run code-generation"] == ""
    assert parents["node draft"] == parents["node final"] == "run code-generation"
    assert parents["queue sim-fast-pool"] == parents["invocation sim-fast"] == "node draft"
    assert len({s.context.trace_id for s in spans}) == 1
    run = by_name["run code-generation"]
    assert length_s(run) == pytest.approx(receipt["e2e_s"], abs=1e-6)
    for node in receipt["nodes"]:
        span = by_name[f"node {node['node']}"]
        assert length_s(span) == pytest.approx(node["spent_s"], abs=1e-6)
        assert span.start_time - run.start_time == pytest.approx(node["started_s"] * 1e9, abs=1e3)
    attributes = dict(by_name["invocation sim-fast"].attributes or {})
    assert attributes["gen_ai.usage.output_tokens"] == receipt["nodes"][0]["llm"]["output_tokens"]
    assert attributes["cato.reason"]


def length_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def test_no_text_of_prompt_or_answer_is_in_a_span(tmp_path: Path) -> None:
    spans, _ = await traced(tmp_path, a_fast_pool(), *GENERATE, {})
    assert SECRET not in "".join(s.to_json() for s in spans)


async def test_the_clients_context_is_continued_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = a_fast_pool()
    asked: list[EngineRequest] = []
    stream = pool.stream

    def watched(lease: Any, request: EngineRequest) -> Any:
        asked.append(request)
        return stream(lease, request)

    monkeypatch.setattr(pool, "stream", watched)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    spans, _ = await traced(tmp_path, pool, *GENERATE, headers)
    (run,) = [s for s in spans if s.name.startswith("run ")]
    assert run.parent is not None
    assert f"{run.context.trace_id:032x}" == TRACE
    assert f"{run.parent.span_id:016x}" == PARENT
    assert [r.traceparent for r in asked] == [f"00-{TRACE}-{run.context.span_id:016x}-01"]


async def test_a_client_that_does_not_sample_is_obeyed(tmp_path: Path) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    spans, _ = await traced(tmp_path, a_fast_pool(), *GENERATE, headers)
    assert spans == ()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_standard_variables_turn_it_on(environment: dict[str, str], expected: bool) -> None:
    assert is_on(environment) is expected


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin", **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_off_does_not_even_import_opentelemetry() -> None:
    code = (
        "import sys; from cato.telemetry import tracing; assert tracing.from_environment() is None;"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    assert in_a_process(code).stdout.strip() == "[]"


def test_the_console_exporter_of_the_environment_writes_spans() -> None:
    code = (
        "from cato.telemetry import tracing; t = tracing.from_environment();"
        "t.loaded('m', 'r', 2.0); t.close()"
    )
    done = in_a_process(code, OTEL_TRACES_EXPORTER="console", OTEL_SERVICE_NAME="mine")
    span = json.loads(done.stdout)
    assert span["name"] == "load m"
    assert span["resource"]["attributes"]["service.name"] == "mine"


def test_an_exporter_that_is_none_is_said_and_costs_nothing_else() -> None:
    code = "from cato.telemetry import tracing; print(tracing.from_environment())"
    done = in_a_process(code, OTEL_TRACES_EXPORTER="zipper")
    assert done.stdout.strip() == "None"
    assert "no exporter named 'zipper' is installed" in done.stderr


# Logs


async def test_a_run_is_one_line_with_its_id_and_no_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="cato"):
        _, receipt = await traced(tmp_path, a_fast_pool(), *GENERATE, {"x-request-id": "my-id"})
    lines = [json.loads(logs.JsonLines().format(r)) for r in caplog.records]
    (line,) = [ln for ln in lines if ln["logger"] == "cato.run"]
    assert line["request_id"] == receipt["request_id"] == "my-id"
    assert (line["task"], line["met"], line["status"]) == ("code-generation", True, "done")
    assert SECRET not in json.dumps(lines)


def test_a_line_has_the_request_in_hand_and_a_traceback_stays_one_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord(
            "cato.x", logging.ERROR, "f", 1, "no %s", ("luck",), sys.exc_info()
        )
    token = logs.REQUEST_ID.set("req-1")
    text = logs.JsonLines().format(record)
    logs.REQUEST_ID.reset(token)
    line = json.loads(text)
    assert "\n" not in text
    assert (line["request_id"], line["message"], line["level"]) == ("req-1", "no luck", "error")
    assert "ValueError: broken" in line["traceback"]


def test_lines_do_not_wait_in_the_stand_in_that_serve_puts_in_place_of_stderr() -> None:
    code = (
        "import io, logging, sys; from cato.telemetry import logs;"
        "held = sys.stderr = io.StringIO(); logs.set_up();"
        "logging.getLogger('cato.x').warning('seen'); assert not held.getvalue()"
    )
    assert json.loads(in_a_process(code).stderr)["message"] == "seen"


def test_lines_go_to_the_stand_in_where_the_process_has_no_stderr() -> None:
    code = (
        "import io, logging, sys; from cato.telemetry import logs; sys.__stderr__ = None;"
        "held = sys.stderr = io.StringIO(); logs.set_up();"
        "logging.getLogger('cato.x').warning('seen'); print(held.getvalue())"
    )
    assert json.loads(in_a_process(code).stdout)["message"] == "seen"


def test_lines_are_written_once_and_at_the_chosen_level() -> None:
    code = (
        "import logging; from cato.telemetry import logs; logs.set_up(); logs.set_up();"
        "logging.basicConfig(); logging.getLogger('cato.x').info('seen')"
    )
    assert in_a_process(code).stderr == ""
    written = in_a_process(code, CATO_LOG_LEVEL="info").stderr
    assert json.loads(written)["message"] == "seen"
