"""vLLM's scheduler with `DueDateRule`: prompts by due date, with bounded prefill in each step.

Runs inside the engine, whose interpreter therefore needs CATO (`--scheduler-cls` names
`due_date_scheduler`). vLLM's own loop is unchanged: before a step the rule decides the tokens of
each prompt, and a hook that vLLM calls for each prompt enforces them. Everything used here is
private to vLLM: with another minor version, or where the hook is unreliable, the engine logs the
reason and uses its own scheduler.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from cato.core.pool.prefill import (
    MOST_S,
    NOTHING_DUE,
    CallTarget,
    DecodingCall,
    DueDateRule,
    PromptCall,
)

if TYPE_CHECKING:

    class Scheduler:
        """The parts of vLLM's `Scheduler` that are used."""

        running: list[Any]
        waiting: Any
        kv_holding_waiting: Any
        requests: dict[str, Any]
        kv_cache_manager: Any
        scheduler_config: Any
        block_size: int
        max_num_scheduled_tokens: int
        max_num_active_reqs: int
        num_waiting_for_streaming_input: int

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def add_request(self, request: Any) -> None: ...
        def schedule(self, *args: Any, **kwargs: Any) -> Any: ...
        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any: ...
        def _free_blocks(self, request: Any) -> None: ...
        def _handle_blocked_waiting_request(self, request: Any) -> bool: ...
        def _request_remaining_blocks(self, request: Any) -> int: ...
        def _reserve_prefill_lookahead(self, request: Any, computed: int, new: int) -> int: ...

else:
    Scheduler = object

log = logging.getLogger("vllm.cato")

SCHEDULER = "cato.engines.vllm.scheduler.due_date_scheduler"
STEP_VARIABLE = "CATO_PREFILL_STEP_S"
VLLM_MINOR = "0.32."
# Interval for looking up a waiting prompt's cached tokens again.
_LOOK_UP_S = 1.0
# More than the number of steps that an engine runs ahead.
_MOST_STEPS = 16
_USED = (
    "_free_blocks",
    "_handle_blocked_waiting_request",
    "_request_remaining_blocks",
    "_reserve_prefill_lookahead",
    "add_request",
    "schedule",
    "update_from_output",
)


def xargs_of(target: CallTarget) -> dict[str, float]:
    """The entries of a body's `vllm_xargs` that describe a call to the scheduler."""
    told = {
        "cato_target_s": target.target_s,
        "cato_waited_s": target.waited_s,
        "cato_tokens": target.tokens,
        "cato_tpot_s": target.tpot_s,
        "cato_has_begun": int(target.has_begun),
    }
    return {name: value for name, value in told.items() if isfinite(value)}


def with_target(body: Mapping[str, object], target: CallTarget) -> dict[str, object]:
    """The body with CATO's entries for the scheduler; the client's `cato_` entries are dropped."""
    asked = body.get("vllm_xargs")
    others = asked.items() if isinstance(asked, dict) else ()
    kept = {name: value for name, value in others if not str(name).startswith("cato_")}
    return {**body, "vllm_xargs": kept | xargs_of(target)}


def target_of(xargs: Mapping[str, Any]) -> CallTarget:
    """The target in `xargs_of`'s form; `NOTHING_DUE` for invalid values."""
    try:
        return CallTarget(
            float(xargs.get("cato_target_s", inf)),
            float(xargs.get("cato_waited_s", 0.0)),
            max(1, int(xargs.get("cato_tokens", 1))),
            float(xargs.get("cato_tpot_s", inf)),
            bool(xargs.get("cato_has_begun", False)),
        )
    except (TypeError, ValueError, OverflowError):
        return NOTHING_DUE


