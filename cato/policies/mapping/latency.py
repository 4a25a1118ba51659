"""Latency of a request in a batch that runs to its end."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import isfinite

from cato.core.errors import InputError
from cato.core.profile import Profile


@dataclass(frozen=True, slots=True)
class Bilinear:
    """`per_batch_token_s`·b·l + `per_request_s`·b + `per_token_s`·l + `base_s`, in seconds.

    b requests run together and l tokens belong to each: of the prompt in a prefill, of the
    context in a decode step (SLO-SA, section "latency model").
    """

    per_batch_token_s: float
    per_request_s: float
    per_token_s: float
    base_s: float

    def __post_init__(self) -> None:
        if not all(isfinite(c) and c >= 0 for c in astuple(self)):
            raise InputError(
                f"coefficients of a latency must be finite and not negative, found {astuple(self)};"
                " fit them with non-negative least squares"
            )

    def at(self, batch: int, tokens: float) -> float:
        return (
            self.per_batch_token_s * batch * tokens
            + self.per_request_s * batch
            + self.per_token_s * tokens
            + self.base_s
        )

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        return self.per_batch_token_s, self.per_request_s, self.per_token_s, self.base_s


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Prefill of a prompt and one decode step, by batch size.

    The paper's decode step has a term for the context alone, `cato.core.profile.Profile` has none;
    this model covers both.
    """

    prefill: Bilinear
    decode: Bilinear

    def __post_init__(self) -> None:
        if not any(self.prefill.coefficients):
            raise InputError("a prefill that takes no time has no best order; measure a profile")

    @staticmethod
    def of(profile: Profile) -> LatencyModel:
        """The model with the profile's times."""
        return LatencyModel(
            prefill=Bilinear(
                profile.prefill_per_batch_token_s,
                profile.prefill_per_request_s,
                profile.prefill_per_token_s,
                profile.prefill_base_s,
            ),
            decode=Bilinear(
                profile.context_token_s,
                profile.decode_per_request_s,
                0.0,
                profile.step_base_s,
            ),
        )

    def prefill_s(self, batch: int, prompt_tokens: float) -> float:
        """From the start of the batch to the first token, which the prefill itself produces."""
        return self.prefill.at(batch, prompt_tokens)

    def step_s(self, batch: int, prompt_tokens: float, output_tokens: float) -> float:
        """Mean decode step of an answer whose context grows from the prompt to prompt + answer."""
        return self.decode.at(batch, prompt_tokens + output_tokens / 2)

    def execution_s(self, batch: int, prompt_tokens: float, output_tokens: float) -> float:
        """From the start of the batch to the request's last token.

        The sum of the paper's per-token times has a closed form, because they are linear in the
        context. The paper counts one step more: it does not attribute the first token to the
        prefill.
        """
        steps = max(0.0, output_tokens - 1)
        return self.prefill_s(batch, prompt_tokens) + steps * self.step_s(
            batch, prompt_tokens, output_tokens
        )


SLO_SA_TABLE_2 = LatencyModel(
    prefill=Bilinear(0.1e-3, 5.7e-3, 0.01e-3, 43.67e-3),
    decode=Bilinear(0.0002e-3, 0.275e-3, 0.00088e-3, 15.85e-3),
)
"""The constants that the paper fitted to its engine (Table 2, there in milliseconds)."""
