"""Length bounds, speed fits and graph matching: each against its definition."""

from __future__ import annotations

import io
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cato.core.errors import InputError
from cato.core.ids import TaskName
from cato.core.length import LengthBelief
from cato.estimators.calibration import coverage, pinball_loss, reliability
from cato.estimators.dag_match import FROM_USER, DagHistory, SuperGraph, SuperNode
from cato.estimators.gaussian_lengths import GaussianLengths
from cato.estimators.length_bound import (
    LengthFeatures,
    LengthModel,
    LengthRecord,
    MarginalLengths,
)
from cato.estimators.length_features import Answer, Answers, SimilarAnswers
from cato.estimators.length_file import FileModel, from_bytes, to_bytes
from cato.estimators.length_forest import CompiledForest, ForestLengths, ForestSettings
from cato.estimators.survival import quantiles_after
from cato.estimators.usl import (
    SpeedSample,
    UslFit,
    fit_linear,
    fit_logistic,
    fit_usl,
)

COMPLETION, TRANSLATION = TaskName("completion"), TaskName("translation")


def a_record(tokens: int, *values: float, task: TaskName = COMPLETION) -> LengthRecord:
    return LengthRecord(LengthFeatures(task, values), tokens)


def noisy_records(n: int, seed: int, task: TaskName = COMPLETION) -> list[LengthRecord]:
    """Lengths that follow the first feature; the second is noise."""
    rng = np.random.default_rng(seed)
    signal, noise = rng.random(n), rng.random(n)
    lengths = np.ceil((10 + 90 * (signal > 0.5)) * rng.lognormal(0.0, 0.5, n))
    return [
        a_record(int(y), float(s), float(e), task=task)
        for y, s, e in zip(lengths, signal, noise, strict=True)
    ]


ONE_TO_NINE = [a_record(i) for i in range(1, 10)]
SMALL_FOREST = ForestSettings(trees=20, min_leaf=20, marginal_weight=0.0)


# Survival


def test_quantiles_leave_room_for_a_length_longer_than_all_seen() -> None:
    model = MarginalLengths.fit(ONE_TO_NINE)
    here = LengthFeatures(COMPLETION)
    assert model.quantile(here, 0.5) == 5  # the middle of 9
    assert model.quantile(here, 0.89) == 9  # the tenth one is longer with probability 1/10
    assert model.quantile(here, 0.95) > 9


def test_generated_tokens_leave_only_longer_answers() -> None:
    model = MarginalLengths.fit(ONE_TO_NINE)
    here = LengthFeatures(COMPLETION)
    assert model.quantile(here, 0.5, generated_tokens=6) == 8  # of 7, 8, 9
    assert model.quantile(here, 0.5, generated_tokens=0) == 5
    assert min(model.grid(here, generated_tokens=6)) == 7


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 5)), min_size=1, max_size=20),
    st.integers(0, 80),
)
def test_survivors_exceed_what_was_generated_and_ascend(
    seen: list[tuple[int, int]], generated: int
) -> None:
    tally = dict(seen)
    support = np.array(sorted(tally), dtype=np.float64)
    counts = np.array([tally[int(x)] for x in support], dtype=np.float64)
    levels = np.array([0.01, 0.3, 0.5, 0.9, 0.99])
    out = quantiles_after(support, counts / counts.sum(), counts, levels, float(generated))
    assert (out > generated).all()
    assert (np.diff(out) >= 0).all()
    assert np.isfinite(out).all()
    # By definition: the smallest length whose share among the n + 1 survivors reaches the level.
    alive = np.repeat(support, counts.astype(int))
    alive = alive[alive > generated]
    for level, found in zip(levels, out, strict=True):
        rank = math.ceil(level * (len(alive) + 1) - 1e-9)
        if 1 <= rank <= len(alive):
            assert found == alive[rank - 1]
        else:
            assert found >= (alive[-1] if len(alive) else generated)


