"""Sign-in with tokens of the team's identity provider: who may, and with which rights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cato.core.tenancy import SLA_CLASSES, Role

ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
)  # fmt: skip
"""Public-key signatures only. A shared secret is never accepted: anyone who can check such a
signature can make one, and a public key could pass for the secret."""

DEFAULT_SCOPE = "openid profile email"

# Subjects and names that are safe in log lines and spreadsheet files.
_SANE_SUBJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@|+-]{0,99}")
_ODD = re.compile(r"[^A-Za-z0-9._@+ -]")
_NAME_CHARS = 60


@dataclass(frozen=True, slots=True)
class GroupRights:
    """Rights of the members of `group`; see `cato.core.tenancy.ApiKey`."""

    group: str
    tenant: str
    role: Role = Role.USER
    sla_class: str = SLA_CLASSES[0]
    tasks: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    default_task: str = ""


@dataclass(frozen=True, slots=True)
class SignInSpec:
    """The identity provider `issuer`, and the rights that its tokens give.

    A token must be for one of the `audiences`. The first of `groups` that contains the person
    decides; without one the person is refused. `groups_claim` is a claim, or a path such as
    `realm_access.roles`. `skew_s` is the allowed clock error of the provider. A person's batches go
    on for `after_s` after the end of the token that made them. With a `client_id` people sign in on
    the status page.
    """

    issuer: str
    audiences: tuple[str, ...]
    groups: tuple[GroupRights, ...]
    groups_claim: str = "groups"
    algorithms: tuple[str, ...] = ALGORITHMS
    skew_s: float = 30.0
    after_s: float = 86_400.0
    client_id: str = ""
    scope: str = DEFAULT_SCOPE

    def rights_of(self, claims: Mapping[str, object]) -> GroupRights | None:
        """The rights of a verified token's claims; None: no access."""
        groups = self._groups_of(claims)
        return next((rights for rights in self.groups if rights.group in groups), None)

    def of_group(self, group: str) -> GroupRights | None:
        """The rights of the members of `group`; None: no access."""
        return next((rights for rights in self.groups if rights.group == group), None)

    def _groups_of(self, claims: Mapping[str, object]) -> frozenset[str]:
        found = claims.get(self.groups_claim)
        if found is None:
            found = claims
            for part in self.groups_claim.split("."):
                found = found.get(part) if isinstance(found, Mapping) else None
        if isinstance(found, str):
            return frozenset({found})
        listed = found if isinstance(found, list) else []
        return frozenset(group for group in listed if isinstance(group, str))


@dataclass(frozen=True, slots=True)
class Person:
    """The person whose token a request carries. `name` is for display: people may choose it."""

    subject: str
    rights: GroupRights
    ends_at_s: float
    name: str = ""


def person_of(claims: Mapping[str, object], rights: GroupRights, ends_at_s: float) -> Person:
    """The person of verified claims, which include `sub`."""
    subject = str(claims["sub"])
    if not _SANE_SUBJECT.fullmatch(subject):
        subject = hashlib.blake2b(subject.encode("utf-8", "replace"), digest_size=12).hexdigest()
    names = (claims.get(claim) for claim in ("email", "preferred_username", "name"))
    name = next((n for n in names if isinstance(n, str) and n), "")
    return Person(f"oidc:{subject}", rights, ends_at_s, _ODD.sub("?", name[:_NAME_CHARS]))
