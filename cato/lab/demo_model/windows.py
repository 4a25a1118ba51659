"""Packs samples of the demo model's corpus into windows of a fixed number of tokens."""

import itertools
import multiprocessing
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cato.lab.demo_model.corpus import Sample, SourceFile, epoch_samples, shards
from cato.lab.demo_model.fim_samples import FIM_PAD, SPECIAL_TOKENS

Corpus = tuple[list[list[SourceFile]], Tokenizer]  # shards and their tokenizer
Windows = NDArray[np.int32]  # (windows, tokens of a window + 1)

PAD = SPECIAL_TOKENS.index(FIM_PAD)
SHORTEST_USEFUL = 24  # tokens; a shorter remainder of a window is padding
LOOKED_AT = 12  # samples tried to fill the rest of a window


def epoch_windows(
    files: list[SourceFile], tokenizer: Tokenizer, window_tokens: int, seed: int, epoch: int
) -> Windows:
    """One pass over a shard of files, `window_tokens` + 1 tokens a window, several samples in it.

    A sample is cut where neither it nor the next few fit the rest of a window. The same
    arguments give the same windows, in any process.
    """
    samples = epoch_samples(
        files, window_tokens=window_tokens, rng=Random(f"{seed}:{window_tokens}:{epoch}")
    )
    size = window_tokens + 1  # inputs and targets overlap in all but one token
    encoded = (_encoded(sample, tokenizer) for sample in samples)
    return np.array(list(_packed(encoded, size)), dtype=np.int32).reshape(-1, size)


def _encoded(sample: Sample, tokenizer: Tokenizer) -> list[int]:
    return [i for piece in tokenizer.encode_batch(list(sample.pieces)) for i in piece.ids]


def _packed(samples: Iterator[list[int]], size: int) -> Iterator[list[int]]:
    waiting = list(itertools.islice(samples, LOOKED_AT))
    while waiting:
        window: list[int] = []
        while waiting and len(window) < size - SHORTEST_USEFUL:
            room = size - len(window)
            fitting = next((i for i, ids in enumerate(waiting) if len(ids) <= room), 0)
            window += waiting.pop(fitting)[:room]
            waiting += itertools.islice(samples, 1)
        yield window + [PAD] * (size - len(window))


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Position in the endless stream of windows: enough to continue after an interruption."""

    epoch: int
    windows_taken: int


class EpochMaker:
    """Makes epochs here or, with `workers` processes, ahead of time: a GPU outruns one core.

    An epoch is one shard of the files; after the last shard comes the first, cut again.
    """

    def __init__(
        self, files: list[SourceFile], tokenizer: Tokenizer, seed: int, workers: int
    ) -> None:
        self.seed, self.workers = seed, workers
        self._corpus = (shards(files, seed), tokenizer)
        self._pool = (
            ProcessPoolExecutor(
                workers,
                multiprocessing.get_context("spawn"),
                initializer=_remember,
                initargs=(self._corpus[0], tokenizer.to_str()),
            )
            if workers
            else None
        )
        self._ahead: dict[tuple[int, int], Future[Windows]] = {}

    def prepare(self, window_tokens: int, epoch: int) -> None:
        """Start preparing this epoch and the next ones, one per worker."""
        if self._pool is None:
            return
        for coming in range(epoch, epoch + self.workers):
            key = (window_tokens, coming)
            if key not in self._ahead:
                self._ahead[key] = self._pool.submit(
                    _windows_of_worker, window_tokens, self.seed, coming
                )

    def windows(self, window_tokens: int, epoch: int) -> Windows:
        if self._pool is None:
            return _windows(self._corpus, window_tokens, self.seed, epoch)
        self.prepare(window_tokens, epoch)
        return self._ahead.pop((window_tokens, epoch)).result()

    def close(self) -> None:
        """End the processes; epochs in progress are finished first, queued ones dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _windows(corpus: Corpus, window_tokens: int, seed: int, epoch: int) -> Windows:
    parts, tokenizer = corpus
    return epoch_windows(parts[epoch % len(parts)], tokenizer, window_tokens, seed, epoch)


_of_worker: dict[str, Corpus] = {}


def _remember(parts: list[list[SourceFile]], tokenizer: str) -> None:
    _of_worker["corpus"] = (parts, Tokenizer.from_str(tokenizer))


def _windows_of_worker(window_tokens: int, seed: int, epoch: int) -> Windows:
    return _windows(_of_worker["corpus"], window_tokens, seed, epoch)


class WindowStream:
    """Epoch after epoch of windows, in batches that may span two epochs."""

    def __init__(self, maker: EpochMaker, window_tokens: int) -> None:
        self._maker, self.window_tokens = maker, window_tokens
        self.position = DataPosition(0, 0)
        self._windows: deque[NDArray[np.int32]] = deque()
        self._is_read = False

    def seek(self, position: DataPosition) -> None:
        self.position = position
        self._is_read = False

    def batch(self, rows: int) -> Windows:
        """(rows, window_tokens + 1) token ids."""
        if not self._is_read:
            epoch, taken = self.position.epoch, self.position.windows_taken
            self._windows = deque(self._maker.windows(self.window_tokens, epoch)[taken:])
            self._is_read = True
        return np.stack([self._next() for _ in range(rows)])

    def _next(self) -> NDArray[np.int32]:
        while not self._windows:
            self.position = DataPosition(self.position.epoch + 1, 0)
            epoch = self.position.epoch
            self._windows = deque(self._maker.windows(self.window_tokens, epoch))
        self.position = DataPosition(self.position.epoch, self.position.windows_taken + 1)
        return self._windows.popleft()