def test_refined_bound_covers_what_the_unrefined_one_misses() -> None:
    rng = np.random.default_rng(0)
    lengths = np.ceil(rng.pareto(1.5, 4000) * 20 + 1).astype(int)
    model = MarginalLengths.fit([a_record(int(y)) for y in lengths[:2000]])
    here = LengthFeatures(COMPLETION)
    reached = [int(y) for y in lengths[2000:] if y > 80]
    refined = model.quantile(here, 0.9, generated_tokens=80)
    assert coverage(reached, [model.quantile(here, 0.9)] * len(reached)) < 0.5
    assert 0.85 < coverage(reached, [refined] * len(reached)) < 0.95


# Marginal and Gaussian


def test_marginal_keeps_tasks_apart_and_answers_for_an_unknown_one_from_all() -> None:
    records = [a_record(10)] * 50 + [a_record(90, task=TRANSLATION)] * 49
    model = MarginalLengths.fit(records)
    assert model.quantile(LengthFeatures(COMPLETION), 0.9) == 10
    assert model.quantile(LengthFeatures(TRANSLATION), 0.1) == 90
    unknown = LengthFeatures(TaskName("unknown"))
    assert [model.quantile(unknown, q) for q in (0.1, 0.9)] == [10, 90]


def test_gaussian_has_the_quantiles_of_the_normal_distribution() -> None:
    rng = np.random.default_rng(1)
    records = [a_record(round(y)) for y in rng.normal(500, 50, 4000)]
    model = GaussianLengths.fit(records)
    here = LengthFeatures(COMPLETION)
    assert model.quantile(here, 0.5) == pytest.approx(500, abs=3)
    assert model.quantile(here, 0.9) == pytest.approx(500 + 1.2816 * 50, abs=4)
    # Half of a normal is above its mean: the median of those is its 0.75 quantile.
    assert model.quantile(here, 0.5, generated_tokens=500) == pytest.approx(500 + 33.7, abs=4)
    far = model.quantile(here, 0.9, generated_tokens=2000)
    assert 2001 <= far < 2010  # where the probabilities themselves underflow
    equal = GaussianLengths.fit([a_record(7)] * 5)
    assert equal.quantile(here, 0.9) == 7
    assert equal.quantile(here, 0.9, generated_tokens=7) == 8


def test_grid_makes_a_belief_with_the_model_s_mean() -> None:
    model = MarginalLengths.fit([a_record(i) for i in range(1, 1001)])
    belief = LengthBelief(model.grid(LengthFeatures(COMPLETION)))
    assert len(belief.points) == model.points
    assert belief.mean == pytest.approx(500.5, rel=0.01)


# Forests


def leaf_mixture_quantile(forest: ForestLengths, values: tuple[float, ...], q: float) -> float:
    """Meinshausen's quantile: each tree's in-bag leaf with equal weight, one rank beyond all."""
    weight: dict[float, list[float]] = {}
    y = np.asarray(forest.forest.forest_.y_train)[0]
    x = np.array([values], dtype=np.float32)
    for tree, leaves in zip(
        forest.forest.estimators_, forest.forest.forest_.y_train_leaves, strict=True
    ):
        held = [int(i) for i in leaves[int(tree.apply(x)[0])][0] if i > 0]
        for i in held:
            weight.setdefault(float(y[i - 1]), []).append(1.0 / len(held))
    total = {length: sum(w) / len(forest.forest.estimators_) for length, w in weight.items()}
    seen = {float(v): int(n) for v, n in zip(*np.unique(y, return_counts=True), strict=True)}
    unseen = sum(w * w / seen[length] for length, w in total.items())
    reached = 0.0
    for length in sorted(total):
        reached += total[length]
        if reached >= q * (1.0 + unseen):
            return length
    return math.inf


