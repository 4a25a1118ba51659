"""Access control: API keys, tenant limits, and requests without a key.

Each ingress keeps all keys in memory and refreshes them every second. A request needs no look-up,
and known keys work while the store is down. A revoked key is refused after about two seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum

from cato.core.errors import AccessError, QuotaError
from cato.core.sign_in import Person
from cato.core.tenancy import Access, ApiKey, KeyHistory
from cato.serve.access.caller import ANYBODY, Caller
from cato.serve.access.keys import is_secret_of, parts
from cato.serve.access.limits import EventLimits, Left, Reserved, TenantLimits, until_next_month_s
from cato.serve.access.sign_in import SignIn, is_token
from cato.store.keys import month_of

log = logging.getLogger("cato.access")

UNKNOWN_RETRY_S = 3.0
# Running requests may use less than they reserved, and end within seconds.
RESERVED_RETRY_S = 5.0
NO_KEYS = (
    "no API key is configured: only clients on this machine are served; `cato keys create` creates "
    "the first key"
)
NOBODY = (
    "no API key is configured and the server listens beyond its own machine, so nobody is served; "
    "`cato keys create` creates the first key"
)

LOST_KEYS = (
    "the deployment had API keys but its store has none: all requests are refused; restore the "
    "store, create a key with `cato keys create`, or serve without keys with `cato keys open`"
)


class KeyRule(StrEnum):
    """When a request needs a key.

    `auto`: once the first key exists, until an operator runs `cato keys open`. Before that, and
    while the store has never been readable, only clients of this machine are served without a key.
    `required`: always. `ignored`: never; for deployments behind their own authentication.
    """

    AUTO = "auto"
    REQUIRED = "required"
    IGNORED = "ignored"


class AccessControl:
    """The keys known to one ingress replica, and its share of the tenants' limits.

    `share` is its fraction of all requests. `clock` gives seconds since the epoch. With `sign_in`,
    OIDC tokens are accepted and every request needs a token or a key. `is_private`: it listens on
    this machine's loopback only.
    """

    def __init__(
        self,
        rule: KeyRule = KeyRule.AUTO,
        *,
        share: float = 1.0,
        clock: Callable[[], float] = time.time,
        sign_in: SignIn | None = None,
        is_private: bool = True,
    ) -> None:
        if sign_in is not None and rule is KeyRule.AUTO:
            rule = KeyRule.REQUIRED
        self.sign_in = sign_in
        self._rule = rule
        self._no_keys = NO_KEYS if is_private else NOBODY
        self._share = share
        self._clock = clock
        self._is_known = False
        self._needs_key = False
        self._keys: dict[str, ApiKey] = {}
        self._spent: dict[str, int] = {}  # in the month `_spent_in`
        self._spent_in = ""
        self._limits: dict[str, TenantLimits] = {}
        self._events = EventLimits()
        self._reserved = Reserved()

    def learn(self, access: Access | None) -> None:
        """Take all keys of the store; None: the store has never been readable."""
        if access is None:
            if not self._is_known:
                log.warning("the API keys cannot be read; %s", self._no_keys)
            self._is_known = True
            return
        # The store and its key history may be lost while the ingress lives: remember what it said.
        was_keyed = self._needs_key and access.history is not KeyHistory.OPENED
        needs_key = access.needs_key or was_keyed
        if not access.keys and (self._keys or not self._is_known) and self._rule is KeyRule.AUTO:
            if needs_key:
                log.error(LOST_KEYS)
            else:
                log.warning(self._no_keys)
        self._is_known, self._needs_key = True, needs_key
        self._keys = {key.id: key for key in access.keys}
        self._spent, self._spent_in = dict(access.spent_tokens), access.month
        tenants = {t.name: t for t in access.tenants}
        for name, limits in list(self._limits.items()):
            if tenants.get(name) != limits.tenant:
                del self._limits[name]
        for name, tenant in tenants.items():
            if name not in self._limits:
                self._limits[name] = TenantLimits(tenant, self._share, self._clock())

    def why_not_ready(self) -> str:
        """What is missing before requests can be checked; empty when ready."""
        return (
            "" if self._is_known or self._rule is KeyRule.IGNORED else "no API keys are known yet"
        )

    @property
    def serves_by_place(self) -> bool:
        """Whether the client's address decides if it is served without a key."""
        return self._rule is not KeyRule.IGNORED

    async def person(self, credentials: str) -> Person | None:
        """The owner of the token `credentials`; None if they are no token; raise `AccessError`."""
        if self.sign_in is None or not is_token(credentials):
            return None
        return await self.sign_in.person(credentials)

    def caller(self, credentials: str, *, is_local: bool, person: Person | None = None) -> Caller:
        """The caller with `credentials` (empty: none); raise `AccessError`.

        `person`: the owner, if `credentials` are a token. `is_local`: the client is on this
        machine.
        """
        if self._rule is KeyRule.IGNORED:
            return ANYBODY
        if not self._is_known:
            raise AccessError(
                503, "keys_unknown", "The API keys are not known yet; try again in a moment.",
                UNKNOWN_RETRY_S,
            )  # fmt: skip
        if person is not None:
            return self._caller_of(person)
        if not self._keys and self._needs_key:
            raise AccessError(
                503, "keys_lost",
                "The API keys of this deployment are gone; its operator must restore the store, "
                "create a key with `cato keys create`, or run `cato keys open`.",
                UNKNOWN_RETRY_S,
            )  # fmt: skip
        if not self._keys and self._rule is KeyRule.AUTO:
            if is_local:
                return ANYBODY
            raise AccessError(
                403, "loopback_only",
                "No API key is configured, so only clients on the server's own machine are "
                "served, and nobody if it listens beyond that machine; its operator can create a "
                "key with `cato keys create`.",
            )  # fmt: skip
        return self._as_caller(self._key_of(credentials))

    def renewed(self, caller: Caller) -> Caller | None:
        """`caller`, admitted earlier, with its current rights; None when its key is gone, or it had
        none and now needs one.

        The rights of a person are now those of the group that it was in. None when the deployment
        does not admit the group any more, or the token ended too long ago (`SignInSpec.after_s`):
        the provider cannot be asked who is still in a group.
        """
        if self._rule is KeyRule.IGNORED:
            return caller
        if caller.is_person:
            return self._person_again(caller)
        if not caller.key:
            return None if self._needs_key or self._rule is KeyRule.REQUIRED else caller
        key = self._keys.get(caller.key)
        return None if key is None or not key.is_valid(self._clock()) else self._as_caller(key)

    def _person_again(self, caller: Caller) -> Caller | None:
        spec = None if self.sign_in is None else self.sign_in.spec
        rights = None if spec is None else spec.of_group(caller.group)
        if spec is None or rights is None or rights.tenant != caller.tenant:
            return None
        ends_at_s = caller.expires_at_s or 0.0
        if self._clock() >= ends_at_s + spec.after_s:
            return None
        return self._caller_of(Person(caller.key, rights, ends_at_s, caller.name))

    def _as_caller(self, key: ApiKey) -> Caller:
        return Caller(
            key.id,
            key.tenant,
            key.sla_class,
            key.tasks,
            key.models,
            key.default_task,
            self._weight_of(key.tenant),
            key.role,
            key.bounds,
            key.session_target_s,
            key.name,
            key.expires_at_s,
        )

    def _caller_of(self, person: Person) -> Caller:
        rights = person.rights
        return Caller(
            person.subject,
            rights.tenant,
            rights.sla_class,
            rights.tasks,
            rights.models,
            rights.default_task,
            self._weight_of(rights.tenant),
            rights.role,
            name=person.name,
            expires_at_s=person.ends_at_s,
            group=rights.group,
        )

    def _weight_of(self, tenant: str) -> float:
        limits = self._limits.get(tenant)
        return 1.0 if limits is None else limits.tenant.weight

    def left(self, caller: Caller) -> Left | None:
        """What is left of the limits of the caller's tenant; None without limits."""
        limits = self._limits.get(caller.tenant)
        return None if limits is None else limits.left(self._clock())

    def begin(self, caller: Caller, requests: int = 1) -> None:
        """Count `requests` that begin; raise `QuotaError` when the tenant is over a limit."""
        limits = self._limits.get(caller.tenant)
        if limits is None:
            return
        now_s = self._clock()
        budget = limits.tenant.tokens_per_month
        # For a moment after its first second, a month knows only what the one before has used.
        is_of_now = self._spent_in == month_of(now_s)
        spent = self._spent.get(caller.tenant, 0) if is_of_now else 0
        if budget is not None and spent >= budget:
            raise QuotaError("tokens per month", until_next_month_s(now_s), is_budget=True)
        # Other ingress replicas have reserved tokens, too: this one may use its share of the rest.
        if budget is not None and self._reserved.of(caller.tenant, now_s) >= self._share * (
            budget - spent
        ):
            raise QuotaError("tokens per month, reserved by running requests", RESERVED_RETRY_S)
        wait_s, limit = limits.wait_s(now_s)
        if wait_s > 0:
            raise QuotaError(limit, wait_s)
        limits.begin(now_s, requests)

    def tell(self, caller: Caller) -> None:
        """Count one feedback event; raise `QuotaError` when the key has sent too many."""
        wait_s = self._events.take(caller.key, self._clock())
        if wait_s > 0:
            raise QuotaError("events per minute", wait_s)

    def reserve(self, caller: Caller, expected: int, most: int) -> Callable[[int], None]:
        """Reserve tokens for a request: `expected` of the rate, `most` of the budget. Call the
        result with the tokens used when the request has ended."""
        tenant = caller.tenant
        limits = self._limits.get(tenant)
        if limits is None:
            return lambda _: None
        limits.spend(self._clock(), expected)
        self._reserved.add(tenant, most)

        def settle(used: int) -> None:
            now_s = self._clock()
            self._reserved.settle(tenant, most, used, now_s)
            known = self._limits.get(tenant)
            if known is not None:
                known.spend(now_s, used - expected)

        return settle

    def _key_of(self, credentials: str) -> ApiKey:
        if not credentials:
            raise AccessError(
                401, "invalid_api_key",
                "This server needs an API key: send it as `Authorization: Bearer KEY`.",
            )  # fmt: skip
        found = parts(credentials)
        if found is not None:
            id, secret = found
            key = self._keys.get(id)
            is_right = is_secret_of(secret, None if key is None else key.digest)
            if key is not None and is_right and key.is_valid(self._clock()):
                return key
        raise AccessError(401, "invalid_api_key", "The API key is not valid.")
