"""Administration rules: who may make which keys, and how often."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from cato.core.errors import AccessError, InputError, QuotaError
from cato.core.tenancy import SLA_CLASSES, ApiKey, Role
from cato.serve.access.caller import Caller
from cato.serve.access.keys import new_key
from cato.serve.access.limits import TokenBucket

TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
"""Tenant names that need no escaping in paths, logs and spreadsheets."""

# The largest limits, and lives of keys, that may be set: years that calendars can show.
MAX_LIMIT = 10**15
MAX_DAYS = 36_500.0
MAX_WEIGHT = 1e6

# Limits per tenant for its own admins.
CHANGES_PER_MINUTE = 60.0
MOST_KEYS = 500


def admin(caller: Caller, *, operator: bool = False) -> Caller:
    """Return `caller` if it is an admin (with `operator`: an operator); raise `AccessError`.

    Callers without a key or token are never admins: the audit log needs an author.
    """
    if not caller.key:
        raise AccessError(
            403, "unknown_admin",
            "Administration needs an operator's or a tenant admin's key or token: "
            "`cato keys create --role operator` makes a key.",
        )  # fmt: skip
    if caller.role is Role.USER or (operator and caller.role is not Role.OPERATOR):
        kind = "operators" if operator else "operators and tenant admins"
        raise AccessError(403, "admins_only", f"Only {kind} may do this.")
    return caller


class Changes:
    """Rate limit of tenants' administrative changes: the audit log keeps each one for ever."""

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, caller: Caller, now_s: float) -> None:
        """Count one change; raise `QuotaError` above the limit. Operators have none."""
        if caller.role is Role.OPERATOR:
            return
        new = TokenBucket(CHANGES_PER_MINUTE / 60, CHANGES_PER_MINUTE, CHANGES_PER_MINUTE, now_s)
        bucket = self._buckets.setdefault(caller.tenant, new)
        if wait_s := bucket.wait_s(now_s, 1.0):
            raise QuotaError("administrative changes per minute", wait_s)
        bucket.take(now_s, 1.0)


def check_has_room(caller: Caller, keys: Iterable[ApiKey]) -> None:
    """Raise `InputError` when a tenant admin's tenant already has `MOST_KEYS` keys."""
    has = sum(key.tenant == caller.tenant for key in keys)
    if caller.role is not Role.OPERATOR and has >= MOST_KEYS:
        raise InputError(f"a tenant has at most {MOST_KEYS} keys: delete those that have ended")


def check_may_give(caller: Caller, key: ApiKey) -> None:
    """Raise `AccessError` when `caller` may not make `key`: a tenant admin grants at most its own
    rights, within its tenant, and no longer than its own key is valid. Keys that a person makes may
    outlive the token, which ends in minutes."""
    if caller.role is Role.OPERATOR:
        return
    is_within = (
        caller.role is Role.TENANT_ADMIN
        and key.tenant == caller.tenant
        and key.role is not Role.OPERATOR
        and SLA_CLASSES.index(key.sla_class) >= SLA_CLASSES.index(caller.sla_class)
        and _is_part(key.tasks, caller.tasks)
        and _is_part(key.models, caller.models)
        and (not key.default_task or caller.may_run(key.default_task))
        and key.bounds == caller.bounds
    )
    if not is_within:
        raise AccessError(
            403, "beyond_own_rights",
            "A tenant admin can only create keys of its own tenant, with at most its own rights.",
        )  # fmt: skip
    last_s = last_end_s(caller)
    if last_s is not None and (key.expires_at_s is None or key.expires_at_s > last_s):
        raise AccessError(
            403, "beyond_own_rights",
            "A tenant admin's key that ends can only create keys that end no later: set fewer "
            "days, or leave them out for the same end.", param="days",
        )  # fmt: skip


def last_end_s(caller: Caller) -> float | None:
    """The latest end of the keys that `caller` may make; None: they need not end."""
    is_bound = caller.role is Role.TENANT_ADMIN and not caller.is_person
    return caller.expires_at_s if is_bound else None


def _is_part(given: tuple[str, ...], own: tuple[str, ...]) -> bool:
    """Whether the names in `given` allow no more than `own`; an empty list allows all."""
    return not own or (bool(given) and set(given) <= set(own))


def with_secret(key: ApiKey, now_s: float) -> tuple[str, ApiKey]:
    """A new key with the rights of `key`; the first value is the full key for its owner."""
    secret, id, digest = new_key()
    return secret, replace(key, id=id, digest=digest, created_at_s=now_s)
