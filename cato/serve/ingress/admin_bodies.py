"""Reads what requests to `/v1/admin` ask for: limits of a tenant, a key, and numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping

from starlette.requests import Request

from cato.core.errors import InputError
from cato.core.tenancy import SLA_CLASSES, ApiKey, Role, Tenant
from cato.serve.access.administration import (
    MAX_DAYS,
    MAX_LIMIT,
    MAX_WEIGHT,
    TENANT_NAME,
    last_end_s,
)
from cato.serve.access.caller import Caller
from cato.serve.ingress.body import (
    known_keys,
    positive_number,
    sub_object,
    text_field,
    whole_number,
)
from cato.serve.ingress.bounds import NAMES
from cato.serve.ingress.context import Ingress
from cato.serve.ingress.naming import pool_of

MAX_NAME_CHARS = 100
MAX_NAMES = 100
KEY_FIELDS = (
    "tenant", "name", "role", "sla", "tasks", "models", "default_task", "days", "session_minutes",
    "bounds",
)  # fmt: skip
LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_month")


def limits_of(name: str, body: dict[str, object]) -> Tenant:
    """The limits in a body; checks the tenant's name."""
    if not TENANT_NAME.fullmatch(name):
        raise InputError("a tenant's name may contain only letters, digits and . _ @ -", "tenant")
    known_keys(
        body, (*LIMITS, "weight"), f'{{{", ".join(LIMITS)}: whole number or null, "weight"}}'
    )
    numbers = {}
    for field in LIMITS:
        number = whole_number(body, field)
        if number is not None and not 1 <= number <= MAX_LIMIT:
            raise InputError(f"{field} must be between 1 and {MAX_LIMIT}, or null", field)
        numbers[field] = number
    weight = number_field(body, "weight", MAX_WEIGHT)
    if weight is not None and weight < 0.01:
        raise InputError("weight must be at least 0.01", "weight")
    return Tenant(name, **numbers, weight=1.0 if weight is None else weight)


def wanted_key(ingress: Ingress, caller: Caller, body: dict[str, object]) -> ApiKey:
    """The key that a body asks for, without an id yet; one made by a tenant admin inherits its
    bounds and, without `days`, the end of its key."""
    known_keys(body, KEY_FIELDS, f"fields among {', '.join(KEY_FIELDS)}")
    tenant = text_field(body, "tenant") or caller.tenant
    if not TENANT_NAME.fullmatch(tenant):
        raise InputError("a tenant's name may contain only letters, digits and . _ @ -", "tenant")
    role, sla = text_field(body, "role") or Role.USER, text_field(body, "sla") or SLA_CLASSES[0]
    if role not in set(Role):
        raise InputError(f"role must be one of {', '.join(Role)}", "role")
    if sla not in SLA_CLASSES:
        raise InputError(f"sla must be one of {', '.join(SLA_CLASSES)}", "sla")
    name = text_field(body, "name")
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise InputError(f"name must be one line of at most {MAX_NAME_CHARS} characters", "name")
    tasks, models = _names(body, "tasks"), _names(body, "models")
    default_task = text_field(body, "default_task")
    for task in filter(None, (*tasks, default_task)):
        ingress.service.workflow(task)  # raises UnknownNameError
    if tasks and default_task and default_task not in tasks:
        raise InputError("default_task must be one of the key's tasks", "default_task")
    for model in models:
        pool_of(ingress, model)  # raises UnknownNameError or StartingError
    days = number_field(body, "days", MAX_DAYS)
    minutes = number_field(body, "session_minutes", 1440 * MAX_DAYS)
    bounds = _bounds(sub_object(body, "bounds"))
    if caller.role is not Role.OPERATOR and not bounds:
        bounds = caller.bounds
    return ApiKey(
        id="",
        digest="",
        tenant=tenant,
        name=name,
        sla_class=sla,
        tasks=tasks,
        models=models,
        default_task=default_task,
        expires_at_s=last_end_s(caller) if days is None else time.time() + 86_400 * days,
        role=Role(role),
        bounds=bounds,
        session_target_s=None if minutes is None else 60 * minutes,
    )


def _names(body: Mapping[str, object], field: str) -> tuple[str, ...]:
    value = body.get(field) or []
    if not isinstance(value, list) or not all(isinstance(n, str) and n for n in value):
        raise InputError(f"{field} must be a list of names", field)
    if len(value) > MAX_NAMES:
        raise InputError(f"{field} must have at most {MAX_NAMES} names", field)
    return tuple(value)


def _bounds(body: Mapping[str, object]) -> tuple[tuple[str, int], ...]:
    for name in body:
        number = whole_number(body, name)
        if name not in NAMES or number is None or not 0 <= number <= MAX_LIMIT:
            raise InputError(f"bounds must be whole numbers for {', '.join(NAMES)}", "bounds")
    return tuple((name, int(str(number))) for name, number in body.items())


def number_field(
    body: Mapping[str, object], field: str, most: float, *, at_least_zero: bool = False
) -> float | None:
    """A number above 0, or of at least 0; None when absent or null."""
    value = body.get(field)
    if value is None:
        return None
    if at_least_zero and value == 0 and not isinstance(value, bool):
        return 0.0
    number = positive_number(value, field)
    if number > most:
        raise InputError(f"{field} must be at most {most:g}", field)
    return number


def query_number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 15 or int(text) < 1:
        raise InputError(f"{name} must be a whole number above 0", name)
    return int(text)