def test_compiled_forest_is_the_mixture_of_its_trees_leaves() -> None:
    records = noisy_records(400, seed=2)
    forest = ForestLengths.fit(records, seed=0, settings=SMALL_FOREST)
    compiled = forest.compiled()
    for record in records[:40]:
        for q in (0.1, 0.5, 0.9):
            expected = leaf_mixture_quantile(forest, record.features.values, q)
            assert compiled.quantile(record.features, q) == expected


def test_compiled_forest_is_close_to_the_package_s_own_answers() -> None:
    records = noisy_records(400, seed=3)
    forest = ForestLengths.fit(records, seed=0, settings=SMALL_FOREST)
    compiled = forest.compiled()
    ratios = [
        compiled.quantile(r.features, 0.75) / forest.quantile(r.features, 0.75)
        for r in records[:60]
    ]
    assert np.median(ratios) == pytest.approx(1.0, abs=0.05)


def test_forest_follows_the_feature_and_beats_the_marginal() -> None:
    train, test = noisy_records(1000, seed=4), noisy_records(500, seed=5)
    forest = ForestLengths.fit(train, seed=0, settings=ForestSettings(trees=20, min_leaf=50))
    marginal = MarginalLengths.fit(train)
    lengths = [r.output_tokens for r in test]

    def loss(model: LengthModel) -> float:
        return pinball_loss(lengths, [model.quantile(r.features, 0.9) for r in test], 0.9)

    compiled = forest.compiled()
    assert loss(compiled) < 0.9 * loss(marginal)
    bounds = [compiled.quantile(r.features, 0.9) for r in test]
    assert 0.86 < coverage(lengths, bounds) < 0.95


def test_every_model_conditions_on_what_was_generated() -> None:
    train = noisy_records(600, seed=6)
    forest = ForestLengths.fit(train, seed=0, settings=SMALL_FOREST)
    for model in (forest, forest.compiled(), MarginalLengths.fit(train)):
        features = train[0].features
        bounds = [model.quantile(features, 0.9, g) for g in (0, 20, 60, 5000)]
        # A hundredth of leeway: the package's own quantiles are interpolated.
        assert all(low <= 1.01 * high for low, high in itertools.pairwise(bounds))
        assert bounds[-1] > 5000
        assert min(model.grid(features, 60)) > 60


def test_forest_tells_tasks_apart_and_serves_an_unknown_one() -> None:
    short = [a_record(5 + i % 3, 0.5) for i in range(200)]
    long = [a_record(500 + i % 3, 0.5, task=TRANSLATION) for i in range(200)]
    settings = ForestSettings(trees=10, min_leaf=20, marginal_weight=0.1)
    compiled = ForestLengths.fit(short + long, seed=0, settings=settings).compiled()
    assert compiled.quantile(LengthFeatures(COMPLETION, (0.5,)), 0.9) <= 7
    assert compiled.quantile(LengthFeatures(TRANSLATION, (0.5,)), 0.1) >= 500
    assert compiled.quantile(LengthFeatures(TaskName("unknown"), (0.5,)), 0.9) >= 5


def test_same_seed_same_forest() -> None:
    records = noisy_records(300, seed=7)

    def saved(seed: int) -> bytes:
        return to_bytes(ForestLengths.fit(records, seed, SMALL_FOREST).compiled())

    assert saved(1) == saved(1)
    assert saved(1) != saved(2)


def test_refuses_records_and_features_it_cannot_use() -> None:
    with pytest.raises(InputError, match="needs records"):
        MarginalLengths.fit([])
    with pytest.raises(InputError, match="less than 1"):
        GaussianLengths.fit([a_record(0)])
    with pytest.raises(InputError, match="at least one feature"):
        ForestLengths.fit(ONE_TO_NINE, seed=0)
    with pytest.raises(InputError, match="trained on 1 features, got 2"):
        ForestLengths.fit([a_record(1, 0.0), a_record(2, 0.0, 1.0)], seed=0)
    with pytest.raises(InputError, match="not a finite number"):
        ForestLengths.fit([a_record(1, math.nan)], seed=0)
    model = MarginalLengths.fit(ONE_TO_NINE)
    with pytest.raises(InputError, match="between 0 and 1"):
        model.quantile(LengthFeatures(COMPLETION), 1.0)


