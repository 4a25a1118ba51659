"""Measured service times of one model on one accelerator with one engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cato.core.prefix_cache import BLOCK_TOKENS
from cato.core.wide import wide_tokens

REFERENCE_CHARS_PER_TOKEN = 3.5
"""`chars_per_token` of the vocabularies to which the estimates of `cato.core.wide` and
`cato.wire.counting` are fitted."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a step of the engine takes, in seconds and tokens. One law for planning, the simulator
    and the simulated engine (`step_s`), fitted by `cato profile`:

    step = base + decode_per_request_s · b + decode_per_context_token_s · held
           + prefill_per_request_s · (prompts that end) + max(reads, computation)
    reads       = weights_read_s + kv_read_token_s · held
    computation = prompt_token_s · tokens + prefill_per_attended_token_s · attended

    with b decoding requests, `held` tokens in the KV cache of what runs, `tokens` processed in the
    step and `attended` the positions before each of them, added up. Base is `decode_base_s`,
    `prefill_base_s` in a step without decoding, the larger of both in a mixed one. `latency_s` is
    what a request spends outside the engine's steps (network, server, tokenizer): it delays that
    request and no other.

    Where no weights are read (0 in profiles of short contexts) the law is linear (SLO-SA, section
    "latency model"), and `decode_per_request_s` is all that a decoding request costs. Otherwise its
    token counts among the `tokens`, hidden behind the reads until the batch is large.

    `step_tokens`: prompt tokens of one step of the engine that was measured (0: no limit), and
    `block_tokens`: tokens of a block of its KV cache, of which whole ones serve later prompts. What
    leaves the KV cache stays in the host's memory as far as `host_capacity_tokens` go (0: there is
    none), and comes back at `host_load_token_s` a token. `kv_token_bytes`: size of a token there
    and in the cache (0: unknown). `fetch_token_s`: what a token costs that comes from another
    replica's cache or host memory (0: none can; no real engine is started with it).
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
    chars_per_token: float = REFERENCE_CHARS_PER_TOKEN
    latency_s: float = 0.0
    prefill_per_attended_token_s: float = 0.0
    weights_read_s: float = 0.0
    kv_read_token_s: float = 0.0
    step_tokens: int = 0
    block_tokens: int = BLOCK_TOKENS
    host_capacity_tokens: int = 0
    host_load_token_s: float = 0.0
    kv_token_bytes: int = 0
    fetch_token_s: float = 0.0

    def step_s(
        self,
        batch: int,
        held_tokens: float,
        prompt_tokens: int = 0,
        prompts_ended: int = 0,
        attended: float = 0.0,
    ) -> float:
        """Time of one engine step that mixes pieces of prompts with decoding.

        `batch` requests get a token each, `held_tokens` are in the KV cache, `prompt_tokens` are
        processed beside them, and `attended` is the sum of the positions before each of these. A
        prompt's fixed cost counts in the step of its last piece, which also produces its first
        token.
        """
        base_s = self.decode_base_s if batch else 0.0
        if prompt_tokens and self.prefill_base_s > base_s:
            base_s = self.prefill_base_s
        base_s += self.decode_per_request_s * batch + self.prefill_per_request_s * prompts_ended
        if batch:
            base_s += self.decode_per_context_token_s * held_tokens
        token_s = self.prefill_per_batch_token_s + self.prefill_per_token_s
        if not (self.weights_read_s or self.prefill_per_attended_token_s or self.kv_read_token_s):
            return base_s + token_s * prompt_tokens
        tokens = prompt_tokens
        if self.weights_read_s:
            tokens += batch
            attended += held_tokens * (batch > 0)
        computed_s = token_s * tokens + self.prefill_per_attended_token_s * attended
        read_s = self.weights_read_s + self.kv_read_token_s * held_tokens
        if computed_s > read_s:
            return base_s + computed_s
        return base_s + read_s

    @property
    def is_linear(self) -> bool:
        """Whether it has none of the terms for long contexts."""
        return not (
            self.weights_read_s or self.prefill_per_attended_token_s or self.kv_read_token_s
        )

    @property
    def prompt_token_s(self) -> float:
        """Time of each additional prompt token."""
        return self.prefill_per_batch_token_s + self.prefill_per_token_s

    def prefill_s(self, prompt_tokens: int, batch: int = 1, cached_tokens: int = 0) -> float:
        """Time to process `batch` prompts of `prompt_tokens` each, together; never negative.

        `cached_tokens` of each are in the KV cache, and the others attend to them. Prompts beyond
        `step_tokens` take several steps; each reads the weights and the KV cache so far.
        """
        tokens = prompt_tokens - cached_tokens
        time_s = (
            self.prefill_per_batch_token_s * batch * tokens
            + self.prefill_per_request_s * batch
            + self.prefill_per_token_s * tokens
        )
        steps = 1
        if self.step_tokens and batch * tokens > self.step_tokens:
            steps = -(-batch * tokens // self.step_tokens)
        if self.weights_read_s or self.prefill_per_attended_token_s or self.kv_read_token_s:
            attended = batch * tokens * (cached_tokens + tokens / 2)
            time_s += self.prefill_per_attended_token_s * attended
            held = prompt_tokens if steps == 1 else cached_tokens + tokens / 2
            read_s = self.weights_read_s + self.kv_read_token_s * batch * held
            time_s = max(time_s, steps * read_s)
        time_s += steps * self.prefill_base_s
        return time_s if time_s > 0.0 else 0.0

    def decode_step_s(self, batch: int, context_tokens: float = 0.0) -> float:
        """Time of one decode step: one more token for each of `batch` running requests.

        Equals `step_s` of a batch without prompts; written out because routers call it constantly.
        """
        held = batch * context_tokens
        time_s = (
            (self.decode_per_context_token_s + self.kv_read_token_s) * held
            + self.decode_per_request_s * batch
            + (self.decode_base_s + self.weights_read_s)
        )
        if self.weights_read_s:  # same as in `beyond_reads_s`
            computed_s = (
                self.prefill_per_batch_token_s + self.prefill_per_token_s
            ) * batch + self.prefill_per_attended_token_s * held
            beyond_s = computed_s - (self.weights_read_s + self.kv_read_token_s * held)
            if beyond_s > 0.0:
                time_s += beyond_s
        return time_s if time_s > 0.0 else 0.0

    def beyond_reads_s(self, batch: int, held_tokens: float) -> float:
        """By how much a decode step's computation exceeds its reads, if it reads the weights."""
        computed_s = self.prompt_token_s * batch + self.prefill_per_attended_token_s * held_tokens
        return max(0.0, computed_s - self.read_s(held_tokens))

    def read_s(self, held_tokens: float) -> float:
        """Least time of a step beyond its base: reading weights and KV cache."""
        return self.weights_read_s + self.kv_read_token_s * held_tokens

    def decodes_evenly(self, batch: int, held_tokens: float) -> bool:
        """Whether each decode step takes `context_token_s * batch` longer than the one before.

        True if reads take longer than computation, now and as contexts grow.
        """
        if not self.weights_read_s:
            return True
        if self.prefill_per_attended_token_s > self.kv_read_token_s:
            return False
        return not self.beyond_reads_s(batch, held_tokens)

    def prompt_s(self, prompt_tokens: int, cached_tokens: int, usable_tokens: int) -> float:
        """Time of a prompt with `cached_tokens` here that fetches the rest of the `usable` ones."""
        fetch_s = self.fetch_token_s * (usable_tokens - cached_tokens)
        return fetch_s + self.prefill_s(prompt_tokens, 1, usable_tokens)

    @property
    def step_base_s(self) -> float:
        """Time of a decode step, whatever its batch."""
        return self.decode_base_s + self.weights_read_s

    @property
    def context_token_s(self) -> float:
        """Time of a decode step per token of context."""
        return self.decode_per_context_token_s + self.kv_read_token_s

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
        """The same profile with service times scaled by `factor`; load times stay."""
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
            host_load_token_s=factor * self.host_load_token_s,
            fetch_token_s=factor * self.fetch_token_s,
        )

    @property
    def typical_call_s(self) -> float:
        """A lone call with 300 prompt and 64 output tokens, for comparing speeds."""
        return self.service_s(300, 64)

    def count_tokens(self, text: str) -> int:
        """Estimated tokens of `text`; exact counts come back with the engine's answer.

        Characters outside ASCII count as those of code with as many tokens.
        """
        chars = float(len(text))
        if not text.isascii():
            wide, tokens = wide_tokens(text.encode("utf-8", "replace"))
            chars += REFERENCE_CHARS_PER_TOKEN * tokens - wide
        return max(1, round(chars / self.chars_per_token))


# For deployments that were never measured: a 7B model on a 32 GB GPU (the simulator's reference
# constants). `cato profile` replaces it with measured values.
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
