"""`/v1/admin`: tenants and their limits, API keys, and the audit log.

Operators manage all tenants; tenant admins manage their own tenant's keys. Every change is logged
with its author. Requests about another tenant's keys get 404.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cato.core.administration import (
    AddKey,
    Change,
    DeleteKey,
    EndKey,
    RotateKey,
    SetTenant,
    shown_key,
)
from cato.core.errors import InputError
from cato.core.tenancy import Access, ApiKey, Role, Tenant
from cato.serve.access.administration import (
    MAX_DAYS,
    Changes,
    admin,
    check_has_room,
    check_may_give,
    last_end_s,
    with_secret,
)
from cato.serve.access.caller import Caller
from cato.serve.ingress import document
from cato.serve.ingress.admin_bodies import limits_of, number_field, query_number, wanted_key
from cato.serve.ingress.body import known_keys, read_object
from cato.serve.ingress.context import Ingress, caller_of
from cato.serve.ingress.errors import answer
from cato.serve.ingress.failures import Failure
from cato.serve.ingress.jsons import JsonAnswer

MAX_BYTES = 16_384
MAX_ENTRIES = 1_000
ROTATION_HOURS = 24.0
NO_STORE = {"Cache-Control": "no-store"}
UNKNOWN_KEY = Failure(
    404, "No API key has this id; see GET /v1/admin/keys.", "invalid_request_error",
    "key_not_found", param="key",
)  # fmt: skip


def routes(ingress: Ingress) -> APIRouter:
    router = APIRouter(prefix="/v1/admin", tags=["administration"])
    desk = _Desk(ingress)
    _add_tenants(router, desk)
    _add_keys(router, desk)
    _add_endings(router, desk)
    _add_audit(router, desk)
    return router


class _Desk:
    """What the routes share."""

    def __init__(self, ingress: Ingress) -> None:
        self.ingress = ingress
        self.records = ingress.service.records
        self._changes = Changes()

    def changing(self, request: Request) -> Caller:
        """The caller, who may change keys now."""
        caller = admin(caller_of(request))
        self._changes.take(caller, time.monotonic())
        return caller

    async def body_of(self, request: Request) -> dict[str, object]:
        return await read_object(request, min(MAX_BYTES, self.ingress.max_body_bytes))

    async def known(self, caller: Caller, id: str) -> ApiKey | None:
        keys = (await self.records.access()).keys
        return next((k for k in keys if k.id == id and caller.sees in (None, k.tenant)), None)

    async def changed(self, request: Request, caller: Caller, change: Change) -> Response:
        done = await self.records.administer(change, caller.who, caller.sees)
        if not isinstance(done, ApiKey):
            return answer(request, UNKNOWN_KEY)
        return JsonAnswer(_key(done), headers=NO_STORE)


def _add_tenants(router: APIRouter, desk: _Desk) -> None:
    records = desk.records

    @router.get("/tenants", responses=document.TENANTS)
    async def tenants(request: Request) -> Response:
        """Tenants with their limits, number of keys and tokens used this month: all tenants for
        operators, only its own for a tenant admin."""
        caller = admin(caller_of(request))
        access = await records.access()
        names = {t.name for t in access.tenants} | {k.tenant for k in access.keys}
        names |= set(access.spent_tokens) | {caller.tenant}
        shown = sorted(names - {""} if caller.sees is None else {caller.sees})
        data = [_tenant(access, name) for name in shown]
        value = {"object": "list", "data": data, "role": caller.role.value}
        return JsonAnswer(value, headers=NO_STORE)

    @router.put("/tenants/{tenant}", **document.TENANT)
    async def limit(request: Request, tenant: str) -> Response:
        """Replace all limits of a tenant; operators only. A limit that is null or absent is
        removed."""
        caller = admin(caller_of(request), operator=True)
        limits = limits_of(tenant, await desk.body_of(request))
        await records.administer(SetTenant(limits), caller.who, None)
        return JsonAnswer(_tenant(await records.access(), tenant), headers=NO_STORE)


def _add_keys(router: APIRouter, desk: _Desk) -> None:
    records = desk.records

    @router.get("/keys", responses=document.KEYS)
    async def keys(request: Request) -> Response:
        """API keys, ended ones included. Secrets are not stored."""
        caller = admin(caller_of(request))
        found = (await records.access()).keys
        data = [_key(k) for k in found if caller.sees in (None, k.tenant)]
        return JsonAnswer({"object": "list", "data": data}, headers=NO_STORE)

    @router.post("/keys", **document.NEW_KEY)
    async def create(request: Request) -> Response:
        """Create an API key; only this response contains its secret. A tenant admin cannot grant
        more rights than its own key has, nor for longer: without `days` the new key
        ends with it."""
        caller = desk.changing(request)
        wanted = wanted_key(desk.ingress, caller, await desk.body_of(request))
        check_may_give(caller, wanted)
        check_has_room(caller, (await records.access()).keys)
        secret, key = with_secret(wanted, time.time())
        await records.administer(AddKey(key), caller.who, None)
        return JsonAnswer({**_key(key), "secret": secret}, headers=NO_STORE)

    @router.post("/keys/{key}/rotate", **document.ROTATED_KEY)
    async def rotate(request: Request, key: str) -> Response:
        """Replace a key by a new one with the same rights and no expiry, or that of the tenant
        admin's key that asks; the old key stays valid for `hours`."""
        caller = desk.changing(request)
        body = await desk.body_of(request)
        known_keys(body, ("hours",), '{"hours": number}')
        hours = number_field(body, "hours", 24 * MAX_DAYS, at_least_zero=True)
        old = await desk.known(caller, key)
        if old is None:
            return answer(request, UNKNOWN_KEY)
        renewed = replace(old, expires_at_s=last_end_s(caller))
        check_may_give(caller, renewed)
        check_has_room(caller, (await records.access()).keys)
        now_s = time.time()
        if not old.is_valid(now_s):
            raise InputError("this key has ended; create a new one", "key")
        secret, new = with_secret(renewed, now_s)
        ends_at_s = now_s + 3600 * (ROTATION_HOURS if hours is None else hours)
        done = await records.administer(RotateKey(key, new, ends_at_s), caller.who, caller.sees)
        if done is None:
            return answer(request, UNKNOWN_KEY)
        return JsonAnswer({**_key(new), "secret": secret}, headers=NO_STORE)


