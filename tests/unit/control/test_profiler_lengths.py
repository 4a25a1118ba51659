"""Beliefs about output lengths: honest when few were seen, when prompts tell, and when cut."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_kit import MODEL, NODE, TASK, a_receipt, a_sample, an_execution, facts

from cato.control.fitting import MOST_KEYS, most_urgent
from cato.core.errors import InputError
from cato.core.length import LengthBelief
from cato.core.receipt import Excuse
from cato.estimators.censoring import completed
from cato.estimators.output_lengths import (
    KEPT_SAMPLES,
    MIN_FOREST_SAMPLES,
    MIN_SAMPLES,
    STOPPED,
    LengthHistory,
    LengthSample,
    OutputLengths,
    refitted,
    samples_of,
)
from cato.estimators.prompt_features import Asked, features_of

KEY = (TASK, NODE, MODEL)
NO_FEATURES = features_of(Asked(100))
AMPLE = 100_000


def learnt(samples: Sequence[LengthSample], known: OutputLengths | None = None) -> OutputLengths:
    history, known = LengthHistory(), known or OutputLengths()
    history.add(samples)
    return refitted(known, history.taken(history.due(known)), known.version + 1, seed=0)


def belief_of(lengths: OutputLengths, asked: Asked, limit: int = AMPLE) -> LengthBelief:
    found = lengths.belief(*KEY, features_of(asked), limit)
    assert found is not None
    return found


def belief(lengths: OutputLengths, *, prompt: int = 100, limit: int = AMPLE) -> LengthBelief:
    return belief_of(lengths, Asked(prompt), limit)


def bound(lengths: OutputLengths, *, prompt: int = 100, limit: int = AMPLE) -> float:
    return belief(lengths, prompt=prompt, limit=limit).left_quantile(0.9, 0)


def drawn(
    n: int, length_of: Callable[[random.Random, int], int], seed: int = 1
) -> list[LengthSample]:
    """Samples with prompts of 10 to 1,000 tokens; the length is drawn given the prompt."""
    rng = random.Random(seed)
    prompts = [rng.randint(10, 1000) for _ in range(n)]
    return [a_sample(length_of(rng, prompt), prompt=prompt) for prompt in prompts]


# Few samples


def test_nothing_is_believed_of_a_node_seen_less_than_nine_times() -> None:
    samples = [a_sample(n + 1) for n in range(MIN_SAMPLES)]
    assert learnt(samples[:-1]).belief(*KEY, NO_FEATURES, AMPLE) is None
    assert learnt(samples).belief(*KEY, NO_FEATURES, AMPLE) is not None
    assert OutputLengths().belief(*KEY, NO_FEATURES, AMPLE) is None


def test_before_a_forest_the_bound_is_a_quantile_of_what_was_seen() -> None:
    lengths = learnt([a_sample(n) for n in range(1, 101)])
    assert lengths.keys[KEY].forest is None
    assert bound(lengths) == pytest.approx(91, abs=2)
    assert belief(lengths).left_quantile(0.5, 0) == pytest.approx(50, abs=3)


@given(st.lists(st.integers(1, 500), min_size=9, max_size=40), st.integers(1, 600))
def test_no_belief_exceeds_the_limit_of_the_output(tokens: list[int], limit: int) -> None:
    points = belief(learnt([a_sample(n) for n in tokens]), limit=limit).points
    assert max(points) <= limit
    assert list(points) == sorted(points)


def test_nodes_models_and_tasks_are_learnt_apart() -> None:
    short = [a_sample(5, task="short") for _ in range(20)]
    lengths = learnt([*short, *(a_sample(500) for _ in range(20))])
    assert bound(lengths) == 500.0
    found = lengths.belief(short[0].task, NODE, MODEL, NO_FEATURES, AMPLE)
    assert found is not None
    assert found.left_quantile(0.9, 0) == 5.0


# Forest


def test_a_forest_is_grown_once_there_are_enough_and_the_prompt_tells_the_length() -> None:
    samples = drawn(MIN_FOREST_SAMPLES, lambda rng, prompt: prompt + rng.randint(0, prompt // 5))
    assert learnt(samples[:-1]).keys[KEY].forest is None
    lengths = learnt(samples)
    assert lengths.keys[KEY].forest is not None
    assert bound(lengths, prompt=100) < 250 < 700 < bound(lengths, prompt=900) < 1300
    assert bound(lengths, prompt=900, limit=64) == 64.0


def test_a_forest_bounds_nine_of_ten_new_answers() -> None:
    def length(rng: random.Random, prompt: int) -> int:
        return 1 + int(prompt * rng.lognormvariate(0.0, 0.4))

    lengths = learnt(drawn(1_500, length))
    assert lengths.keys[KEY].forest is not None
    new = drawn(1_000, length, seed=2)
    covered = [s.output_tokens <= bound(lengths, prompt=s.prompt_tokens) for s in new]
    assert 0.87 <= np.mean(covered) <= 0.94


def test_where_the_prompt_says_nothing_plain_quantiles_stay() -> None:
    kept = [
        learnt(
            drawn(600, lambda rng, _: 1 + int(rng.expovariate(0.01)), seed=seed)
        ).keys[KEY].forest is None
        for seed in range(5)
    ]  # fmt: skip
    assert all(kept)


def test_a_belief_is_the_same_after_it_was_sent_and_mapped_read_only() -> None:
    samples = drawn(500, lambda rng, prompt: prompt + rng.randint(0, 20))
    lengths = learnt([*samples, *(a_sample(7, task="plain") for _ in range(9))])
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(lengths, protocol=5, buffer_callback=buffers.append)
    mapped: OutputLengths = pickle.loads(sent, buffers=[bytes(b) for b in buffers])
    forest = mapped.keys[KEY].forest
    assert forest is not None
    assert not forest.threshold.flags.writeable
    mapped.warm_up()
    for prompt in (10, 300, 5_000):
        assert belief(mapped, prompt=prompt) == belief(lengths, prompt=prompt)
    assert mapped.version == lengths.version


def test_a_forest_learns_from_what_is_asked_where_the_prompts_length_says_nothing() -> None:
    rng = random.Random(1)
    asked = [Asked(rng.randint(10, 1000), role=rng.choice(("user", "tool"))) for _ in range(500)]
    samples = [
        a_sample(
            rng.randint(10, 20) if a.role == "tool" else rng.randint(400, 500),
            prompt=a.prompt_tokens,
            features=features_of(a),
        )
        for a in asked
    ]
    lengths = learnt(samples)
    assert lengths.keys[KEY].forest is not None
    bounds = [
        belief_of(lengths, Asked(300, role=role)).left_quantile(0.8, 0) for role in ("tool", "user")
    ]
    assert bounds[0] <= 20 < 400 <= bounds[1]


def test_samples_from_before_features_count_as_calls_of_which_only_the_prompt_is_known() -> None:
    old = drawn(MIN_FOREST_SAMPLES, lambda rng, prompt: prompt + rng.randint(0, 5))
    new = [replace(s, features=features_of(Asked(s.prompt_tokens))) for s in old]
    assert belief(learnt(old), prompt=300) == belief(learnt(new), prompt=300)


# Learning again


def test_a_key_is_learnt_anew_when_a_tenth_has_come_on_top_and_others_are_left() -> None:
    history = LengthHistory()
    history.add([a_sample(10) for _ in range(100)])
    history.add([a_sample(10, task="other") for _ in range(100)])
    lengths = refitted(OutputLengths(), history.taken(history.due(OutputLengths())), 1, seed=0)
    assert history.due(lengths) == {}
    history.add([a_sample(90) for _ in range(9)])
    assert history.due(lengths) == {}
    history.add([a_sample(90)])
    due = history.due(lengths)
    assert due == {KEY: 110}
    newer = refitted(lengths, history.taken(due), 2, seed=0)
    assert belief(newer).points[-1] == 90.0 > belief(lengths).points[-1]
    other = next(k for k in lengths.keys if k != KEY)
    assert newer.keys[other] is lengths.keys[other]
    assert newer.version == 2


def test_a_fit_takes_some_names_and_none_waits_for_ever() -> None:
    history, lengths = LengthHistory(), OutputLengths()
    names = [f"task {n}" for n in range(2 * MOST_KEYS + 1)]
    for name in names:
        history.add([a_sample(n, task=name) for n in range(1, 21)])
    for known in (MOST_KEYS, 2 * MOST_KEYS, len(names)):
        fit = most_urgent(history.due(lengths), lengths)
        assert len(fit) <= MOST_KEYS
        lengths = refitted(lengths, history.taken(fit), lengths.version + 1, seed=0)
        assert len(lengths.keys) == known
        history.add([a_sample(5, task=name) for name in names[:MOST_KEYS] for _ in range(5)])
    assert len(most_urgent(history.due(lengths), lengths)) == MOST_KEYS


def test_only_the_newest_samples_are_learnt_from() -> None:
    history = LengthHistory()
    history.add([a_sample(900) for _ in range(100)])
    history.add([a_sample(10) for _ in range(KEPT_SAMPLES)])
    (outputs, seen) = history.taken(history.due(OutputLengths()))[KEY]
    assert set(outputs.tokens.tolist()) == {10}
    assert (len(outputs), seen) == (KEPT_SAMPLES, KEPT_SAMPLES + 100)


def test_what_was_learnt_earlier_goes_in_front_of_what_has_come_since() -> None:
    history = LengthHistory()
    history.add([a_sample(3)])
    history.restore([a_sample(n) for n in range(10, 20)])
    (outputs, _) = history.taken(history.due(OutputLengths()))[KEY]
    assert outputs.tokens.tolist() == [*range(10, 20), 3]


# What counts as a sample


def test_outputs_count_that_ended_by_themselves_at_their_limit_or_at_a_deadline() -> None:
    calls = [
        facts(tokens=n, reason=r, features=(0.5, n))
        for n, r in ((5, "stop"), (6, "length"), (7, "abort"))
    ]
    receipt = a_receipt(
        *(an_execution(llm=f) for f in calls),
        an_execution(llm=facts(tokens=8, reason=""), status="cancelled"),
        an_execution(llm=facts(tokens=9, reason=""), status="absent"),
        an_execution(llm=facts(tokens=0, reason=""), status="cancelled"),
        an_execution("lookup"),
        an_execution(llm=facts(tokens=0)),
    )
    found = samples_of(receipt)
    assert [(s.output_tokens, s.finish_reason) for s in found] == [
        (5, "stop"),
        (6, "length"),
        (8, STOPPED),
        (9, STOPPED),
        (1, "stop"),
    ]
    assert [s.features for s in found] == [(0.5, 5), (0.5, 6), (), (), ()]


@pytest.mark.parametrize("excuse", [Excuse.SUPERSEDED, Excuse.CLIENT_LEFT])
def test_outputs_that_their_client_gave_up_tell_nothing(excuse: Excuse) -> None:
    stopped = an_execution(llm=facts(tokens=8, reason=""), status="cancelled")
    ended = an_execution(llm=facts(tokens=5))
    given_up = replace(a_receipt(ended, stopped, status="cancelled"), excuse=excuse)
    assert [s.output_tokens for s in samples_of(given_up)] == [5]


def test_the_sum_of_several_answers_to_one_request_is_no_length() -> None:
    one, four = facts(tokens=50), facts(tokens=200, calls=4)
    found = samples_of(a_receipt(an_execution(llm=one), an_execution(llm=four)))
    assert [s.output_tokens for s in found] == [50]


# Cut outputs


def test_cut_outputs_are_spread_over_the_longer_ones() -> None:
    lengths = [2] * 100 + [4] * 100 + [6] * 100 + [8] * 100
    ended = [n != 4 for n in lengths]
    out = completed(lengths, ended)
    assert np.array_equal(out[np.array(ended)], np.array(lengths)[np.array(ended)])
    cut = out[~np.array(ended)].tolist()
    assert (cut.count(6), cut.count(8)) == (pytest.approx(50, abs=1), pytest.approx(50, abs=1))


def test_a_bound_that_knows_of_the_cuts_holds_under_a_wider_limit() -> None:
    rng = random.Random(3)
    true = [1 + int(rng.expovariate(0.01)) for _ in range(4_000)]
    limits = [rng.choice([50, 400, 2_000]) for _ in true]
    samples = [
        a_sample(min(n, limit), reason="length" if n > limit else "stop")
        for n, limit in zip(true, limits, strict=True)
    ][:KEPT_SAMPLES]
    right = float(np.quantile(true, 0.9))
    assert bound(learnt(samples)) == pytest.approx(right, rel=0.1)
    left_out = learnt([s for s in samples if s.finish_reason == "stop"])
    as_ended = learnt([a_sample(s.output_tokens) for s in samples])
    assert bound(left_out) < 0.9 * right
    assert bound(as_ended) < 0.9 * right


@pytest.mark.parametrize("seed", range(5))
def test_lengths_are_found_although_a_deadline_stops_the_long_ones(seed: int) -> None:
    rng = random.Random(seed)
    true = [1 + int(rng.lognormvariate(5.5, 0.8)) for _ in range(KEPT_SAMPLES)]
    receipts = []
    for n in true:
        most = rng.randint(200, 600)  # what an engine that is more or less busy writes by then
        is_late = n > most
        call = facts(tokens=min(n, most), reason="" if is_late else "stop")
        node = an_execution(llm=call, status="cancelled" if is_late else "done")
        receipts.append(a_receipt(node, status="deadline_exceeded" if is_late else "done"))
    found = learnt([s for r in receipts for s in samples_of(r)])
    whole = [n for n, r in zip(true, receipts, strict=True) if r.status == "done"]
    for q in (0.5, 0.8):
        right, short = np.quantile(true, q), np.quantile(whole, q)
        assert short < 0.85 * right
        assert belief(found).left_quantile(q, 0) == pytest.approx(right, rel=0.1)


def test_outputs_that_were_all_stopped_give_no_belief() -> None:
    stopped = [a_sample(8, reason=STOPPED) for _ in range(50)]
    assert learnt(stopped).keys == {}
    ended = [a_sample(20) for _ in range(MIN_SAMPLES)]
    assert set(learnt([*ended, *stopped]).keys) == {KEY}
    history = LengthHistory()
    history.add(ended[1:])
    history.restore(ended[:1])
    assert set(history.due(OutputLengths())) == {KEY}


def test_when_all_were_cut_only_the_limit_bounds_the_next() -> None:
    lengths = learnt([a_sample(16, reason="length") for _ in range(30)])
    assert set(belief(lengths, limit=16).points) == {16.0}
    assert min(belief(lengths, limit=1_000).points) > 16.0


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=60))
def test_a_cut_output_is_longer_than_its_cut_and_an_ended_one_is_left(
    pairs: list[tuple[int, bool]],
) -> None:
    lengths, ended = [n for n, _ in pairs], [e for _, e in pairs]
    out = completed(lengths, ended).tolist()
    assert out == completed(lengths, ended).tolist()
    for n, has_ended, full in zip(lengths, ended, out, strict=True):
        assert full == n if has_ended else full > n


def test_lengths_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="less than 1 output token"):
        completed([0], [True])
    with pytest.raises(InputError, match="do not pair"):
        completed([1, 2], [True])
