"""llama.cpp's `/infill`, used by llama.vim and llama.vscode.

Answers are compact JSON, because llama.vim searches for `"content":"`. The request's time limits
are SLA hints. A request for no tokens (`n_predict` 0, to warm a cache) and a shed one get an empty
answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import InputError
from cato.core.runs import FinishRun
from cato.core.slo import Slo, SloMetric
from cato.serve.ingress import document
from cato.serve.ingress.answers import ending_of, serve_text
from cato.serve.ingress.body import (
    cato_of,
    flag,
    positive_number,
    read_object,
    text_field,
    whole_number,
)
from cato.serve.ingress.context import Ingress, request_id
from cato.serve.ingress.exchange import STREAM_HEADERS
from cato.serve.ingress.failures import Failure
from cato.serve.ingress.fill import Fill, objective_of, start_fill
from cato.serve.ingress.hints import PATIENCE
from cato.serve.ingress.jsons import JsonAnswer, sse
from cato.serve.ingress.limits import stops_of
from cato.serve.ingress.naming import COMPLETION, resolve
from cato.serve.ingress.parameters import checked
from cato.serve.ingress.receipts import as_json

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["completion"])

    @router.post("/infill", **document.INFILL)
    async def infill(request: Request) -> Response:
        """Fill in the middle. A request for no tokens or a shed one gets an empty answer."""
        body = await read_object(request, ingress.max_body_bytes)
        extra, is_streamed = cato_of(body), flag(body, "stream")
        stops = stops_of(body)
        form = _Form(_response_fields(body), stops)
        limit = whole_number(body, "n_predict")
        if limit == 0:
            headers = {"x-request-id": request_id(request), "X-CATO-Outcome": "nothing-asked"}
            return form.nothing(is_streamed=is_streamed, headers=headers)
        target = resolve(ingress, request, body.get("model"), extra, COMPLETION, needs_model=False)
        fill = Fill(
            text_field(body, "input_prefix") + text_field(body, "prompt"),
            text_field(body, "input_suffix"),
            context=_context(body),
            max_tokens=None if limit is None or limit < 0 else limit,
            stops=stops,
            sampling={k: checked(k, body[k]) for k in _SAMPLING if body.get(k) is not None},
        )
        extra = _with_limits(extra, body, objective_of(ingress, target))
        task = start_fill(ingress, request, target, fill, body, extra)
        return await serve_text(
            ingress,
            request,
            task,
            form,
            is_streamed=is_streamed,
            shed=lambda: form.nothing(is_streamed=is_streamed),
        )

    return router


def _context(body: Mapping[str, object]) -> str:
    """Code of other files, each piece preceded by its file name."""
    extra = body.get("input_extra")
    if extra is not None and not isinstance(extra, list):
        raise InputError("input_extra must be a list", "input_extra")
    pieces = [p for p in extra or () if isinstance(p, dict) and isinstance(p.get("text"), str)]
    return "\n\n".join(f"{p.get('filename', '')}\n{p['text']}".strip("\n") for p in pieces)


def _with_limits(
    extra: dict[str, object], body: Mapping[str, object], slo: Slo
) -> dict[str, object]:
    """`extra`, with the editor's time limits for the prompt and for generation as a deadline for
    the metric of `slo`."""
    names = ("t_max_prompt_ms", "t_max_predict_ms")
    prompt_ms, predict_ms = (
        positive_number(body[name], name) if body.get(name) else None for name in names
    )
    limit_ms = prompt_ms
    if slo.metric is SloMetric.E2E:
        limit_ms = None if predict_ms is None else (prompt_ms or 0.0) + predict_ms
    if limit_ms is None:
        return extra
    return {**extra, PATIENCE: limit_ms}


def _response_fields(body: Mapping[str, object]) -> tuple[str, ...]:
    fields = body.get("response_fields") or []
    if not isinstance(fields, list) or not all(isinstance(f, str) for f in fields):
        raise InputError("response_fields must be a list of names", "response_fields")
    return tuple(fields)


class _Form:
    """llama.cpp's answer; with `fields` only these; a nested field is written `outer/inner`.

    `stops` are the client's own stop strings.
    """

    sign = b""

    def __init__(self, fields: tuple[str, ...], stops: tuple[str, ...]) -> None:
        self._fields = fields
        self._stops = stops

    def whole(self, text: str, finish: FinishRun) -> dict[str, object]:
        end = _end(finish, self._stops)
        return self._chosen({"content": text, **end, "cato": as_json(finish.receipt)})

    def delta(self, text: str) -> bytes:
        return sse(self._chosen({"content": text, "stop": False}))

    def ending(self, text: str, finish: FinishRun) -> bytes:
        return sse(self.whole("", finish))

    def failed(self, failure: Failure) -> bytes:
        return sse(failure.as_json())

    def nothing(self, *, is_streamed: bool, headers: dict[str, str] | None = None) -> Response:
        empty = self._chosen({"content": "", "stop": True})
        if not is_streamed:
            return JsonAnswer(empty, headers=headers)
        known = STREAM_HEADERS | (headers or {})
        return Response(sse(empty), headers=known, media_type="text/event-stream")

    def _chosen(self, value: dict[str, object]) -> dict[str, object]:
        if not self._fields:
            return value
        chosen = {"content": value["content"]}
        for path in self._fields:
            found: object = value
            for key in path.split("/"):
                found = found.get(key) if isinstance(found, dict) else None
            if found is not None:
                chosen[path] = found
        return chosen


def _end(finish: FinishRun, stops: tuple[str, ...]) -> dict[str, object]:
    """Why it ended, counts, and times in milliseconds, under llama.cpp's names."""
    receipt, ending = finish.receipt, ending_of(finish, stops)
    prompt, output, cached = ending.prompt_tokens, ending.output_tokens, ending.cached_tokens
    is_cut = ending.finish_reason == "length"
    prompt_ms = (receipt.ttft_s or receipt.e2e_s) * 1000
    predicted_ms = receipt.e2e_s * 1000 - prompt_ms
    return {
        "stop": True,
        "stop_type": "limit" if is_cut else "word" if ending.stop_sequence else "eos",
        "stopping_word": ending.stop_sequence,
        "truncated": False,
        "tokens_evaluated": prompt,
        "tokens_predicted": output,
        "tokens_cached": cached,
        "timings": {
            "prompt_n": prompt,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(1, prompt),
            "prompt_per_second": 1000 * prompt / max(prompt_ms, 1e-3),
            "predicted_n": output,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / max(1, output),
            "predicted_per_second": 1000 * output / max(predicted_ms, 1e-3),
        },
    }