def due_date_scheduler(*args: Any, vllm_config: Any, kv_cache_config: Any, **more: Any) -> Any:
    """vLLM's scheduler for this configuration, with the rule where possible."""
    settings = vllm_config.scheduler_config
    settings.scheduler_cls = None
    if vllm_config.diffusion_config is not None:
        settings.scheduler_cls = "vllm.v1.core.sched.diffusion_scheduler." + (
            "DiffusionAsyncScheduler" if settings.async_scheduling else "DiffusionScheduler"
        )
    made = settings.get_scheduler_cls()
    why_not = _why_not(made, vllm_config, kv_cache_config)
    if why_not:
        log.warning("CATO: prompts run in vLLM's order, not by due date: %s", why_not)
    else:
        made = type("DueDateScheduler", (DueDate, made), {})
        log.info("CATO: prompts run by due date")
    return made(*args, vllm_config=vllm_config, kv_cache_config=kv_cache_config, **more)


def _why_not(scheduler: type, config: Any, kv_cache: Any) -> str:
    """Why the rule cannot be used in this engine; empty if it can."""
    version = str(import_module("vllm").__version__)
    problems = {
        f"vLLM is {version}, and not {VLLM_MINOR}x": not version.startswith(VLLM_MINOR),
        "its scheduler lacks a hook": not all(hasattr(scheduler, name) for name in _USED),
        "prompts are not computed in pieces": not config.scheduler_config.enable_chunked_prefill,
        "the model does not generate": config.model_config.runner_type != "generate",
        "it is a diffusion model": config.diffusion_config is not None,
        "it has an encoder": config.model_config.is_encoder_decoder,
        "it decodes speculatively": config.speculative_config is not None,
        "its layers have KV caches of several kinds": len(kv_cache.kv_cache_groups) != 1,
        # vLLM caches their state only where a piece ends at a block's end.
        "it has Mamba layers": getattr(kv_cache, "has_mamba_layers", True),
        "it is a pipeline": config.parallel_config.pipeline_parallel_size != 1,
    }
    return next((problem for problem, is_there in problems.items() if is_there), "")


@dataclass(slots=True)
class _Step:
    """A step under way: vLLM's plan, and the inputs for learning from its duration."""

    output: Any
    started_s: float
    streams: int
    pieces: list[tuple[int, int]]


@dataclass(slots=True)
class _Asked:
    """State of a request since its arrival. `cached`: its cached tokens, and the free blocks that
    it would take."""

    target: CallTarget
    asked_at_s: float
    begun_at_s: float | None = None
    cached: tuple[int, int] = (0, 0)
    looked_up_s: float = -inf


