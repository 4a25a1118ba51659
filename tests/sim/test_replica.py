"""The engine that skips from one change to the next is the one that makes every step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.builders import a_profile

from cato.core.profile import Profile
from cato.sim.replica import MAX_BATCHED_TOKENS, FactKind, Sequence, SimReplica

# Every time is a multiple of a power of two, so that sums are exact in any order.
DYADIC = replace(
    a_profile(),
    prefill_per_batch_token_s=2.0**-12,
    prefill_per_request_s=2.0**-8,
    prefill_per_token_s=2.0**-13,
    prefill_base_s=2.0**-6,
    decode_per_context_token_s=2.0**-16,
    decode_per_request_s=2.0**-10,
    decode_base_s=2.0**-7,
)
# Where contexts are long: what a step reads and what it computes hide behind each other.
ROOFLINE = replace(
    DYADIC,
    prefill_per_attended_token_s=2.0**-19,
    weights_read_s=2.0**-7,
    kv_read_token_s=2.0**-13,
)
TICK_S = 2.0**-9
ROOMY, TIGHT_KV = 100_000, 60


@dataclass(frozen=True, slots=True)
class Setup:
    profile: Profile
    max_running: int = 4
    chunk_tokens: int | None = None
    report_steps: int = 0
    prefill_together: bool = True
    prompt_cap_tokens: int = 0

    def replica(self) -> SimReplica:
        return SimReplica(
            self.profile,
            self.max_running,
            self.chunk_tokens,
            self.report_steps,
            self.prefill_together,
            prompt_cap_tokens=self.prompt_cap_tokens,
        )


@dataclass(frozen=True, slots=True)
class Submit:
    at_s: float
    id: str
    prompt: int = 10
    output: int = 10
    priority: int = 0
    generated: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    at_s: float
    id: str


Order = Submit | Cancel
# Time, what happened, and to whom; a report lists the tokens of all.
Told = tuple[float, str, object]


@dataclass(slots=True, eq=False)
class Job:
    """A request in the plain engine."""

    submit: Submit
    number: int
    generated: int
    processed: int = 0
    has_begun: bool = False
    is_cancelled: bool = False

    @property
    def whole(self) -> int:
        """Its prompt, with what was generated before it had to be processed again."""
        return self.submit.prompt + self.generated


@dataclass(slots=True)
class PlainEngine:
    """The definition: one step after the other, everything looked at again at each."""

    setup: Setup
    orders: list[Order]
    told: list[Told] = field(default_factory=list)
    waiting: list[Job] = field(default_factory=list)
    prefilling: list[Job] = field(default_factory=list)
    decoding: list[Job] = field(default_factory=list)
    decode_steps: int = 0
    reported_steps: int = 0
    busy_s: float = 0.0
    most_shared: int = 0
    # Of the step that runs.
    under_way: list[tuple[Job, int]] = field(default_factory=list)
    decodes: bool = True

    @property
    def everyone(self) -> list[Job]:
        return self.decoding + self.prefilling + self.waiting

    @property
    def running(self) -> list[Job]:
        return self.decoding + self.prefilling

    def context(self) -> int:
        return sum(j.whole for j in self.decoding) + sum(j.processed for j in self.prefilling)

    def run(self) -> None:
        now_s, orders = 0.0, list(self.orders)
        while orders or self.everyone:
            if not self.everyone:
                now_s = max(now_s, orders[0].at_s)
                self.obey(orders, now_s)
            for jobs in (self.waiting, self.prefilling, self.decoding):
                jobs[:] = [j for j in jobs if not j.is_cancelled]
            self.let_in()
            self.make_room()
            step_s = self.step()
            if step_s is None:
                continue
            now_s += step_s
            self.busy_s += step_s
            self.obey(orders, now_s)
            self.end_step(now_s)

    def obey(self, orders: list[Order], now_s: float) -> None:
        """What comes while a step runs joins, or leaves, at its end."""
        while orders and orders[0].at_s <= now_s:
            order = orders.pop(0)
            if isinstance(order, Submit):
                number = 1 + max((j.number for j in self.everyone), default=0)
                self.waiting.append(Job(order, number, order.generated))
                continue
            for job in self.everyone:
                if job.submit.id == order.id and not job.is_cancelled:
                    job.is_cancelled = True
                    break

    def let_in(self) -> None:
        while self.waiting and len(self.running) < self.setup.max_running:
            first = min(self.waiting, key=lambda j: (j.submit.priority, j.number))
            claimed = sum(j.whole for j in [*self.running, first])
            if claimed > self.setup.profile.kv_capacity_tokens and self.running:
                return
            self.waiting.remove(first)
            self.prefilling.append(first)

    def make_room(self) -> None:
        while len(self.running) > 1:
            tokens = self.context() + len(self.decoding)
            if self.setup.chunk_tokens is not None:
                tokens += sum(n for _, n in self.prompts())
            if tokens <= self.setup.profile.kv_capacity_tokens:
                return
            last = (self.prefilling or self.decoding).pop()
            last.processed = 0
            last.number = min([0, *(j.number for j in self.everyone)]) - 1
            self.waiting.append(last)

    def prompts(self) -> list[tuple[Job, int]]:
        """Which prompt tokens the next step processes."""
        if self.setup.chunk_tokens is None:
            together: list[tuple[Job, int]] = []
            for job in self.prefilling:
                tokens = sum(n for _, n in together) + job.whole
                if together and (tokens > MAX_BATCHED_TOKENS or not self.setup.prefill_together):
                    break
                together.append((job, job.whole))
            return together
        left = max(1, self.setup.chunk_tokens - len(self.decoding))
        cap = self.setup.prompt_cap_tokens if len(self.everyone) > 1 else 0
        chunk = []
        for job in self.prefilling:
            tokens = min(left, cap or left, job.whole - job.processed)
            left -= tokens
            if tokens:
                chunk.append((job, tokens))
        return chunk

    def step(self) -> float | None:
        """Its duration; it is under way then."""
        p, batch, prompts = self.setup.profile, len(self.decoding), self.prompts()
        if not prompts and not batch:
            return None
        tokens = sum(n for _, n in prompts)
        attended = sum(n * (job.processed + n / 2) for job, n in prompts)
        ended = sum(job.processed + n == job.whole for job, n in prompts)
        self.under_way = prompts
        self.decodes = not prompts or self.setup.chunk_tokens is not None
        return p.step_s(batch if self.decodes else 0, self.context(), tokens, ended, attended)

    def end_step(self, now_s: float) -> None:
        facts: list[tuple[str, Job]] = []
        if self.decodes and self.decoding:
            self.decode_steps += 1
            for job in list(self.decoding):
                job.generated += 1
                if job.generated >= job.submit.output:
                    self.decoding.remove(job)
                    facts.append(("done", job))
        for job, tokens in self.under_way:
            job.processed += tokens
            if job.processed < job.whole:
                continue
            self.prefilling.remove(job)
            job.generated, job.processed = job.generated + 1, 0
            if not job.has_begun:
                facts.append(("first", job))
            job.has_begun = True
            if not self.decoding:
                self.reported_steps = self.decode_steps
            if job.generated < job.submit.output:
                self.decoding.append(job)
            else:
                facts.append(("done", job))
        if len(self.running) > 1:
            self.most_shared = max(self.most_shared, self.context())
        for what, job in facts:
            if not job.is_cancelled:
                self.told.append((now_s, what, (job.submit.id, job.generated)))
        every = self.setup.report_steps
        if every and self.decode_steps - self.reported_steps >= every and self.decoding:
            self.reported_steps = self.decode_steps
            tokens_of = {j.submit.id: j.generated for j in self.everyone if not j.is_cancelled}
            self.told.append((now_s, "report", tokens_of))


def skipping(setup: Setup, orders: list[Order]) -> tuple[list[Told], SimReplica]:
    """What `SimReplica` tells of the same orders, in the same words."""
    engine, told, left = setup.replica(), [], list(orders)
    while left or engine.wake_s < math.inf:
        if left and left[0].at_s <= engine.wake_s:
            order = left.pop(0)
            if isinstance(order, Submit):
                sequence = Sequence(
                    order.id, order.prompt, order.output, order.priority, order.generated
                )
                engine.submit(order.at_s, sequence)
            else:
                engine.cancel(order.at_s, order.id)
            continue
        now_s = engine.wake_s
        facts, is_due = engine.wake(now_s)
        for kind, s in facts:
            what = "first" if kind is FactKind.FIRST_TOKEN else "done"
            told.append((now_s, what, (s.id, s.generated)))
        if is_due:
            told.append((now_s, "report", dict(engine.tokens(now_s))))
        engine.go_on(now_s)
    return told, engine


def in_order(told: list[Told]) -> list[Told]:
    """What happens at one instant may be told in any order."""
    return sorted(told, key=lambda t: (t[0], t[1], str(t[2])))


def stepping(setup: Setup, orders: list[Order]) -> PlainEngine:
    engine = PlainEngine(setup, orders)
    engine.run()
    return engine


setups = st.builds(
    Setup,
    st.builds(
        lambda profile, n: replace(profile, kv_capacity_tokens=n),
        st.sampled_from([DYADIC, ROOFLINE]),
        st.sampled_from([ROOMY, TIGHT_KV]),
    ),
    st.integers(1, 5),
    st.sampled_from([None, None, 1, 4, 16]),
    st.sampled_from([0, 0, 1, 7]),
    st.booleans(),
    st.sampled_from([0, 0, 3]),
)


@st.composite
def schedules(draw: st.DrawFn) -> list[Order]:
    """Submits and cancels, in order of time; an id comes again only after it was cancelled."""
    now, orders, held = 0, [], set[str]()
    for _ in range(draw(st.integers(1, 14))):
        now += draw(st.sampled_from([0, 0, 1, 3, 8, 20, 60, 200]))
        id = draw(st.sampled_from("abcdef"))
        if id in held:
            orders.append(Cancel(now * TICK_S, id))
            held.discard(id)
            continue
        held.add(id)
        output = draw(st.integers(1, 45))
        generated = draw(st.sampled_from([0, 0, 0, output // 2]))
        priority = draw(st.sampled_from([0, 0, 1, 2]))
        prompt = draw(st.sampled_from([1, 2, 5, 17, 40]))
        orders.append(Submit(now * TICK_S, id, prompt, output, priority, generated))
    return orders


@settings(max_examples=250)
@given(setups, schedules())
def test_stretches_tell_what_single_steps_tell(setup: Setup, orders: list[Order]) -> None:
    plain = stepping(setup, orders)
    told, engine = skipping(setup, orders)
    assert in_order(told) == in_order(plain.told)
    assert engine.busy_s == plain.busy_s
    assert engine.held == 0
    assert engine._context_tokens == 0
    # The token that ends a prompt is counted one step before its place is needed.
    assert plain.most_shared <= setup.profile.kv_capacity_tokens + setup.max_running


def test_a_stretch_of_any_floats_ends_when_its_steps_end() -> None:
    """Constants that are not dyadic: the same but for rounding."""
    profile = replace(
        DYADIC,
        prefill_per_batch_token_s=0.12e-3,
        prefill_base_s=25e-3,
        decode_per_context_token_s=0.65e-6,
        decode_per_request_s=0.45e-3,
        decode_base_s=21e-3,
        kv_capacity_tokens=900,
    )
    rng = np.random.default_rng(8)
    at_s = np.cumsum(rng.exponential(0.4, 60)).tolist()
    tokens = rng.integers(1, 300, (60, 2)).tolist()
    orders: list[Order] = [
        Submit(t, f"s{i}", prompt, output)
        for i, (t, (prompt, output)) in enumerate(zip(at_s, tokens, strict=True))
    ]
    for chunk_tokens in (None, 64):
        setup = Setup(profile, 8, chunk_tokens)
        told, engine = skipping(setup, orders)
        plain = stepping(setup, orders)
        assert [t[1:] for t in told] == [t[1:] for t in plain.told]
        assert [t[0] for t in told] == pytest.approx([t[0] for t in plain.told], rel=1e-9)
        assert engine.busy_s == pytest.approx(plain.busy_s)
        assert engine.preemptions > 0
