"""Asks a running vLLM server what its chat template renders."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from cato.core.errors import ContextLengthError, EngineDeadError, EngineError
from cato.core.topology import TemplateFacts
from cato.engines.vllm import template

log = logging.getLogger("cato.engines")

Ask = Callable[[str, str, bytes], Awaitable[bytes]]
"""Sends a request (method, path, body) to the server and returns the answer's body."""


async def ask_template(ask: Ask, model: str, server_model: str) -> TemplateFacts | None:
    """Probe the chat template; logs the parts of a conversation that it drops.

    The server knows the model as `server_model`. None without a working template.
    """
    rendered = partial(_rendered, ask, model, server_model)
    whole = await rendered(template.whole_probe())
    system = None if whole else await rendered(template.system_probe())
    late = await rendered(template.late_probe())
    facts = template.template_facts(whole, system, late)
    if facts is None:
        log.info("model %s has no working chat template", model)
    elif lost := template.lost_parts(facts):
        log.warning(
            "model %s: its chat template drops %s, so agents get wrong answers; give its "
            "engine another template: `args: [--chat-template, FILE]`",
            model,
            lost,
        )
    return facts


async def _rendered(ask: Ask, model: str, server_model: str, probe: template.Body) -> str | None:
    """The prompt that the template makes of a conversation; None if the template refuses it."""
    try:
        body = json.dumps({"model": server_model, **probe}).encode()
        ids = json.loads(await ask("POST", "/tokenize", body))["tokens"]
        body = json.dumps({"model": server_model, "tokens": ids}).encode()
        return str(json.loads(await ask("POST", "/detokenize", body))["prompt"])
    except EngineDeadError:
        raise
    except (EngineError, ContextLengthError) as exc:
        log.info("model %s refuses a probe of its chat template: %s", model, exc)
        return None
