"""Texts that a grammar takes minutes for are given up, and cost nobody else anything."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from nodes_kit import Fixed

from cato.core.workflow import AnalyzeSettings, ValidateSettings
from cato.lab.chaos.hostile import MINUTES, PIECES, repeated
from cato.serve.lanes import Lane
from cato.serve.nodes import analyze, parsing, validate
from cato.serve.nodes.languages import LANGUAGES

SOUND = {"what": "analyze", "source": "def f(): pass\n", "language": "python", "cursor": 0}


def a_job(language: str, source: str) -> dict[str, object]:
    return {"what": "analyze", "source": source, "language": language, "cursor": len(source) // 2}


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane(parsing.WORKER, 0.2, wait_s=600.0)
    yield lane
    lane.close()


def parser_of(lane: Lane) -> psutil.Process:
    """The process that parses, a child of the one that starts it again."""
    assert lane.pid is not None
    (parser,) = psutil.Process(lane.pid).children()
    return parser


async def test_a_text_that_takes_minutes_ends_and_the_next_is_parsed(lane: Lane) -> None:
    for language, piece in MINUTES:
        started_s = time.process_time()
        assert await lane.run(a_job(language, repeated(piece))) is None
        assert time.process_time() - started_s < 1.0, "the work is another process'"
        found = await lane.run(SOUND)
        assert found is not None
        assert found["definitions"]


@pytest.mark.parametrize("language", LANGUAGES)
async def test_no_text_of_a_grammars_corpus_takes_more_than_its_time(
    lane: Lane, language: str
) -> None:
    await lane.run(SOUND)
    for piece in PIECES[language]:
        text = repeated(piece)
        before = parser_of(lane)
        used_s = sum(before.cpu_times()[:2])
        found = await lane.run(a_job(language, text))
        await lane.run(SOUND)
        after = parser_of(lane)
        assert (found is None) == (after.pid != before.pid)
        if found is not None:
            assert sum(after.cpu_times()[:2]) - used_s < 0.5
            assert "".join(found["chunks"]) == text  # type: ignore[arg-type]


async def test_nodes_say_that_a_hostile_text_was_not_parsed() -> None:
    text = repeated("A<")
    code, language = Fixed(text), Fixed("java")
    found = await analyze.run("parts", AnalyzeSettings(code, language), {})
    assert (found["ok"], found["language"]) == (False, "java")
    assert "".join(found["chunks"]) == text  # type: ignore[arg-type]
    checked = await validate.run("check", ValidateSettings(code, language), {})
    assert checked == {"ok": True, "errors": [], "code": text, "checked": False}


async def test_what_waited_for_too_long_is_not_begun() -> None:
    lane = Lane(parsing.WORKER, 0.2, wait_s=-1.0)
    assert await lane.run(SOUND) is None
    assert lane.begun == 0
    lane.close()


async def test_what_is_cancelled_before_its_turn_is_not_begun(lane: Lane) -> None:
    first = asyncio.create_task(lane.run(a_job("java", repeated("A<"))))
    second = asyncio.create_task(lane.run(SOUND))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([first, second])
    await lane.run(SOUND)
    assert lane.begun == 2


async def test_a_parser_that_died_while_it_had_nothing_to_do_is_not_noticed(lane: Lane) -> None:
    job = {**SOUND, "source": "def g(): pass\n"}
    for victim in ("parser", "its parent"):
        assert await lane.run(SOUND) is not None
        pid = parser_of(lane).pid if victim == "parser" else lane.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        found = await lane.run(job)
        assert found is not None, victim
        assert found["identifiers"] == ["g"]


async def test_an_owner_that_ends_takes_its_parsers_along(lane: Lane) -> None:
    await lane.run(SOUND)
    assert lane.pid is not None
    worker, parser = psutil.Process(lane.pid), parser_of(lane)
    lane.close()
    gone, _ = psutil.wait_procs([worker, parser], timeout=20)
    assert len(gone) == 2
