"""A profile file: the coefficients of a `Profile` and where they come from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cato.config.fields import NonEmpty, StrictModel
from cato.core.prefix_cache import BLOCK_TOKENS
from cato.core.profile import Profile

Coefficient = Annotated[float, Field(ge=0)]
R2 = Annotated[float, Field(le=1)]


class PrefillSection(StrictModel):
    """Seconds of a prefill; see `Profile`."""

    per_batch_token_s: Coefficient = 0.0
    per_request_s: Coefficient = 0.0
    per_token_s: Coefficient = 0.0
    base_s: Coefficient = 0.0
    per_attended_token_s: Coefficient = 0.0


class DecodeSection(StrictModel):
    """Seconds of a decode step; see `Profile`."""

    per_context_token_s: Coefficient = 0.0
    per_request_s: Coefficient = 0.0
    base_s: Coefficient = 0.0
    weights_read_s: Coefficient = 0.0
    kv_read_token_s: Coefficient = 0.0


class HostSection(StrictModel):
    """Host memory behind the KV cache, and the cost of loading a token from it."""

    capacity_tokens: int = Field(default=0, ge=0)
    load_token_s: Coefficient = 0.0


class Provenance(StrictModel):
    """Where the numbers come from, so that they can be reproduced.

    `simulated`: no hardware was measured; the numbers are published, chosen or scaled.
    `provisional`: good enough to start with, to be measured on the serving machine.
    `samples` counts the measurements used by the fits.
    """

    command: str = ""
    date: str = ""
    machine: str = ""
    samples: int = Field(default=0, ge=0)
    prefill_r2: R2 | None = None
    decode_r2: R2 | None = None
    simulated: bool = False
    provisional: bool = False
    note: str = ""


class ProfileFile(StrictModel):
    """A file of `profiles/`; its name is `<model>@<accelerator>.yaml`."""

    model: NonEmpty
    accelerator: NonEmpty
    engine: NonEmpty
    prefill: PrefillSection
    decode: DecodeSection
    kv_capacity_tokens: int = Field(ge=1)
    max_running: int = Field(ge=1)
    context_tokens: int = Field(ge=1)
    load_s: Coefficient
    step_tokens: int = Field(default=0, ge=0)
    block_tokens: int = Field(default=BLOCK_TOKENS, ge=1)
    host: HostSection = HostSection()
    kv_token_bytes: int = Field(default=0, ge=0)
    fetch_token_s: Coefficient = 0.0
    chars_per_token: float = Field(default=3.5, gt=0)
    latency_s: Coefficient = 0.0
    provenance: Provenance

    def to_profile(self) -> Profile:
        return Profile(
            model=self.model,
            accelerator=self.accelerator,
            engine=self.engine,
            prefill_per_batch_token_s=self.prefill.per_batch_token_s,
            prefill_per_request_s=self.prefill.per_request_s,
            prefill_per_token_s=self.prefill.per_token_s,
            prefill_base_s=self.prefill.base_s,
            decode_per_context_token_s=self.decode.per_context_token_s,
            decode_per_request_s=self.decode.per_request_s,
            decode_base_s=self.decode.base_s,
            kv_capacity_tokens=self.kv_capacity_tokens,
            max_running=self.max_running,
            context_tokens=self.context_tokens,
            load_s=self.load_s,
            chars_per_token=self.chars_per_token,
            latency_s=self.latency_s,
            prefill_per_attended_token_s=self.prefill.per_attended_token_s,
            weights_read_s=self.decode.weights_read_s,
            kv_read_token_s=self.decode.kv_read_token_s,
            step_tokens=self.step_tokens,
            block_tokens=self.block_tokens,
            host_capacity_tokens=self.host.capacity_tokens,
            host_load_token_s=self.host.load_token_s,
            kv_token_bytes=self.kv_token_bytes,
            fetch_token_s=self.fetch_token_s,
        )

    @classmethod
    def of(cls, profile: Profile, provenance: Provenance) -> ProfileFile:
        """The file for `profile`."""
        return cls(
            model=profile.model,
            accelerator=profile.accelerator,
            engine=profile.engine,
            prefill=PrefillSection(
                per_batch_token_s=profile.prefill_per_batch_token_s,
                per_request_s=profile.prefill_per_request_s,
                per_token_s=profile.prefill_per_token_s,
                base_s=profile.prefill_base_s,
                per_attended_token_s=profile.prefill_per_attended_token_s,
            ),
            decode=DecodeSection(
                per_context_token_s=profile.decode_per_context_token_s,
                per_request_s=profile.decode_per_request_s,
                base_s=profile.decode_base_s,
                weights_read_s=profile.weights_read_s,
                kv_read_token_s=profile.kv_read_token_s,
            ),
            kv_capacity_tokens=profile.kv_capacity_tokens,
            max_running=profile.max_running,
            context_tokens=profile.context_tokens,
            load_s=profile.load_s,
            step_tokens=profile.step_tokens,
            block_tokens=profile.block_tokens,
            host=HostSection(
                capacity_tokens=profile.host_capacity_tokens,
                load_token_s=profile.host_load_token_s,
            ),
            kv_token_bytes=profile.kv_token_bytes,
            fetch_token_s=profile.fetch_token_s,
            chars_per_token=profile.chars_per_token,
            latency_s=profile.latency_s,
            provenance=provenance,
        )