# Files


def a_compiled_forest() -> CompiledForest:
    records = noisy_records(200, seed=8) + noisy_records(200, seed=9, task=TRANSLATION)
    return ForestLengths.fit(records, seed=0, settings=SMALL_FOREST).compiled()


def models() -> list[FileModel]:
    records = noisy_records(50, seed=8)
    return [MarginalLengths.fit(records), GaussianLengths.fit(records), a_compiled_forest()]


def test_a_saved_model_answers_as_before() -> None:
    for model in models():
        loaded = from_bytes(to_bytes(model))
        assert type(loaded) is type(model)
        for record in noisy_records(20, seed=10):
            for generated in (0, 30):
                expected = model.grid(record.features, generated)
                assert loaded.grid(record.features, generated) == expected


def altered(content: bytes, **changes: object) -> bytes:
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    arrays.update({name: np.asarray(value) for name, value in changes.items()})
    out = io.BytesIO()
    np.savez(out, allow_pickle=True, **arrays)
    return out.getvalue()


def test_refuses_what_is_no_model() -> None:
    content = to_bytes(a_compiled_forest())
    for bad in (b"", b"PK\x03\x04 no zip", content[: len(content) // 2]):
        with pytest.raises(InputError, match="fit and save it again"):
            from_bytes(bad)
    newer = json.dumps({"format": 2, "kind": "forest", "tasks": ["a"], "points": 8})
    with pytest.raises(InputError, match="format 2"):
        from_bytes(altered(content, header=newer))


def test_never_unpickles() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return (pytest.fail, ("code ran while a model was loaded",))

    bomb = np.empty(1, dtype=object)
    bomb[0] = Bomb()
    with pytest.raises(InputError, match="fit and save it again"):
        from_bytes(altered(to_bytes(a_compiled_forest()), roots=bomb))


def test_refuses_indices_that_lead_out_of_the_arrays() -> None:
    model = a_compiled_forest()
    content = to_bytes(model)
    inner = int(np.flatnonzero(model.split >= 0)[0])
    leaf = int(np.flatnonzero(model.split < 0)[0])

    def with_item(name: str, at: int, value: int) -> bytes:
        array = np.array(getattr(model, name))
        array[at] = value
        return altered(content, **{name: array})

    for bad in (
        with_item("roots", 0, len(model.split)),
        with_item("split", inner, 99),
        with_item("left", inner, inner),  # a walk in a circle
        with_item("right", inner, len(model.split)),
        with_item("right", leaf, len(model.leaf_value) + 1),
        with_item("leaf_value", 0, len(model.support)),
        with_item("leaf_mass", 0, -1),
        altered(content, support=model.support[::-1]),
        altered(content, base=model.base[:1]),
        altered(content, threshold=np.full_like(model.threshold, math.nan)),
    ):
        with pytest.raises(InputError, match="damaged"):
            from_bytes(bad)


# Features


def test_similar_answers_count_most_and_unfinished_ones_not_at_all() -> None:
    def known(*more: Answer) -> Answers:
        usual = [Answer(0.0, 1.0, 1000, 50), Answer(0.0, 1.0, 2000, 8), Answer(0.0, 1.0, 3000, 8)]
        return Answers.of([*usual, *more])

    rule = SimilarAnswers(prior_weight=0.01)
    assert rule.log_tokens(1000, 2.0, known()) == pytest.approx(math.log(50), abs=0.05)
    assert rule.log_tokens(2000, 2.0, known()) == pytest.approx(math.log(8), abs=0.05)
    still_running = known(Answer(1.0, 3.0, 1000, 900))
    assert rule.log_tokens(1000, 2.0, still_running) == rule.log_tokens(1000, 2.0, known())
    assert rule.log_tokens(1000, 0.5, known()) == 0.0
    assert rule.log_tokens(1000, 2.0, Answers.of([])) == 0.0
    assert rule.log_tokens(1000, 2.0, still_running.first(3)) == rule.log_tokens(1000, 2.0, known())


def test_only_the_latest_finished_answers_within_the_window_count() -> None:
    past = Answers.of([Answer(float(i), i + 0.5, 1000, 10 if i < 5 else 100) for i in range(10)])
    latest = SimilarAnswers(window=5).log_tokens(1000, 20.0, past)
    assert latest == pytest.approx(math.log(100))
    # An unrelated prompt gets the plain mean of the logarithms.
    assert SimilarAnswers().log_tokens(9, 20.0, past) == pytest.approx(math.log(1000) / 2)


# Calibration


def test_pinball_loss_is_least_at_the_quantile() -> None:
    lengths = list(range(1, 101))
    losses = {b: pinball_loss(lengths, [b] * 100, 0.9) for b in range(50, 100)}
    assert min(losses, key=lambda b: losses[b]) in (90, 91)
    assert pinball_loss([10], [4], 0.9) == pytest.approx(5.4)
    assert pinball_loss([4], [10], 0.9) == pytest.approx(0.6)


def test_reliability_gives_the_coverage_of_each_level() -> None:
    low, high = reliability([1, 2, 3, 4], {0.9: [4, 4, 4, 4], 0.5: [1, 1, 1, 9]})
    assert (low.q, low.coverage, low.stderr) == (0.5, 0.5, 0.25)
    assert (high.q, high.coverage, high.stderr) == (0.9, 1.0, 0.0)
    with pytest.raises(InputError, match="2 lengths, 1 bounds"):
        coverage([1, 2], [1])


# Speed over concurrency


def samples_of(fit: UslFit, noise: float = 0.0) -> list[SpeedSample]:
    rng = np.random.default_rng(0)
    return [
        SpeedSample(load, fit.speed(load) * (1.0 + noise * rng.standard_normal()))
        for load in (1, 2, 4, 8, 16, 32, 64)
        for _ in range(5)
    ]


@pytest.mark.parametrize(("sigma", "kappa"), [(0.02, 0.0), (0.05, 0.0005), (0.0, 0.001)])
def test_usl_recovers_its_own_law(sigma: float, kappa: float) -> None:
    fit = fit_usl(samples_of(UslFit(44.0, sigma, kappa, 1.0)))
    assert fit.lambda_tokens_per_s == pytest.approx(44.0, rel=1e-4)
    assert fit.sigma == pytest.approx(sigma, abs=1e-5)
    assert fit.kappa == pytest.approx(kappa, abs=1e-6)
    assert fit.r2 == pytest.approx(1.0)


def test_usl_beats_a_line_and_never_fits_a_negative_coefficient() -> None:
    samples = samples_of(UslFit(100.0, 0.1, 0.0, 1.0), noise=0.05)
    usl, line, curve = fit_usl(samples), fit_linear(samples), fit_logistic(samples)
    assert usl.r2 > 0.98
    assert usl.r2 > curve.r2 > line.r2
    faster_together = [SpeedSample(n, 10.0 + n) for n in (1, 2, 3, 4)]
    odd = fit_usl(faster_together)
    assert (odd.sigma, odd.kappa) == pytest.approx((0.0, 0.0), abs=1e-9)
    assert odd.r2 == pytest.approx(0.0, abs=1e-6)


def test_line_and_logistic_recover_their_own_shapes() -> None:
    line = fit_linear([SpeedSample(n, 50.0 - 2.0 * n) for n in (1, 5, 10, 20)])
    assert (line.base_tokens_per_s, line.slope_tokens_per_s) == pytest.approx((50.0, -2.0))
    assert line.speed(30.0) == 0.0
    curve = fit_logistic(
        [SpeedSample(n, 60.0 / (1.0 + math.exp(0.2 * (n - 15.0)))) for n in range(1, 40)]
    )
    assert curve.speed(15.0) == pytest.approx(30.0, rel=1e-3)
    assert curve.r2 == pytest.approx(1.0)


def test_speed_fits_refuse_too_few_or_impossible_samples() -> None:
    with pytest.raises(InputError, match="three concurrencies"):
        fit_usl([SpeedSample(1, 10.0), SpeedSample(2, 9.0)])
    with pytest.raises(InputError, match="positive speed"):
        fit_linear([SpeedSample(0, 10.0), SpeedSample(1, 9.0), SpeedSample(2, 8.0)])


# Graphs


def a_run(*stages: tuple[int, int | None, float | None]) -> SuperGraph:
    """A chain of (input tokens, output tokens, seconds); stage k reads stage k - 1."""
    return SuperGraph(
        tuple(
            SuperNode(((k - 1 if k else FROM_USER, tokens),), output, time_s)
            for k, (tokens, output, time_s) in enumerate(stages)
        )
    )


SHORT = a_run((100, 50, 1.0), (50, 50, 1.0))
LONG = a_run((4000, 900, 2.0), (900, 900, 6.0), (900, 100, 2.0))
HISTORY = DagHistory.of([SHORT, LONG])


def test_closest_prefix_gives_the_share_of_the_time_that_is_left() -> None:
    begun = HISTORY.match(a_run((3900, None, None)))
    assert begun is not None
    assert begun.index == 1
    assert begun.share == pytest.approx(0.2)
    one_done = HISTORY.match(a_run((3900, 950, 2.0)))
    assert one_done is not None
    assert one_done.index == 1
    assert one_done.share == pytest.approx(0.75)
    assert one_done.budget_s(40.0) == pytest.approx(30.0)
    assert one_done.budget_s(-1.0) == 0.0


def test_similarity_is_one_for_the_same_prefix_and_falls_with_distance() -> None:
    same, other = HISTORY.similarities(a_run((100, 50, 1.0), (50, None, None)), bandwidth=0.5)
    assert same == pytest.approx(1.0)
    assert 0.0 <= other < 0.1
    near = HISTORY.similarities(a_run((120, 60, 1.0)), bandwidth=0.5)[0]
    expected = [math.exp(-2.0 * math.log(a / b) ** 2) for a, b in ((121, 101), (61, 51))]
    assert near == pytest.approx(sum(expected) / 2)


def test_an_edge_that_only_one_graph_has_counts_against_it() -> None:
    tree = SuperGraph(
        (SuperNode(((FROM_USER, 100),), 50, 1.0), SuperNode(((FROM_USER, 50),), None, None))
    )
    chain = a_run((100, 50, 1.0), (50, None, None))
    # Of the four entries (input, output, two kinds of input to stage 1) the last two differ.
    assert HISTORY.similarities(tree, 0.5)[0] == pytest.approx(0.5)
    assert HISTORY.similarities(chain, 0.5)[0] == pytest.approx(1.0)


def test_runs_that_ended_here_teach_nothing_and_equals_go_to_the_latest() -> None:
    two_done = a_run((100, 50, 1.0), (50, 50, 1.0))
    assert HISTORY.similarities(two_done, 0.5)[0] == -1.0
    match = HISTORY.match(two_done)
    assert match is not None
    assert match.index == 1
    assert DagHistory.of([SHORT]).match(two_done) is None
    assert DagHistory.of([]).match(two_done) is None
    unknown = HISTORY.match(SuperGraph(()))
    assert unknown is not None
    assert unknown.index == 1


def test_refuses_graphs_that_are_none() -> None:
    with pytest.raises(InputError, match="leave the run out"):
        DagHistory.of([a_run((100, 50, None))])
    with pytest.raises(InputError, match="from stage 1"):
        DagHistory.of([SuperGraph((SuperNode(((1, 5),), 5, 1.0),))])
    with pytest.raises(InputError, match="stage 1 has begun"):
        HISTORY.match(a_run((100, None, None), (50, None, None)))
