"""The retrieve node and its index: what is found, what is never indexed, what is refreshed."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nodes_kit import Broken, Fixed

from cato.core.errors import ConfigError, NodeError
from cato.core.workflow import RetrieveSettings
from cato.serve.nodes import CodeIndex, Refresh, retrieve
from cato.serve.nodes.code_files import MAX_FILE_BYTES
from cato.serve.nodes.code_index import WINDOW_LINES
from cato.serve.nodes.index_following import IndexFollower
from cato.serve.nodes.runner import NodeRunner

PARSER = '''def parse_http_header(line):
    """Split one header line."""
    name, _, value = line.partition(":")
    return name.strip(), value.strip()
'''
QUEUE = "class BoundedQueue:\n    def put(self, item):\n        self.items.append(item)\n"


def a_folder(at: Path, **files: str) -> Path:
    """A folder `code` with files; `__` in a name is a slash, and the suffix is `.py`."""
    for name, text in files.items():
        path = at / "code" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return at / "code"


def paths(index: CodeIndex, query: str, top_k: int = 10) -> list[str]:
    return [s.path for s in index.search(query, top_k)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_the_best_snippet_comes_first_with_its_place(tmp_path: Path, store: Path) -> None:
    folder = a_folder(tmp_path, net__parser="\n\n" + PARSER, queue=QUEUE)
    [best, *_] = CodeIndex.open(folder, store).search("parse a header line", 5)
    assert (best.path, best.start_line, best.text) == ("net/parser.py", 1, "\n\n" + PARSER)
    assert best.score > 0


def test_code_finds_the_same_words_in_another_spelling(tmp_path: Path, store: Path) -> None:
    index = CodeIndex.open(a_folder(tmp_path, parser=PARSER, queue=QUEUE), store)
    assert paths(index, "parseHTTPHeader(x)") == ["parser.py"]
    assert paths(index, "bounded_queue") == ["queue.py"]
    assert paths(index, "BOUNDEDQUEUE") == ["queue.py"]


def test_long_files_give_windows_and_overlapping_ones_count_once(
    tmp_path: Path, store: Path
) -> None:
    lines = [f"line_{i} = needle" for i in range(3 * WINDOW_LINES)]
    found = CodeIndex.open(a_folder(tmp_path, long="\n".join(lines)), store).search("needle", 10)
    covered = [n for s in found for n in range(s.start_line, s.start_line + s.text.count("\n") + 1)]
    assert len(covered) == len(set(covered))
    for s in found:
        at = s.start_line - 1
        assert s.text.split("\n") == lines[at : at + s.text.count("\n") + 1]


def test_finds_any_line_of_a_long_file(tmp_path: Path, store: Path) -> None:
    lines = [f"unique{i}word = 1" for i in range(200)]
    index = CodeIndex.open(a_folder(tmp_path, long="\n".join(lines)), store)
    for i in range(200):
        [snippet] = index.search(f"unique{i}word", 1)
        assert f"unique{i}word" in snippet.text


@pytest.mark.parametrize("top_k", [0, -1])
def test_asking_for_nothing_gives_nothing(tmp_path: Path, store: Path, top_k: int) -> None:
    assert CodeIndex.open(a_folder(tmp_path, a=PARSER), store).search("parse", top_k) == []


def test_an_empty_folder_can_be_searched(tmp_path: Path, store: Path) -> None:
    (tmp_path / "code").mkdir()
    assert CodeIndex.open(tmp_path / "code", store).search("anything", 5) == []


def test_a_folder_that_is_none_is_a_configuration_error(tmp_path: Path, store: Path) -> None:
    with pytest.raises(ConfigError, match="readable folder"):
        CodeIndex.open(tmp_path / "absent", store)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> CodeIndex:
    at = tmp_path_factory.mktemp("shared")
    return CodeIndex.open(a_folder(at, parser=PARSER, queue=QUEUE), at / "store")


queries = st.text() | st.lists(
    st.sampled_from(
        ["parse", "AND", "OR", "NOT", "+", '"', "(", "path:", "*", "\0", "\ud800", "^2"]
    )
).map(" ".join)


@given(queries, st.integers(-1, 10**9))
def test_no_query_is_an_error(shared: CodeIndex, query: str, top_k: int) -> None:
    found = shared.search(query, top_k)
    assert len(found) <= max(top_k, 0)
    assert all((shared.folder / s.path).is_file() for s in found)
    assert [s.score for s in found] == sorted((s.score for s in found), reverse=True)


def test_a_huge_query_is_cut_not_refused(shared: CodeIndex) -> None:
    assert paths(shared, "filler_word " * 100_000 + PARSER, 1) == ["parser.py"]


# What is never indexed


def test_links_are_not_followed(tmp_path: Path, store: Path) -> None:
    folder = a_folder(tmp_path, inside=PARSER)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.py").write_text("password = 'needle'")
    (folder / "link.py").symlink_to(outside / "secret.py")
    (folder / "linked").symlink_to(outside)
    (folder / "up").symlink_to("..")
    (folder / "again.py").symlink_to("inside.py")
    (folder / "dangling.py").symlink_to("nowhere")
    index = CodeIndex.open(folder, store)
    assert paths(index, "password needle secret") == []
    assert paths(index, "parse") == ["inside.py"]


def test_a_folder_reached_through_a_link_is_indexed(tmp_path: Path, store: Path) -> None:
    a_folder(tmp_path, inside=PARSER)
    (tmp_path / "alias").symlink_to("code")
    assert paths(CodeIndex.open(tmp_path / "alias", store), "parse") == ["inside.py"]


@pytest.mark.parametrize(
    "name",
    [".env", ".git/config", "node_modules/a.js", "x/__pycache__/a.py", ".venv/a.py", "vendor/a.go"],
)
def test_hidden_and_vendored_files_are_left_out(tmp_path: Path, store: Path, name: str) -> None:
    folder = a_folder(tmp_path, kept="needle = 1")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("needle = 2")
    assert paths(CodeIndex.open(folder, store), "needle") == ["kept.py"]


def test_a_virtual_environment_is_left_out_whatever_its_name(tmp_path: Path, store: Path) -> None:
    folder = a_folder(tmp_path, kept="needle = 1", myenv__lib__a="needle = 2")
    (folder / "myenv" / "pyvenv.cfg").write_text("home = /usr")
    assert paths(CodeIndex.open(folder, store), "needle") == ["kept.py"]


@pytest.mark.parametrize(
    "data",
    [b"needle\0", b"needle\n" * (MAX_FILE_BYTES // 7 + 1), b"needle " * 1000],
    ids=["binary", "too large", "minified"],
)
def test_files_not_written_by_people_are_left_out(tmp_path: Path, store: Path, data: bytes) -> None:
    folder = a_folder(tmp_path, kept="needle = 1")
    (folder / "other.js").write_bytes(data)
    assert paths(CodeIndex.open(folder, store), "needle") == ["kept.py"]


def test_a_pipe_does_not_block_the_build(tmp_path: Path, store: Path) -> None:
    folder = a_folder(tmp_path, kept="needle = 1")
    os.mkfifo(folder / "pipe.py")
    assert paths(CodeIndex.open(folder, store), "needle") == ["kept.py"]


def test_the_store_may_lie_in_the_folder(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, kept="needle = 1")
    CodeIndex.open(folder, folder / "store")
    index = CodeIndex.open(folder, folder / "store")
    assert index.refresh() == Refresh(indexed=0, removed=0, unchanged=1, skipped=0, unreadable=0)


def test_a_file_in_an_odd_encoding_is_indexed_all_the_same(tmp_path: Path, store: Path) -> None:
    folder = a_folder(tmp_path)
    folder.mkdir()
    (folder / "latin.py").write_bytes("# caf\xe9\nneedle = 1".encode("latin-1"))
    assert paths(CodeIndex.open(folder, store), "needle") == ["latin.py"]


def test_a_name_that_is_no_text_is_counted_as_unreadable(tmp_path: Path, store: Path) -> None:
    folder = a_folder(tmp_path, kept="needle = 1")
    try:
        Path(os.fsdecode(os.fsencode(folder) + b"/\xff.py")).write_text("needle = 2")
    except OSError:
        pytest.skip("this file system takes only Unicode names")
    index = CodeIndex.open(folder, store)
    assert paths(index, "needle") == ["kept.py"]
    assert index.refresh().unreadable == 1


# Refreshing


def test_a_refresh_sees_files_that_are_new_changed_or_gone(tmp_path: Path, store: Path) -> None:
    folder = a_folder(tmp_path, stays="stays = 1", changes="before = 1", goes="goes = 1")
    index = CodeIndex.open(folder, store)
    a_folder(tmp_path, changes="afterwards = 1", new="fresh = 1")
    (folder / "goes.py").unlink()
    assert paths(index, "before") == ["changes.py"]  # a search sees the last refresh
    assert index.refresh() == Refresh(indexed=2, removed=1, unchanged=1, skipped=0, unreadable=0)
    assert paths(index, "before") == paths(index, "goes") == []
    assert paths(index, "afterwards") == ["changes.py"]
    assert paths(index, "fresh") == ["new.py"]
    assert paths(index, "stays") == ["stays.py"]


def test_an_edit_of_the_same_size_is_seen_by_its_time(tmp_path: Path, store: Path) -> None:
    folder = a_folder(tmp_path, a="before = 1")
    index = CodeIndex.open(folder, store)
    a_folder(tmp_path, a="behind = 1")
    os.utime(folder / "a.py", ns=(1, 1))
    assert index.refresh().indexed == 1
    assert paths(index, "behind") == ["a.py"]


def test_opening_again_indexes_only_what_changed(tmp_path: Path, store: Path) -> None:
    folder = a_folder(tmp_path, a=PARSER, b=QUEUE)
    CodeIndex.open(folder, store)
    a_folder(tmp_path, c="needle = 1")
    done: list[tuple[int, int]] = []
    index = CodeIndex.open(folder, store, lambda *at: done.append(at))
    assert done == [(1, 1)]
    assert paths(index, "needle") == ["c.py"]
    assert paths(index, "header") == ["a.py"]


def test_two_openers_share_a_store_and_see_each_others_work(tmp_path: Path, store: Path) -> None:
    folder = a_folder(tmp_path, a=PARSER)
    first, second = CodeIndex.open(folder, store), CodeIndex.open(folder, store)
    a_folder(tmp_path, b="needle = 1")
    assert first.refresh().indexed == 1
    assert second.refresh() == Refresh(indexed=0, removed=0, unchanged=2, skipped=0, unreadable=0)
    assert paths(first, "needle") == paths(second, "needle") == ["b.py"]


def test_one_store_keeps_two_folders_apart(tmp_path: Path, store: Path) -> None:
    one = CodeIndex.open(a_folder(tmp_path / "1", a="needle = 1"), store)
    two = CodeIndex.open(a_folder(tmp_path / "2", b="needle = 2"), store)
    assert (paths(one, "needle"), paths(two, "needle")) == (["a.py"], ["b.py"])


@pytest.mark.parametrize("name", ["manifest.json", "index/meta.json"])
@pytest.mark.parametrize("damage", ["", "{", None])
def test_a_damaged_store_is_built_anew(
    tmp_path: Path, store: Path, name: str, damage: str | None
) -> None:
    folder = a_folder(tmp_path, a=PARSER)
    CodeIndex.open(folder, store)
    [home] = store.iterdir()
    (home / name).unlink()
    if damage is not None:
        (home / name).write_text(damage)
    assert paths(CodeIndex.open(folder, store), "header") == ["a.py"]


def test_a_refresh_that_breaks_off_leaves_the_index_usable(tmp_path: Path, store: Path) -> None:
    folder = a_folder(tmp_path, a=PARSER)
    index = CodeIndex.open(folder, store)
    a_folder(tmp_path, b="needle = 1", c="needle = 2")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index.refresh(stop)
    assert paths(index, "needle") == []
    assert paths(index, "header") == ["a.py"]
    assert index.refresh().indexed == 2
    assert sorted(paths(index, "needle")) == ["b.py", "c.py"]


def test_threads_may_search_while_the_index_is_refreshed(tmp_path: Path, store: Path) -> None:
    folder = a_folder(tmp_path, a=PARSER)
    index = CodeIndex.open(folder, store)
    found: list[list[str]] = []
    done = threading.Event()

    def search() -> None:
        while not done.is_set():
            found.append(paths(index, "header"))

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(5):
        a_folder(tmp_path, **{f"b{i}": QUEUE})
        index.refresh()
    done.set()
    for thread in threads:
        thread.join()
    assert all(names == ["a.py"] for names in found)


@pytest.fixture
def followed() -> Iterator[Callable[[CodeIndex], None]]:
    """Follows indexes, without a pause between two looks, until the test is over."""
    followers = []

    def follow(index: CodeIndex) -> None:
        followers.append(IndexFollower([index], every_s=0.01, busy_share=1.0))
        followers[-1].start()

    yield follow
    for follower in followers:
        follower.stop()


def until_found(index: CodeIndex, query: str, expected: list[str]) -> None:
    deadline_s = time.monotonic() + 60
    while paths(index, query) != expected and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert paths(index, query) == expected


def test_an_index_follows_its_folder_while_it_is_searched(
    tmp_path: Path, store: Path, followed: Callable[[CodeIndex], None]
) -> None:
    folder = a_folder(tmp_path, parser=PARSER)
    index = CodeIndex.open(folder, store)
    followed(index)
    a_folder(tmp_path, queue=QUEUE)
    until_found(index, "bounded queue", ["queue.py"])
    (folder / "parser.py").unlink()
    until_found(index, "header", [])


def test_an_index_follows_a_link_that_leads_to_another_release(
    tmp_path: Path, store: Path, followed: Callable[[CodeIndex], None]
) -> None:
    old, new = a_folder(tmp_path / "1", parser=PARSER), a_folder(tmp_path / "2", queue=QUEUE)
    current = tmp_path / "current"
    current.symlink_to(old)
    index = CodeIndex.open(current, store)
    (tmp_path / "next").symlink_to(new)
    (tmp_path / "next").replace(current)
    followed(index)
    until_found(index, "bounded queue", ["queue.py"])
    assert (paths(index, "header"), index.folder) == ([], new)


def test_a_folder_that_is_away_keeps_its_index_and_is_told_once(
    tmp_path: Path,
    store: Path,
    followed: Callable[[CodeIndex], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("cato"), "propagate", True)  # as before `logs.set_up`
    folder = a_folder(tmp_path, parser=PARSER)
    index = CodeIndex.open(folder, store)
    folder.rename(tmp_path / "away")
    with pytest.raises(OSError, match="code"):
        index.refresh()
    followed(index)
    deadline_s = time.monotonic() + 60
    while not caplog.records and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert [r.getMessage() for r in caplog.records] == [
        f"{folder}: the code index is not up to date: {folder}: must be a readable folder"
    ]
    assert paths(index, "header") == ["parser.py"]
    (tmp_path / "away").rename(folder)
    a_folder(tmp_path, queue=QUEUE)
    until_found(index, "bounded queue", ["queue.py"])


async def test_an_ingress_starts_without_a_folder_and_finds_its_code_when_it_is_there(
    tmp_path: Path, store: Path, followed: Callable[[CodeIndex], None]
) -> None:
    index = CodeIndex.open_if_possible(tmp_path / "code", store)
    await NodeRunner({"code": index}).warm_up()
    settings = RetrieveSettings("code", Fixed("header"), 3)
    with pytest.raises(NodeError, match="cannot be read: it is not built yet"):
        retrieve.run("find", settings, {}, {"code": index})
    a_folder(tmp_path, parser=PARSER)
    followed(index)
    deadline_s = time.monotonic() + 60
    found: list[str] = []
    while not found and time.monotonic() < deadline_s:
        with suppress(OSError):
            found = paths(index, "header")
        await asyncio.sleep(0.05)
    assert found == ["parser.py"]


def test_an_ingress_that_starts_while_the_folder_is_away_searches_the_last_index(
    tmp_path: Path, store: Path
) -> None:
    folder = a_folder(tmp_path, parser=PARSER)
    CodeIndex.open(folder, store)
    folder.rename(tmp_path / "away")
    assert paths(CodeIndex.open_if_possible(folder, store), "header") == ["parser.py"]


@settings(max_examples=15)  # each edit is a commit to disk
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["x", "y", None])), max_size=6))
def test_after_any_edits_the_index_shows_the_folder(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, str | None]]
) -> None:
    at = tmp_path_factory.mktemp("edits")
    (at / "code").mkdir()
    index = CodeIndex.open(at / "code", at / "store")
    truth: dict[str, str] = {}
    for tick, (name, word) in enumerate(edits):
        path = at / "code" / f"{name}.py"
        if word is None:
            path.unlink(missing_ok=True)
            truth.pop(path.name, None)
        else:
            path.write_text(f"needle_{word} = 1")
            os.utime(path, ns=(tick, tick))
            truth[path.name] = word
        index.refresh()
    for word in ("x", "y"):
        expected = sorted(name for name, w in truth.items() if w == word)
        assert sorted(paths(index, f"needle_{word}")[: len(expected)]) == expected


# The node


def test_the_node_gives_snippets_as_plain_values(shared: CodeIndex) -> None:
    wanted = RetrieveSettings("app", Fixed("http header"), top_k=1)
    [snippet] = shared.search("http header", 1)
    assert retrieve.run("examples", wanted, {}, {"app": shared}) == {
        "snippets": [{"path": "parser.py", "start_line": 1, "text": PARSER, "score": snippet.score}]
    }


def test_an_unknown_index_fails_the_node_and_names_those_there_are(shared: CodeIndex) -> None:
    wanted = RetrieveSettings("ap", Fixed("x"), top_k=1)
    with pytest.raises(NodeError, match="no code index named 'ap'; known: app, lib"):
        retrieve.run("examples", wanted, {}, {"lib": shared, "app": shared})


def test_a_template_that_fails_makes_the_node_fail(shared: CodeIndex) -> None:
    with pytest.raises(NodeError, match=r"'examples'.*'x' is undefined"):
        retrieve.run("examples", RetrieveSettings("app", Broken(), 1), {}, {"app": shared})
