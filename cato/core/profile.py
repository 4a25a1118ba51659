"""Measured service times of one model on one accelerator with one engine."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Profile:
    """Linear latency models (SLO-SA, section "latency model"), in seconds and tokens.

    prefill(b, l)      = prefill_per_batch_token_s · b·l + prefill_per_request_s · b
                         + prefill_per_token_s · l + prefill_base_s
    decode step(b, c)  = decode_per_context_token_s · b·c + decode_per_request_s · b + decode_base_s
    with b requests in the batch, l prompt tokens each, c mean context tokens. The decode form has
    no term in c alone: measured, its coefficient is noise. `latency_s` is what a request spends
    outside the engine's steps (network, server, tokenizer): it delays that request and no other.

    Long contexts need three terms more, 0 where they were not measured. A prompt token costs
    `prefill_per_attended_token_s` for each position before it. Every step reads the weights
    (`weights_read_s`) and the KV cache of what runs (`kv_read_token_s` a token); the processing of
    prompt tokens hides behind these reads, or they behind it: the longer of both counts.
    """

    model: str
    accelerator: str
    engine: str
    prefill_per_batch_token_s: float
    prefill_per_request_s: float
    prefill_per_token_s: float
    prefill_base_s: float
    decode_per_context_token_s: float
    decode_per_request_s: float
    decode_base_s: float
    kv_capacity_tokens: int
    max_running: int
    context_tokens: int
    load_s: float
    chars_per_token: float = 3.5
    latency_s: float = 0.0
    prefill_per_attended_token_s: float = 0.0
    weights_read_s: float = 0.0
    kv_read_token_s: float = 0.0

    def prefill_s(self, prompt_tokens: int, batch: int = 1, cached_tokens: int = 0) -> float:
        """Time to process `batch` prompts of `prompt_tokens` each, together; never negative.

        `cached_tokens` of each are in the KV cache: the others attend to them.
        """
        tokens = prompt_tokens - cached_tokens
        time_s = (
            self.prefill_per_batch_token_s * batch * tokens
            + self.prefill_per_request_s * batch
            + self.prefill_per_token_s * tokens
            + self.prefill_base_s
        )
        if self.weights_read_s or self.prefill_per_attended_token_s or self.kv_read_token_s:
            computed_s = time_s - self.prefill_base_s
            computed_s += self.attention_s(batch * tokens * (cached_tokens + tokens / 2))
            time_s = self.prefill_base_s + max(computed_s, self.read_s(batch * prompt_tokens))
        return time_s if time_s > 0.0 else 0.0

    @property
    def is_roofline(self) -> bool:
        """Whether it has any of the terms of long contexts."""
        if self.weights_read_s or self.prefill_per_attended_token_s:
            return True
        return self.kv_read_token_s > 0

    def attention_s(self, attended: float) -> float:
        """Of prompt tokens: `attended` is the sum of the positions that each attends to."""
        return self.prefill_per_attended_token_s * attended

    def read_s(self, held_tokens: float) -> float:
        """What a step takes at least: weights and KV cache are read."""
        return self.weights_read_s + self.kv_read_token_s * held_tokens

    @property
    def step_base_s(self) -> float:
        """Of a decode step, whatever is in it."""
        return self.decode_base_s + self.weights_read_s

    @property
    def context_token_s(self) -> float:
        """Of a decode step, for each token of context."""
        return self.decode_per_context_token_s + self.kv_read_token_s

    def decode_step_s(self, batch: int, context_tokens: float = 0.0) -> float:
        """Time of one decode step: one more token for each of `batch` running requests."""
        time_s = (
            (self.decode_per_context_token_s + self.kv_read_token_s) * batch * context_tokens
            + self.decode_per_request_s * batch
            + (self.decode_base_s + self.weights_read_s)
        )
        return time_s if time_s > 0.0 else 0.0

    def step_s(
        self,
        batch: int,
        held_tokens: float,
        prompt_tokens: int = 0,
        prompts_ended: int = 0,
        attended: float = 0.0,
    ) -> float:
        """Time of one step of an engine that mixes pieces of prompts with decoding.

        `batch` requests get a token each, `held_tokens` are in the KV cache, `prompt_tokens` are
        processed beside them. Its base is shared; what a prompt costs as such
        (`prefill_per_request_s`) comes with the last of its pieces, whose step is also its first
        token's. `attended`: see `attention_s`.
        """
        decode_s = self.decode_per_request_s * batch
        held_s = self.decode_per_context_token_s * held_tokens * (batch > 0)
        base_s = self.decode_base_s if batch else 0.0
        if not prompt_tokens:
            if not batch:
                return base_s + decode_s + held_s
            return (
                base_s
                + decode_s
                + held_s
                + self.weights_read_s
                + self.kv_read_token_s * held_tokens
            )
        prompt_s = prompt_tokens * self.prompt_token_s + prompts_ended * self.prefill_per_request_s
        if self.weights_read_s or self.prefill_per_attended_token_s or self.kv_read_token_s:
            prompt_s = max(prompt_s + self.attention_s(attended), self.read_s(held_tokens))
        return max(base_s, self.prefill_base_s) + decode_s + held_s + prompt_s

    @property
    def prompt_token_s(self) -> float:
        """What each token more of a prompt costs."""
        return self.prefill_per_batch_token_s + self.prefill_per_token_s

    def service_s(
        self, prompt_tokens: int, output_tokens: int, batch: int = 1, cached_tokens: int = 0
    ) -> float:
        """Time from start to last token in a steady batch of `batch`, without queueing."""
        service_s = self.latency_s + self.prefill_s(prompt_tokens, 1, cached_tokens)
        if output_tokens > 1:
            step_s = self.decode_step_s(batch, prompt_tokens + output_tokens / 2)
            service_s += (output_tokens - 1) * step_s
        return service_s

    def first_token_s(self, prompt_tokens: int, batch: int = 1, cached_tokens: int = 0) -> float:
        """Time from start to first token in a batch of `batch`.

        The step that ends the prompt yields it, and a token for each of the others.
        """
        others_s = self.decode_step_s(batch, prompt_tokens) - self.decode_step_s(1, prompt_tokens)
        return self.latency_s + self.prefill_s(prompt_tokens, 1, cached_tokens) + others_s

    def slowed(self, factor: float) -> Profile:
        """With all times of service times `factor`; loading takes as long as before."""
        return replace(
            self,
            prefill_per_batch_token_s=factor * self.prefill_per_batch_token_s,
            prefill_per_request_s=factor * self.prefill_per_request_s,
            prefill_per_token_s=factor * self.prefill_per_token_s,
            prefill_base_s=factor * self.prefill_base_s,
            decode_per_context_token_s=factor * self.decode_per_context_token_s,
            decode_per_request_s=factor * self.decode_per_request_s,
            decode_base_s=factor * self.decode_base_s,
            latency_s=factor * self.latency_s,
            prefill_per_attended_token_s=factor * self.prefill_per_attended_token_s,
            weights_read_s=factor * self.weights_read_s,
            kv_read_token_s=factor * self.kv_read_token_s,
        )

    @property
    def typical_call_s(self) -> float:
        """Alone: 300 prompt tokens, 64 output tokens. For telling the faster of two."""
        return self.service_s(300, 64)

    def count_tokens(self, text: str) -> int:
        """Estimated tokens of `text`; exact counts come back with the engine's answer."""
        return max(1, round(len(text) / self.chars_per_token))


# For a deployment that was never measured: a 7B model on a 32 GB card (the reference constants of
# the simulator). `cato profile` replaces it by what the deployment really does.
UNMEASURED = Profile(
    model="unmeasured",
    accelerator="unmeasured",
    engine="vllm",
    prefill_per_batch_token_s=0.12e-3,
    prefill_per_request_s=0.0,
    prefill_per_token_s=0.0,
    prefill_base_s=25e-3,
    decode_per_context_token_s=0.65e-6,
    decode_per_request_s=0.45e-3,
    decode_base_s=21e-3,
    kv_capacity_tokens=100_000,
    max_running=64,
    context_tokens=32_768,
    load_s=60.0,
)
