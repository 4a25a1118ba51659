"""Mistral's fill-in-the-middle: prefix and suffix in separate fields, answers in chat form.

Used by Continue's provider `mistral` and by mistralai. The best dialect for autocompletion: nothing
has to be guessed from a prompt.
"""

from __future__ import annotations

import time
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import InputError
from cato.serve.ingress import document
from cato.serve.ingress.answers import WrittenForm, serve_text
from cato.serve.ingress.body import cato_of, flag, read_object, sub_object, text_field
from cato.serve.ingress.context import Ingress, request_id
from cato.serve.ingress.fill import Fill, start_fill
from cato.serve.ingress.limits import max_tokens_of, stops_of
from cato.serve.ingress.naming import COMPLETION, resolve, with_model
from cato.serve.ingress.parameters import checked
from cato.wire.chat import ChatWriter
from cato.wire.choices import UsageIn

_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "min_tokens": "min_tokens"}


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(tags=["completion"])

    @router.post("/v1/fim/completions", **document.FIM)
    async def complete(request: Request) -> Response:
        """Fill in the middle. A completion that is shed under load gets an empty answer."""
        body = with_model(await read_object(request, ingress.max_body_bytes))
        if not isinstance(body.get("prompt"), str):
            raise InputError("prompt must be the text before the cursor", "prompt")
        extra, is_streamed = cato_of(body), flag(body, "stream")
        target = resolve(ingress, request, body.get("model"), extra, COMPLETION)
        fill = Fill(
            text_field(body, "prompt"),
            text_field(body, "suffix"),
            max_tokens=max_tokens_of(body, "max_tokens"),
            stops=stops_of(body),
            sampling=_sampling(body),
        )
        usage_in = _usage_in(body)
        task = start_fill(ingress, request, target, fill, body, extra)
        writer = ChatWriter(
            request_id(request), str(body.get("model") or ""), int(time.time()), usage_in
        )
        form = WrittenForm(writer, has_signs=False)  # editors lose data after a keep-alive
        shed = partial(form.nothing, is_streamed=is_streamed)
        return await serve_text(ingress, request, task, form, is_streamed=is_streamed, shed=shed)

    return router


def _usage_in(body: dict[str, object]) -> UsageIn:
    """Mistral's SDK has no `stream_options`: clients that send them expect OpenAI's usage chunk."""
    is_asked = flag(sub_object(body, "stream_options"), "include_usage")
    return UsageIn.OWN_CHUNK if is_asked else UsageIn.LAST_CHUNK


def _sampling(body: dict[str, object]) -> dict[str, object]:
    """Mistral's fields under OpenAI's names."""
    names = {**_SAMPLING, "random_seed": "seed"}
    return {to: checked(to, body[n]) for n, to in names.items() if body.get(n) is not None}