class DueDate(Scheduler):
    """Mixed into vLLM's `Scheduler` or `AsyncScheduler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rule = DueDateRule(float(os.environ.get(STEP_VARIABLE, MOST_S)))
        self._known: dict[str, _Asked] = {}
        # The step being planned: the decoding requests, and the tokens of each prompt.
        self._streams: set[str] = set()
        self._pieces: dict[str, int] = {}
        self._steps: deque[_Step] = deque(maxlen=_MOST_STEPS)
        self._step_ended_s = 0.0
        # Only the rule bounds a prompt.
        self.scheduler_config.long_prefill_token_threshold = 0

    def add_request(self, request: Any) -> None:
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        self._known[request.request_id] = _Asked(target_of(extra), time.monotonic())
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        started_s = time.monotonic()
        self._plan(started_s)
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            scheduled = output.num_scheduled_tokens
            pieces = [
                (tokens, max(0, self.requests[id].num_computed_tokens - tokens))
                for id, tokens in scheduled.items()
                if id not in self._streams
            ]
            self._steps.append(_Step(output, started_s, len(scheduled) - len(pieces), pieces))
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        now_s = time.monotonic()
        if any(step.output is scheduler_output for step in self._steps):
            while (step := self._steps.popleft()).output is not scheduler_output:
                pass
            # Of two overlapping steps, the second begins when the first one ends.
            step_s = now_s - max(step.started_s, self._step_ended_s)
            self._rule.law.saw(step_s, step.streams, step.pieces)
            self._step_ended_s = now_s
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def _free_blocks(self, request: Any) -> None:
        self._known.pop(request.request_id, None)
        super()._free_blocks(request)

    def _reserve_prefill_lookahead(self, request: Any, computed: int, new_tokens: int) -> int:
        """vLLM calls this for each request that it schedules. At 0 tokens a running request is
        skipped, and a waiting one ends the admissions of this step."""
        tokens: int = super()._reserve_prefill_lookahead(request, computed, new_tokens)
        if request.request_id in self._streams:
            return tokens
        return min(tokens, self._pieces.get(request.request_id, 0))

    def _plan(self, now_s: float) -> None:
        decoding, prompts = self._running(now_s)
        # vLLM admits these before `waiting`. Some are still being loaded from host memory.
        holding = set(self.kv_holding_waiting)
        ready, blocked = [], []
        for request in (*self.kv_holding_waiting, *self.waiting):
            # vLLM asks this when it comes to the request in its queue. Asked here, a request that
            # has become ready gets its tokens in this step; without tokens it would end admissions.
            if not self._handle_blocked_waiting_request(request):
                blocked.append(request)
                continue
            ready.append(request)
            prompt = self._prompt(request, self._asked(request), now_s, is_running=False)
            prompts.append(replace(prompt, enters_first=request in holding))
        if not prompts:
            self._pieces = {}
            return
        cache = self.kv_cache_manager
        # vLLM refuses another load that would need these.
        kept = sum(self._request_remaining_blocks(r) for r in blocked if r in holding)
        self._pieces = self._rule.plan(
            now_s,
            decoding,
            prompts,
            room_tokens=self.max_num_scheduled_tokens,
            places=self.max_num_active_reqs - self.num_waiting_for_streaming_input,
            free_blocks=cache.block_pool.get_num_free_blocks() - cache.watermark_blocks - kept,
        )
        place = {id: i for i, id in enumerate(self._pieces)}
        ready.sort(key=lambda request: place.get(request.request_id, len(place)))
        # vLLM admits in order until a request gets no tokens. A blocked one that becomes ready
        # after the plan has none, so it must not come before others.
        queue: Any = import_module("vllm.v1.core.sched.request_queue").FCFSRequestQueue
        self.waiting = queue(r for r in (*ready, *blocked) if r not in holding)
        if holding:
            self.kv_holding_waiting = queue(r for r in (*ready, *blocked) if r in holding)

    def _running(self, now_s: float) -> tuple[list[DecodingCall], list[PromptCall]]:
        """Running requests that decode, which become `_streams`, and those with a prompt left."""
        decoding, prompts = [], []
        self._streams.clear()
        for request in self.running:
            asked = self._asked(request)
            ahead = request.num_output_placeholders - request.num_computed_tokens
            if request.num_tokens + ahead > 1:
                prompts.append(self._prompt(request, asked, now_s, is_running=True))
                continue
            self._streams.add(request.request_id)
            if asked.begun_at_s is None and request.num_output_tokens:
                asked.begun_at_s = now_s
            elapsed_s = 0.0 if asked.begun_at_s is None else now_s - asked.begun_at_s
            said = max(1, request.num_output_tokens + request.num_output_placeholders)
            decoding.append(DecodingCall(said, elapsed_s, asked.target.tpot_s))
        return decoding, prompts

    def _asked(self, request: Any) -> _Asked:
        return self._known.setdefault(request.request_id, _Asked(NOTHING_DUE, time.monotonic()))

    def _prompt(self, request: Any, asked: _Asked, now_s: float, *, is_running: bool) -> PromptCall:
        computed = request.num_computed_tokens
        if computed or is_running:
            blocks = self._request_remaining_blocks(request)
        else:
            if now_s - asked.looked_up_s > _LOOK_UP_S:
                asked.cached, asked.looked_up_s = self._cached(request), now_s
            computed, blocks = asked.cached
        target = asked.target
        if request.num_output_tokens and not target.has_begun:  # preempted
            target = asked.target = replace(target, has_begun=True)
        return PromptCall(
            request.request_id,
            asked.asked_at_s,
            max(1, request.num_tokens - computed),
            computed,
            target,
            request.priority,
            blocks,
            is_running,
        )

    def _cached(self, request: Any) -> tuple[int, int]:
        found, tokens, _ = self.kv_cache_manager.get_computed_blocks(request)
        in_use = sum(block.ref_cnt > 0 for block in found.blocks[0])
        return tokens, -(-request.num_tokens // self.block_size) - in_use
