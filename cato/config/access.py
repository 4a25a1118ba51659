"""Settings of sign-in and prices in a deployment file: `sign_in` and `prices`."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from cato.config.fields import Duration, NonEmpty, StrictModel
from cato.core.prices import Prices, TokenPrice
from cato.core.sign_in import ALGORITHMS, DEFAULT_SCOPE, GroupRights, SignInSpec
from cato.core.tenancy import Role


class TokenPriceArgs(StrictModel):
    """Prices per million tokens; without `cached_prompt`, cached prompt tokens cost `prompt`."""

    prompt: float = Field(ge=0, allow_inf_nan=False)
    output: float = Field(ge=0, allow_inf_nan=False)
    cached_prompt: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    def to_price(self) -> TokenPrice:
        cached = self.prompt if self.cached_prompt is None else self.cached_prompt
        return self.made(TokenPrice, cached_prompt=cached)


class PricesArgs(StrictModel):
    """`prices`: the cost of usage; see `cato.core.prices`."""

    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    models: dict[NonEmpty, TokenPriceArgs] = Field(default_factory=dict)
    card_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_a_price(self) -> Self:
        if not self.models and self.card_hour is None:
            raise ValueError("needs models with prices, or card_hour")
        return self

    def to_prices(self) -> Prices:
        models = {name: price.to_price() for name, price in self.models.items()}
        return self.made(Prices, models=models)


class GroupArgs(StrictModel):
    """One of the `groups` of `sign_in`: the tenant and rights of its members."""

    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$")]
    role: Literal["user", "tenant-admin", "operator"] = "user"
    sla_class: Literal["interactive", "standard", "batch"] = Field(
        default="interactive", alias="sla"
    )
    tasks: list[NonEmpty] = Field(default_factory=list)
    models: list[NonEmpty] = Field(default_factory=list)
    default_task: str = ""

    def to_rights(self, group: str) -> GroupRights:
        return self.made(GroupRights, group=group, role=Role(self.role))


def _issuer(url: str) -> str:
    parts = urlsplit(url)
    is_here = parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1", "::1")
    if (
        not parts.netloc
        or parts.query
        or parts.fragment
        or not (parts.scheme == "https" or is_here)
    ):
        raise ValueError("must be an https URL such as https://sso.example/realms/dev")
    return url


def _listed(value: object) -> object:
    """One text as a list. A union of both would name each problem twice, in Pydantic's words."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be text or a list of texts")
    return value


class SignInArgs(StrictModel):
    """`sign_in`: tokens of the team's identity provider; see `cato.core.sign_in`."""

    issuer: Annotated[str, AfterValidator(_issuer)]
    audience: Annotated[
        list[NonEmpty],
        Field(min_length=1),
        BeforeValidator(_listed, json_schema_input_type=NonEmpty | list[NonEmpty]),
    ]
    groups: dict[NonEmpty, GroupArgs] = Field(min_length=1)
    groups_claim: NonEmpty = "groups"
    algorithms: Annotated[
        list[
            Literal[
                "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512",
                "EdDSA",
            ]
        ],
        Field(min_length=1),
    ] = Field(default_factory=lambda: list(ALGORITHMS))  # type: ignore[arg-type]  # fmt: skip
    skew_s: Annotated[Duration, Field(ge=0, le=300)] = Field(default=30.0, alias="clock_skew")
    after_s: Annotated[Duration, Field(ge=0, le=7 * 86_400)] = Field(
        default=86_400.0, alias="batches_after_token"
    )
    client_id: str = ""
    scope: NonEmpty = DEFAULT_SCOPE

    def to_sign_in(self) -> SignInSpec:
        groups = tuple(rights.to_rights(group) for group, rights in self.groups.items())
        return self.made(SignInSpec, audiences=tuple(self.audience), groups=groups)