def _add_endings(router: APIRouter, desk: _Desk) -> None:
    @router.post("/keys/{key}/end", responses=document.KEY)
    async def end(request: Request, key: str) -> Response:
        """End a key now; it stops working within two seconds."""
        caller = desk.changing(request)
        found = await desk.known(caller, key)
        if found is None:
            return answer(request, UNKNOWN_KEY)
        if found.role is Role.OPERATOR:
            admin(caller, operator=True)
        return await desk.changed(request, caller, EndKey(key, time.time()))

    @router.delete("/keys/{key}", responses=document.KEY)
    async def delete(request: Request, key: str) -> Response:
        """Delete a key that has ended; its usage records stay."""
        caller = desk.changing(request)
        found = await desk.known(caller, key)
        if found is None:
            return answer(request, UNKNOWN_KEY)
        if found.is_valid(time.time()):
            raise InputError("this key is still valid; end it before deleting it", "key")
        return await desk.changed(request, caller, DeleteKey(key))


def _add_audit(router: APIRouter, desk: _Desk) -> None:
    @router.get("/audit", **document.AUDIT)
    async def audit(request: Request) -> Response:
        """Administrative changes by HTTP and command line, newest first: author, action, and the
        values before and after."""
        caller = admin(caller_of(request))
        limit = query_number(request, "limit") or 100
        if limit > MAX_ENTRIES:
            raise InputError(f"limit must be at most {MAX_ENTRIES}", "limit")
        entries = await desk.records.audit(caller.sees, limit, query_number(request, "below"))
        return JsonAnswer({"object": "list", "data": [asdict(e) for e in entries]}, 200, NO_STORE)


def _key(key: ApiKey) -> dict[str, object]:
    return {**shown_key(key), "is_valid": key.is_valid(time.time())}


def _tenant(access: Access, name: str) -> dict[str, object]:
    limits = next((t for t in access.tenants if t.name == name), Tenant(name))
    return {
        **asdict(limits),
        "keys": sum(key.tenant == name and key.is_valid(time.time()) for key in access.keys),
        "spent_tokens": access.spent_tokens.get(name, 0),
    }
