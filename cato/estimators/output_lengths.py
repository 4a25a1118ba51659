"""Beliefs about the length of a node's next output, learnt from its finished invocations."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cato.core.ids import NodeId, TaskName
from cato.core.length import LengthBelief
from cato.core.receipt import NodeStatus, SlaReceipt
from cato.core.record import record
from cato.estimators.censoring import completed
from cato.estimators.length_bound import LengthFeatures, LengthRecord, MarginalLengths, beats
from cato.estimators.length_forest import CompiledForest, ForestLengths, ForestSettings
from cato.estimators.prompt_features import Asked, features_of

Key = tuple[TaskName, NodeId, str]
"""Task, node and model: lengths are learnt for each such key."""

ENDED = frozenset({"stop", "tool_calls"})
"""Finish reasons of an output that ended by itself."""
CUT = "length"
"""Finish reason of an output that reached its limit: its length is only known to be longer."""

MIN_SAMPLES = 9
"""Fewest answers to learn from: the longest of nine is a 0.9 quantile of the tenth."""

MIN_FOREST_SAMPLES = 400
"""Fewest answers to grow a forest from. On the Azure 2023 coding trace, whose prompts say almost
nothing about the length, its 0.9 bound is 35 % worse than plain quantiles when grown from 100, 5 %
from 400 and 1 % from 1,600; the newest fifth of 400 is enough to see whether it gains."""

KEPT_SAMPLES = 2_500
"""Newest answers of a key to learn from. More did not improve the forest on that trace."""

NEWEST = 5
"""One answer in this many, the newest ones, is held out to judge whether the forest is used."""
LEVEL = 0.9
"""Level of that comparison."""
_TREES = 30
"""Trees of a forest: as good as 100 on that trace, in a quarter of the time and memory."""
_LEAVES = 20
_GROWTH = 0.1
"""A key is refitted once its answers have grown by this share."""


@record
class LengthSample:
    """An output that ended by itself or at its limit; `finish_reason` tells which.

    `features`: see `features_of`; empty for samples of versions before features.
    """

    task: TaskName
    node: NodeId
    model: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    features: tuple[float, ...] = ()

    @property
    def key(self) -> Key:
        return (self.task, self.node, self.model)


def samples_of(receipt: SlaReceipt) -> tuple[LengthSample, ...]:
    """The outputs of a run that tell lengths; cancelled and failed ones do not."""
    return tuple(
        LengthSample(
            receipt.task,
            node.node,
            node.llm.model,
            node.llm.prompt_tokens,
            max(1, node.llm.output_tokens),
            node.llm.finish_reason,
            node.llm.features,
        )
        for node in receipt.nodes
        if node.llm is not None
        and not node.llm.reused
        and node.status == NodeStatus.DONE.value
        and (node.llm.finish_reason in ENDED or node.llm.finish_reason == CUT)
    )


@dataclass(frozen=True, slots=True)
class KeyLengths:
    """The fit of one key. `forest` is None where it is no better than `belief`."""

    belief: LengthBelief
    forest: CompiledForest | None
    seen: int


@dataclass(frozen=True, slots=True)
class OutputLengths:
    """Beliefs by task, node and model. Picklable and pure; a higher `version` is newer."""

    version: int = 0
    keys: Mapping[Key, KeyLengths] = field(default_factory=dict)

    def belief(
        self,
        task: TaskName,
        node: NodeId,
        model: str,
        features: tuple[float, ...],
        max_tokens: int,
    ) -> LengthBelief | None:
        """Equally likely lengths of an output cut at `max_tokens`; None when unknown.

        `features` are those of `features_of`.
        """
        known = self.keys.get((task, node, model))
        if known is None:
            return None
        if known.forest is not None:
            points = known.forest.grid(LengthFeatures(task, features))
        else:
            points = known.belief.points
            if points[-1] <= max_tokens:
                return known.belief
        limit = float(max(1, max_tokens))
        return LengthBelief(tuple(min(point, limit) for point in points))

    def warm_up(self) -> None:
        """Compile or load the code that `belief` runs: seconds in a fresh process, not on demand.

        Arrays from Ray's object store are read-only, which needs another compiled signature.
        """
        for known in self.keys.values():
            if known.forest is not None:
                known.forest.warmed_up()


Due = Mapping[Key, tuple[Sequence[LengthSample], int]]
"""Keys to refit: their newest samples, and how many were ever seen."""


class LengthHistory:
    """The newest samples of each key, and how many were ever seen. Mutable; one owner."""

    def __init__(self) -> None:
        self._samples: dict[Key, deque[LengthSample]] = {}
        self._seen: dict[Key, int] = {}

    def add(self, samples: Iterable[LengthSample]) -> None:
        for sample in samples:
            self._samples.setdefault(sample.key, deque(maxlen=KEPT_SAMPLES)).append(sample)
            self._seen[sample.key] = self._seen.get(sample.key, 0) + 1

    def restore(self, earlier: Iterable[LengthSample]) -> None:
        """Put samples learnt earlier, oldest first, before those that came since."""
        since = [sample for samples in self._samples.values() for sample in samples]
        self._samples.clear()
        self._seen.clear()
        self.add(earlier)
        self.add(since)

    def due(self, lengths: OutputLengths) -> Due:
        """The keys with enough new samples since `lengths`."""
        return {
            key: (tuple(samples), self._seen[key])
            for key, samples in self._samples.items()
            if len(samples) >= MIN_SAMPLES and _has_outgrown(self._seen[key], lengths.keys.get(key))
        }


def refitted(lengths: OutputLengths, due: Due, version: int, seed: int) -> OutputLengths:
    """`lengths` with the keys of `due` refitted; a tenth of a second for a key with a forest."""
    fresh = {key: _fitted(samples, seen, seed) for key, (samples, seen) in due.items()}
    return OutputLengths(version, {**lengths.keys, **fresh})


def _has_outgrown(seen: int, known: KeyLengths | None) -> bool:
    return known is None or seen >= known.seen + max(1.0, _GROWTH * min(known.seen, KEPT_SAMPLES))


def _fitted(samples: Sequence[LengthSample], seen: int, seed: int) -> KeyLengths:
    records = _records(samples)
    plain = MarginalLengths.fit(records)
    forest = None
    if len(records) >= MIN_FOREST_SAMPLES and _forest_gains(samples, seed):
        forest = _forest(records, seed)
    return KeyLengths(LengthBelief(plain.grid(records[0].features)), forest, seen)


def _forest_gains(samples: Sequence[LengthSample], seed: int) -> bool:
    """Whether a forest of the older samples bounds the newest ones better than quantiles."""
    split = len(samples) - len(samples) // NEWEST
    older, newest = _records(samples[:split]), _records(samples[split:])
    return beats(_forest(older, seed), MarginalLengths.fit(older), newest, LEVEL)


def _forest(records: Sequence[LengthRecord], seed: int) -> CompiledForest:
    settings = ForestSettings(trees=_TREES, min_leaf=len(records) // _LEAVES)
    return ForestLengths.fit(records, seed, settings).compiled()


def _records(samples: Sequence[LengthSample]) -> tuple[LengthRecord, ...]:
    lengths = completed(
        [s.output_tokens for s in samples], [s.finish_reason != CUT for s in samples]
    )
    return tuple(
        LengthRecord(_features(s), length)
        for s, length in zip(samples, lengths.tolist(), strict=True)
    )


def _features(sample: LengthSample) -> LengthFeatures:
    values = sample.features or features_of(Asked(sample.prompt_tokens))
    return LengthFeatures(sample.task, values)
