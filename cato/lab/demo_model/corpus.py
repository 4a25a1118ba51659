"""Training data of the demo model: the interpreter's own standard library (PSF licence).

Every machine that can run CATO has it, so training needs no download. Installed packages can be
added.
"""

import functools
import importlib.metadata
import importlib.util
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from cato.lab.demo_model.fim_samples import (
    CHAT_END,
    CHAT_START,
    END_OF_TEXT,
    FILE_SEP,
    FIM_MIDDLE,
    FIM_PREFIX,
    FIM_SUFFIX,
    FimSample,
    chat_pairs,
    cut_like_an_editor,
    without_suffix,
)

# Test suites are half of the bytes and teach mostly `self.assertEqual(...)`; the other entries are
# generated tables or data files.
EXCLUDED_FOLDERS = frozenset(
    {
        "__pycache__",
        "__phello__",
        "encodings",
        "idle_test",
        "lib2to3",
        "lib-dynload",
        "msilib",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
EXCLUDED_FILES = frozenset({"html/entities.py", "stringprep.py", "this.py"})
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")
MAX_DIGIT_FRACTION = 0.15  # above it, a file is a table of numbers
HELD_OUT_ONE_IN = 32

FIM_FRACTION = 0.5
NO_SUFFIX_FRACTION = 0.15
PATH_FRACTION = 0.5
CHAT_KEPT_FRACTION = 0.6  # an eighth of all tokens
MIN_CHUNK_CHARS = 160
MAX_FIM_CHUNK_CHARS = 2_600
MIN_PLAIN_CHUNK_CHARS = 1_000
SHARD_CHARS = 12_000_000


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the corpus; `path` is relative to the library's folder, with forward slashes."""

    path: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """A fixed choice by name, so that runs and Python patch releases are comparable."""
        return zlib.crc32(self.path.encode()) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One training document as text pieces, each tokenized on its own.

    Separately, because at run time the cursor also cuts the text before tokenization.
    """

    pieces: tuple[str, ...]


def standard_library_folder() -> Path:
    """The running interpreter's library folder."""
    return Path(os.path.dirname(os.__file__))


def standard_library(root: Path | None = None) -> list[SourceFile]:
    """The usable sources in a fixed order; unreadable and generated files are left out.

    `root` is another interpreter's library, for a machine that has a GPU but another Python.
    """
    return _sources(root or standard_library_folder(), "")


def package_sources(name: str) -> list[SourceFile]:
    """The usable sources of an installed package, by its import name; paths begin with it.

    Raises:
        ValueError: no such package is installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"no package named {name} is installed")
    return [
        file
        for root in spec.submodule_search_locations
        for file in _sources(Path(root), f"{name}/")
    ]


def package_facts(name: str) -> str:
    """`torch 2.11.0 (BSD-3-Clause)`: the model card's entry for an installed package."""
    metadata = importlib.metadata.metadata(_distributions()[name][0])
    classifiers = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License")]
    licence = (
        metadata["License-Expression"]
        or " and ".join(c.rpartition("::")[2].strip() for c in classifiers)
        or (metadata["License"] or "licence not told").partition("\n")[0]
    )
    return f"{metadata['Name']} {metadata['Version']} ({licence})"


@functools.cache  # it reads the metadata of every installed package
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _sources(root: Path, prefix: str) -> list[SourceFile]:
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        if relative.as_posix() in EXCLUDED_FILES:
            continue
        if relative.parts[0].startswith(EXCLUDED_PREFIXES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few old files declare another encoding
            continue
        text = text.replace("\r\n", "\n").replace("\f", "").expandtabs(8)
        digits = sum(map(str.isdigit, text))
        if len(text) < MIN_CHUNK_CHARS or digits > MAX_DIGIT_FRACTION * len(text):
            continue
        files.append(SourceFile(prefix + relative.as_posix(), text))
    return files


def shards(files: list[SourceFile], seed: int) -> list[list[SourceFile]]:
    """The files shuffled and dealt into shards of about `SHARD_CHARS`, one for each epoch."""
    count = max(1, round(sum(len(file.text) for file in files) / SHARD_CHARS))
    order = list(files)
    Random(seed).shuffle(order)
    return [order[start::count] for start in range(count)]


def epoch_samples(files: list[SourceFile], *, window_tokens: int, rng: Random) -> Iterator[Sample]:
    """Every file once, cut again into chunks, shuffled; half of the text as fill-in-the-middle."""
    # About 3.3 bytes a token; a plain chunk fills most of a window, a FIM chunk any part of it,
    # because an editor's prompt may be one line or fill the context.
    window_chars = int(window_tokens * 3.0)
    jobs: list[tuple[str, SourceFile, int, int]] = []
    for file in files:
        start = 0
        while start < len(file.text):
            is_fim = rng.random() < _fim_chunk_probability(window_chars)
            if is_fim:
                size = _log_uniform(MIN_CHUNK_CHARS, min(MAX_FIM_CHUNK_CHARS, window_chars), rng)
            else:
                size = rng.randint(min(MIN_PLAIN_CHUNK_CHARS, window_chars // 2), window_chars)
            end = _line_end(file.text, start + size)
            jobs.append(("fim" if is_fim else "plain", file, start, end))
            start = end
        jobs.append(("chat", file, 0, 0))
    chats = [
        Sample(
            (
                f"{CHAT_START}user\n",
                pair.request,
                f"{CHAT_END}\n{CHAT_START}assistant\n",
                pair.reply,
                END_OF_TEXT,
            )
        )
        for kind, file, _, _ in jobs
        if kind == "chat"
        for pair in chat_pairs(file.text, rng)
        if rng.random() < CHAT_KEPT_FRACTION
    ]
    samples = [
        _chunk_sample(kind, file, start, end, rng)
        for kind, file, start, end in jobs
        if kind != "chat"
    ]
    samples += chats
    rng.shuffle(samples)
    yield from samples


def _fim_chunk_probability(window_chars: int) -> float:
    """Per chunk, so that about `FIM_FRACTION` of the *characters* become fill-in-the-middle."""
    top = min(MAX_FIM_CHUNK_CHARS, window_chars)
    mean_fim_chars = (top - MIN_CHUNK_CHARS) / math.log(top / MIN_CHUNK_CHARS)
    mean_plain_chars = (min(MIN_PLAIN_CHUNK_CHARS, window_chars // 2) + window_chars) / 2
    return (
        FIM_FRACTION
        * mean_plain_chars
        / (FIM_FRACTION * mean_plain_chars + (1 - FIM_FRACTION) * mean_fim_chars)
    )


def _chunk_sample(kind: str, file: SourceFile, start: int, end: int, rng: Random) -> Sample:
    chunk = file.text[start:end]
    if kind == "fim":
        sample = cut_like_an_editor(chunk, rng)
        if rng.random() < NO_SUFFIX_FRACTION:
            sample = without_suffix(sample)
        return Sample(fim_pieces(sample))
    head = f"{FILE_SEP}{file.path}\n" if rng.random() < PATH_FRACTION else FILE_SEP
    tail = (END_OF_TEXT,) if end == len(file.text) else ()
    return Sample((head, chunk, *tail))


def fim_pieces(sample: FimSample) -> tuple[str, ...]:
    """Prefix, suffix, middle: the order in which an engine's prefix cache helps an editor."""
    return (
        FIM_PREFIX,
        sample.prefix,
        FIM_SUFFIX,
        sample.suffix,
        FIM_MIDDLE,
        sample.middle,
        END_OF_TEXT,
    )


def _log_uniform(low: int, high: int, rng: Random) -> int:
    return int(low * (high / low) ** rng.random())


def _line_end(text: str, near: int) -> int:
    if near >= len(text):
        return len(text)
    newline = text.find("\n", near)
    return len(text) if newline < 0 else newline + 1
