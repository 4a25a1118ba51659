"""An embedded full-text index over a folder of code, kept on disk by Tantivy.

Processes of a host that open the same folder with the same store share one index. The process that
refreshes it holds a file lock; the others wait and then find the work done. So a host with several
ingress replicas builds an index once and has it in the page cache once. A search never waits: it
reads the last snapshot that its process loaded, whose files stay mapped even when another process
has replaced them. File locks and mapped files need a local disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import tantivy

from cato.core.errors import ConfigError, Problem
from cato.serve.nodes.code_files import files_of, text_of
from cato.serve.nodes.terms import terms_of

_log = logging.getLogger(__name__)

# Part of the store's name: indexes of other formats are ignored, not migrated.
_FORMAT = "v1"
# A window is the unit put into prompts: about one screen. The overlap keeps a short function whole
# in one of two neighbouring windows.
WINDOW_LINES = 40
_OVERLAP_LINES = 8
_MAX_WINDOW_CHARS = 6000
# Only the end of a long query is used: in an editor, the text before the cursor.
_MAX_QUERY_CHARS = 16_384
# More terms cost time and change little: rare terms dominate BM25.
MAX_QUERY_TERMS = 32
MAX_TOP_K = 100
_WRITER_BYTES = 64_000_000  # of memory, before Tantivy writes a segment


Progress = Callable[[int, int], None]
"""Called with (files done, files in total) while an index is built."""


@dataclass(frozen=True, slots=True)
class Snippet:
    """Consecutive lines of a file; `path` is relative to the folder, `score` is BM25."""

    path: str
    start_line: int
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class Refresh:
    """Numbers of files in a refresh. `skipped`: binary, too large or generated."""

    indexed: int
    removed: int
    unchanged: int
    skipped: int
    unreadable: int


class CodeIndex:
    """A full-text index of one folder. `search` is thread-safe, also during `refresh`."""

    def __init__(self, folder: Path, store: Path) -> None:
        """For `open` only: the index is not usable before its first refresh."""
        self._given, self._store = folder, store
        self._folder = folder.resolve()
        self._home = _home(self._folder, store)
        self._schema = _schema()
        self._refreshing = threading.Lock()
        self._index: tantivy.Index | None = None
        self._searcher: tantivy.Searcher | None = None

    @classmethod
    def open(cls, folder: Path, store: Path, progress: Progress | None = None) -> CodeIndex:
        """Build the index of `folder` below `store`, or bring it up to date.

        `store` may hold the indexes of many folders. Raise `ConfigError` if `folder` does not
        exist, `OSError` if the store cannot be written.
        """
        if not folder.is_dir():
            raise ConfigError((Problem(str(folder), "", "", "must be a readable folder"),))
        index = cls(folder, store)
        index.refresh(progress)
        return index

    @classmethod
    def open_if_possible(cls, folder: Path, store: Path) -> CodeIndex:
        """Like `open`, but what cannot be built now (its folder is away, the disk is full) does not
        keep an ingress from starting: the last index is searched, or searches fail, until an
        `IndexFollower` has built it."""
        try:
            return cls.open(folder, store)
        except (ConfigError, OSError, ValueError) as error:
            _log.warning("%s: the code index cannot be built now: %s", folder, error)
        index = cls(folder, store)
        with suppress(OSError, ValueError):
            index.reload()
        return index

    @property
    def folder(self) -> Path:
        """The indexed folder, without links."""
        return self._folder

    @property
    def places(self) -> tuple[Path, Path]:
        """The folder and the store as `open` got them."""
        return self._given, self._store

    def reload(self) -> None:
        """Search what another process has made of this index, also if the folder is a link that
        leads elsewhere now. Raise `OSError` or `ValueError` if it cannot be read; then searches
        go on as before."""
        folder = self._given.resolve()
        home = _home(folder, self._store)
        with self._refreshing:
            index = self._index
            if index is None or home != self._home:
                index = _opened(home)
            try:
                index.reload()
            except ValueError:  # it was damaged, and another process has built it again
                index = _opened(home)
            self._searcher = index.searcher()
            self._index, self._folder, self._home = index, folder, home

    def refresh(self, progress: Progress | None = None) -> Refresh:
        """Update for new, changed and removed files, found by size and modification time.

        Raise `OSError` if the folder itself cannot be listed: its files are not gone.
        """
        with self._refreshing, _locked(self._home):
            manifest = self._load()
            assert self._index is not None
            result = self._update(self._index, manifest, progress)
            self._index.reload()
            self._searcher = self._index.searcher()
        if result.unreadable:
            _log.warning("%s: %d files could not be read", self._folder, result.unreadable)
        return result

    def search(self, query: str, top_k: int) -> list[Snippet]:
        """At most `top_k` snippets that share terms with `query`, best first. Raise `OSError` if
        the index is not built yet.

        `query` is any text, code or prose, without query syntax. Of overlapping windows of one file
        only the best is returned.
        """
        searcher = self._searcher
        if searcher is None:
            raise OSError("it is not built yet")
        wanted = min(top_k, MAX_TOP_K)
        clauses = self._clauses(searcher, query)
        if wanted < 1 or not clauses:  # Tantivy panics on a limit of 0
            return []
        hits = searcher.search(
            tantivy.Query.boolean_query(clauses), limit=3 * wanted, count=False
        ).hits
        chosen: list[Snippet] = []
        for score, address in hits:
            document = searcher.doc(address)
            found = Snippet(
                path=str(document.get_first("path")),
                start_line=int(document.get_first("start_line") or 0),
                text=bytes(document.get_first("text") or b"").decode(),
                score=float(score),
            )
            if not any(_overlap(found, other) for other in chosen):
                chosen.append(found)
            if len(chosen) == wanted:
                break
        return sorted(chosen, key=lambda s: (-s.score, s.path, s.start_line))

    def _clauses(
        self, searcher: tantivy.Searcher, query: str
    ) -> list[tuple[tantivy.Occur, tantivy.Query]]:
        """The most significant terms of `query`: rare in the folder, frequent in the query."""
        total = searcher.num_docs
        weighted: list[tuple[float, str, float]] = []
        for term, count in Counter(terms_of(query[-_MAX_QUERY_CHARS:])).items():
            documents = searcher.doc_freq("terms", term)
            if documents:
                boost = 1.0 + math.log(count)
                rarity = math.log(1.0 + (total - documents + 0.5) / (documents + 0.5))
                weighted.append((-boost * rarity, term, boost))
        clauses = []
        for _, term, boost in sorted(weighted)[:MAX_QUERY_TERMS]:
            clause = tantivy.Query.term_query(self._schema, "terms", term, "freq")
            clauses.append((tantivy.Occur.Should, tantivy.Query.boost_query(clause, boost)))
        return clauses

    def _load(self) -> dict[str, list[int]]:
        """Open `_index` and return the store's manifest; start empty if anything is damaged.

        The manifest is removed before a commit and written after it: if it is missing, a refresh
        was interrupted and the content of the index is unknown.
        """
        path = self._home / "manifest.json"
        try:
            manifest: dict[str, list[int]] = json.loads(path.read_text("utf-8"))
            if self._index is None:
                self._index = _opened(self._home)
            self._index.reload()
            return manifest
        except FileNotFoundError:
            pass
        except ValueError as exc:  # broken JSON, or Tantivy's own errors
            _log.warning("%s: the index is damaged and will be rebuilt: %s", self._folder, exc)
        path.unlink(missing_ok=True)
        shutil.rmtree(self._home / "index", ignore_errors=True)
        (self._home / "index").mkdir()
        self._index = tantivy.Index(self._schema, str(self._home / "index"))
        self._index.config_reader("manual")
        return {}

    def _update(
        self, index: tantivy.Index, manifest: dict[str, list[int]], progress: Progress | None
    ) -> Refresh:
        present, unreadable = files_of(self._folder, self._home)
        changed = sorted(p for p, stamp in present.items() if manifest.get(p) != stamp)
        gone = sorted(manifest.keys() - present.keys())
        known = {p: stamp for p, stamp in present.items() if manifest.get(p) == stamp}
        unchanged = len(known)
        indexed = skipped = 0
        path = self._home / "manifest.json"
        if not (changed or gone) and path.exists():
            return Refresh(0, 0, unchanged, 0, unreadable)
        writer = index.writer(_WRITER_BYTES, num_threads=1)
        try:
            for name in (*gone, *(p for p in changed if p in manifest)):
                writer.delete_documents_by_term("path", name)
            for done, name in enumerate(changed, 1):
                try:
                    text = text_of(self._folder / name)
                except OSError as exc:
                    _log.debug("%s: cannot be read: %s", name, exc)
                    unreadable += 1
                    continue
                known[name] = present[name]
                skipped += text is None
                indexed += text is not None
                for document in _documents(name, text or ""):
                    writer.add_document(document)
                if progress is not None:
                    progress(done, len(changed))
            path.unlink(missing_ok=True)
            writer.commit()
        except BaseException:
            writer.rollback()
            raise
        finally:
            writer.wait_merging_threads()  # also releases Tantivy's own lock
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(known), "utf-8")
        fresh.replace(path)
        return Refresh(indexed, len(gone), unchanged, skipped, unreadable)


def _home(folder: Path, store: Path) -> Path:
    """Where the index of `folder`, a path without links, is kept."""
    key = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    return store.resolve() / f"{_FORMAT}-{key}"


def _opened(home: Path) -> tantivy.Index:
    index = tantivy.Index.open(str(home / "index"))
    index.config_reader("manual")
    return index


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("path", stored=True, tokenizer_name="raw", index_option="basic")
    builder.add_unsigned_field("start_line", stored=True)
    builder.add_bytes_field("text", stored=True)
    builder.add_text_field("terms", tokenizer_name="whitespace", index_option="freq")
    return builder.build()


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
        yield


def _overlap(a: Snippet, b: Snippet) -> bool:
    first, second = sorted((a, b), key=lambda s: s.start_line)
    end = first.start_line + first.text.count("\n") + 1
    return a.path == b.path and second.start_line < end


# Windows


def _documents(path: str, text: str) -> Iterator[tantivy.Document]:
    path_terms = terms_of(path)
    lines = text.split("\n")
    line_terms = [terms_of(line) for line in lines]
    for start, end in _windows(lines):
        terms = [term for line in line_terms[start:end] for term in line]
        if not terms:
            continue
        yield tantivy.Document(
            path=path,
            start_line=start + 1,
            text="\n".join(lines[start:end])[:_MAX_WINDOW_CHARS].encode(),
            terms=" ".join((*path_terms, *terms)),
        )


def _windows(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Overlapping row ranges that cover all lines, limited in lines and characters."""
    start = 0
    while start < len(lines):
        end, chars = start, 0
        while end < min(start + WINDOW_LINES, len(lines)):
            chars += len(lines[end]) + 1
            if chars > _MAX_WINDOW_CHARS and end > start:
                break
            end += 1
        yield start, end
        if end == len(lines):
            return
        start = max(end - _OVERLAP_LINES, start + 1) if end - start == WINDOW_LINES else end
