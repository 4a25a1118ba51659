"""`/v1/admin/rollouts`, for operators: canary rollouts of new models under existing names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.errors import AccessError, InputError
from cato.core.rollout import Rollout
from cato.core.rollout_book import PromoteRollout, RollBackRollout, RolloutOrder, StartRollout
from cato.core.rollout_rule import MAX_HOLD_S, ArmCounts, RolloutRule, compared
from cato.serve.ingress import document
from cato.serve.ingress.body import known_keys, read_object, sub_object, whole_number
from cato.serve.ingress.context import Ingress, caller_of
from cato.serve.ingress.jsons import JsonAnswer
from cato.serve.ingress.naming import pool_of
from cato.serve.ingress.receipts import as_json
from cato.serve.pools import is_ready

MAX_BYTES = 10_000
MAX_NAME_CHARS = 256
MAX_STEPS = 20
# As `MAX_HOLD_S`, so that every rollout ends.
MAX_CALLS = 10_000_000
RULE_FIELDS = RolloutRule.__slots__
SHAPE = '{"name": str, "canary": str, "rule": {...}}'


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(prefix="/v1/admin/rollouts", tags=["administration"])

    @router.get("", responses=document.ROLLOUTS)
    async def rollouts(request: Request) -> Response:
        """All rollouts: their steps, both models' results in the current step, and the verdict."""
        _check_operator(request)
        known = ingress.service.records.rollouts()
        return JsonAnswer({"object": "list", "data": described(known)})

    @router.post("", **document.START_ROLLOUT)
    async def start(request: Request) -> Response:
        """Move a model's name to another model step by step."""
        _check_operator(request)
        body = await read_object(request, MAX_BYTES)
        known_keys(body, ("name", "canary", "rule"), SHAPE)
        return await ordered(request, _start(ingress, body))

    @router.post("/promote", **document.PROMOTE_ROLLOUT)
    async def promote(request: Request) -> Response:
        """Go to the next step now, regardless of the comparison. With the current `stage` the
        order may be repeated: at another step it changes nothing."""
        _check_operator(request)
        body = await read_object(request, MAX_BYTES)
        known_keys(body, ("name", "stage"), '{"name": str, "stage": int}')
        order = PromoteRollout(_name(body, "name"), stage=whole_number(body, "stage"))
        return await ordered(request, order)

    @router.post("/rollback", **document.ROLL_BACK)
    async def roll_back(request: Request) -> Response:
        """Route every session to the stable model again; running streams stay where they are."""
        _check_operator(request)
        body = await read_object(request, MAX_BYTES)
        known_keys(body, ("name",), '{"name": str}')
        return await ordered(request, RollBackRollout(_name(body, "name")))

    async def ordered(request: Request, order: RolloutOrder) -> Response:
        by = caller_of(request).who
        rollout = await ingress.service.records.order_rollout(order, by)
        return JsonAnswer(described({rollout.name: rollout})[0])

    return router


def described(rollouts: Mapping[str, Rollout]) -> list[dict[str, object]]:
    """Rollouts in JSON form, sorted by name."""
    now_s = time.time()
    return [_described(rollout, now_s) for _, rollout in sorted(rollouts.items())]


def _described(rollout: Rollout, now_s: float) -> dict[str, object]:
    measures = compared(rollout.stable_counts, rollout.canary_counts, rollout.rule)
    return {
        "object": "rollout",
        "name": rollout.name,
        "stable": rollout.stable,
        "canary": rollout.canary,
        "phase": rollout.phase.value,
        "stage": rollout.stage,
        "share": rollout.share,
        "since_s": rollout.since_s,
        "outlook": rollout.outlook(now_s),
        "stable_counts": _counts(rollout.stable_counts),
        "canary_counts": _counts(rollout.canary_counts),
        "measures": [as_json(asdict(m)) for m in measures],
        "rule": as_json(asdict(rollout.rule)),
        "history": [as_json(asdict(change)) for change in rollout.history],
    }


def _counts(counts: ArmCounts) -> dict[str, object]:
    return {
        "calls": counts.calls,
        "errors": counts.errors,
        "met": counts.met,
        "mean_ttft_s": counts.mean_ttft_s,
        "shown": counts.shown,
        "taken": counts.taken,
    }


def _check_operator(request: Request) -> None:
    if not caller_of(request).is_operator:
        told = "Only operators may manage rollouts; use a key with the role operator."
        raise AccessError(403, "admins_only", told)


def _name(body: Mapping[str, object], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        raise InputError(f"{key} must be the name of a model", key)
    return value


def _start(ingress: Ingress, body: Mapping[str, object]) -> StartRollout:
    name, canary = _name(body, "name"), _name(body, "canary")
    old, new = pool_of(ingress, name), pool_of(ingress, canary)
    stable, chosen = old.model.called(name), new.model.called(canary)
    rule = _rule(sub_object(body, "rule"))
    if not is_ready(ingress.service.pools(), canary):
        raise InputError(f"no replica of {canary!r} is ready; start one first", "canary")
    if rule.shadow_share and old.name.partition("/")[0] == new.name.partition("/")[0]:
        raise InputError(
            "both models are served by the same replicas, so shadow traffic would slow real calls; "
            "set shadow_share to 0",
            "rule.shadow_share",
        )
    return StartRollout(name, stable, chosen, rule)


def _rule(given: Mapping[str, object]) -> RolloutRule:
    unknown = sorted(given.keys() - set(RULE_FIELDS))
    if unknown:
        known = ", ".join(RULE_FIELDS)
        raise InputError(f"unknown field {unknown[0]!r} in rule; known: {known}", "rule")
    values: dict[str, object] = {}
    for key, value in given.items():
        if key == "shares":
            values[key] = _shares(value)
        elif key in ("min_calls", "max_calls", "min_shown"):
            values[key] = round(_number(key, value, 1, MAX_CALLS))
        else:
            values[key] = _number(key, value, 0, MAX_HOLD_S if key == "hold_s" else 1)
    rule = RolloutRule(**values)  # type: ignore[arg-type]
    if rule.max_calls < rule.min_calls:
        raise InputError("rule.max_calls must be at least min_calls", "rule.max_calls")
    return rule


def _shares(value: object) -> tuple[float, ...]:
    numbers = value if isinstance(value, list) else []
    shares = tuple(_number("shares", n, 0, 1) for n in numbers)
    if not shares or len(shares) > MAX_STEPS or sorted(set(shares)) != list(shares):
        raise InputError(f"rule.shares must be 1 to {MAX_STEPS} increasing numbers", "rule.shares")
    if not 0 < shares[0] <= shares[-1] < 1:
        raise InputError("rule.shares must be above 0 and below 1", "rule.shares")
    return shares


def _number(key: str, value: object, least: float, most: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise InputError(f"rule.{key} must be a number from {least:g} to {most:g}", f"rule.{key}")
    return float(value)
