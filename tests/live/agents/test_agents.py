"""Real agents work against CATO: everything they say reaches the engine, is counted and cached.

Each agent has two jobs of a script: ten turns with tools (or lines, for aider), in which its helper
works, one stream is cut on its way, one engine dies in the middle of an answer and one request is
refused; and tables that do not fit its context, so that it sums up. `make agents` runs all six;
other runs take the small ones.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cato.engines.scripted.vocabulary import Tekken
from tests.live.agents import table
from tests.live.agents.agent import AFTER, Agent
from tests.live.agents.conftest import Served
from tests.live.agents.installed import NotInstalledError
from tests.live.agents.parts import missing
from tests.live.agents.roster import AGENTS, SMALL
from tests.live.agents.runs import Call, Run, of_request, run_agent

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

ALL = "CATO_AGENTS" in os.environ
TESTED = [a for a in AGENTS if ALL or a.name in SMALL]
CACHED_SHARE = 0.95
BLOCK_TOKENS = 16  # of the scripted engine
# CATO's count of a prompt against the engine's: before it has seen the session's usage, and after.
FIRST_ERROR, LATER_ERROR = 0.25, 0.05
RETRY_AFTER_S = (3, 40)
TURNS = 10


@pytest.fixture(scope="session")
def run(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Agent, str], Run]:
    """Each job of each agent is done once."""

    @functools.cache
    def done(agent: Agent, job: str) -> Run:
        folder: Path = tmp_path_factory.mktemp(f"{agent.name}-{job}")
        return run_agent(agent, job, folder, served.url, served.log)

    def asked(agent: Agent, job: str) -> Run:
        try:
            agent.program()
        except NotInstalledError as why:
            table.skipped(agent, str(why))
            pytest.skip(f"{agent.title}: {why}")
        return done(agent, job)

    return asked


Asked = Callable[[Agent, str], Run]
each = pytest.mark.parametrize("agent", TESTED, ids=lambda agent: agent.name)


@each
def test_ten_turns_leave_the_files_as_scripted(run: Asked, agent: Agent) -> None:
    work = run(agent, "work")
    assert work.ran.status == 0, work
    steps = {call.note["step"] for call in work.main("work")}
    turns = len(work.main("work")) if agent.name == "aider" else len(steps)
    assert turns >= TURNS, work
    for name, text in AFTER.items():
        assert work.text(name).strip() == text.strip(), f"{name}\n{work}"
    table.note(agent, "turns", turns)


@each
def test_every_request_is_one_of_the_script(run: Asked, agent: Agent) -> None:
    for job in ("work", "tables"):
        unknown = [str(c) for c in run(agent, job).calls if not c.note["script"]]
        assert not unknown, unknown


@each
def test_nothing_is_lost_on_the_way_to_the_engine(run: Asked, agent: Agent) -> None:
    for job in ("work", "tables"):
        for call in run(agent, job).calls:
            lost = missing(call.exchange.body, call.note["prompt"])
            assert not lost, f"{call}: {len(lost)} parts, the first: {lost[:3]}"


@each
def test_receipts_name_the_session_and_count_its_turns(run: Asked, agent: Agent) -> None:
    work = run(agent, "work")
    main = work.main("work")
    sessions = {call.receipt["session"] for call in main}
    assert len(sessions) == 1, sessions
    assert sessions != {""}
    numbers = [call.receipt["turn"] for call in main]
    # An answer that was cut and its rest are two where the client keeps both.
    assert numbers == sorted(numbers), numbers
    assert numbers[-1] - numbers[0] >= TURNS - 1
    assert all(call.receipt["turn_kind"] == "main" for call in main)
    for call in work.script("title"):
        assert call.receipt["turn_kind"] == "title", call
    table.note(agent, "session", "its own id" if agent.names_session else "found by the prompt")


@each
def test_helpers_have_sessions_of_their_own_under_their_parent(run: Asked, agent: Agent) -> None:
    if not agent.helpers:
        pytest.skip(f"{agent.title} has no helpers")
    work = run(agent, "work")
    helpers = work.script("helper")
    main = {call.receipt["session"] for call in work.main("work")}
    sessions = {call.receipt["session"] for call in helpers}
    assert len(helpers) >= 2 * agent.helpers, [str(c) for c in helpers]
    assert not sessions & main
    assert len(sessions) == agent.helpers, sessions
    if agent.names_session:
        assert {call.receipt["parent"] for call in helpers} == main
    table.note(agent, "helpers", agent.helpers)


@each
def test_helpers_find_their_own_cache(run: Asked, agent: Agent) -> None:
    if not agent.helpers:
        pytest.skip(f"{agent.title} has no helpers")
    work = run(agent, "work")
    by_session: dict[str, list[Call]] = {}
    for call in work.script("helper"):
        by_session.setdefault(call.receipt["session"], []).append(call)
    shares = [share for calls in by_session.values() for share in cached_shares(work, calls)]
    why = [(c.receipt["session"], c.llm["reasons"]) for calls in by_session.values() for c in calls]
    assert min(shares, default=1.0) >= CACHED_SHARE, f"{[f'{s:.3f}' for s in shares]} {why}"


@each
def test_what_was_computed_for_a_turn_is_cached_in_the_next(run: Asked, agent: Agent) -> None:
    for job in ("work", "tables"):
        shares = cached_shares(run(agent, job), run(agent, job).main(job))
        assert shares, job
        if agent.appends:
            assert min(shares) >= CACHED_SHARE, [f"{share:.3f}" for share in shares]
        table.note_least(agent, "cached", min(shares))


@each
def test_what_a_prompt_repeats_of_the_one_before_is_cached(run: Asked, agent: Agent) -> None:
    tokens = Tekken()
    for job in ("work", "tables"):
        for before, call in consecutive(run(agent, job), run(agent, job).main(job)):
            same = _common_start(before.note["prompt"], call.note["prompt"])
            repeated = len(tokens.encode(same))
            cached = call.note["cached_tokens"]
            assert cached >= CACHED_SHARE * repeated - BLOCK_TOKENS, f"{call}: {cached}, {repeated}"


def _common_start(first: str, second: str) -> str:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(character for character, _ in same)


def consecutive(run: Run, calls: Sequence[Call]) -> Iterator[tuple[Call, Call]]:
    """Each turn from the second, after the one before.

    An engine that has died has lost its cache: the turn after its death is left out.
    """
    for before, call in itertools.pairwise(calls):
        notes = run.notes[run.notes.index(before.note) : run.notes.index(call.note)]
        if all(note["outcome"] != "died" for note in notes):
            yield before, call


def cached_shares(run: Run, calls: Sequence[Call]) -> list[float]:
    """From turn 2: cached prompt tokens as a share of the prompt before."""
    return [
        call.note["cached_tokens"] / before.note["prompt_tokens"]
        for before, call in consecutive(run, calls)
    ]


@each
def test_the_client_is_told_what_was_cached(run: Asked, agent: Agent) -> None:
    work = run(agent, "work")
    for call in work.main("work"):
        if call.asks_for_counts:
            assert call.cached == call.note["cached_tokens"], call
        # An answer that went on elsewhere has a note of each engine; the receipt is of the first.
        first = next(n for n in work.notes if of_request(n, call.exchange.request_id))
        assert call.llm["cached_prompt_tokens"] == first["cached_tokens"], call
        assert call.llm["prompt_tokens"] == first["prompt_tokens"], call


@each
def test_prompts_are_counted_as_the_engine_counts_them(run: Asked, agent: Agent) -> None:
    for job in ("work", "tables"):
        first, *later = [call.estimate for call in run(agent, job).main(job)]
        assert abs(first - 1) <= FIRST_ERROR, f"{job}, turn 1: {first:.3f}"
        wrong = [f"{e:.3f}" for e in later if abs(e - 1) > LATER_ERROR]
        assert not wrong, f"{job}: {wrong} of {[f'{e:.3f}' for e in later]}"
        table.note_most(agent, "first_error", abs(first - 1))
        table.note_most(agent, "error", max(abs(e - 1) for e in later))


@each
def test_a_cut_stream_is_asked_for_again_and_finds_its_cache(run: Asked, agent: Agent) -> None:
    work = run(agent, "work")
    cut = [call for call in work.calls if call.exchange.was_cut]
    assert len(cut) == 1, work
    place = work.calls.index(cut[0])
    again = [
        c for c in work.calls[place + 1 :] if c.receipt["session"] == cut[0].receipt["session"]
    ]
    assert again, work
    assert again[0].note["cached_tokens"] >= CACHED_SHARE * cut[0].note["prompt_tokens"], again[0]
    table.note(agent, "cut_stream", "goes on")


@each
def test_an_engine_that_dies_in_the_middle_costs_no_turn(run: Asked, agent: Agent) -> None:
    work = run(agent, "work")
    assert [n["outcome"] for n in work.notes].count("died") == 1, work
    table.note(agent, "lost_engine", "goes on")


@each
def test_a_refusal_is_said_so_that_the_client_waits(run: Asked, agent: Agent) -> None:
    work = run(agent, "work")
    assert [n["outcome"] for n in work.notes].count("refused") == 1, work
    refused = [e for e in work.exchanges if e.status >= 400 and e.method == "POST"]
    assert [e.status for e in refused] == [429] * len(refused), [str(e) for e in refused]
    low_s, high_s = RETRY_AFTER_S
    for exchange in refused:
        wait_s = float(exchange.answer_headers.get("retry-after", "nan"))
        assert low_s <= wait_s <= high_s, exchange.answer_headers
    table.note(agent, "refusal", "waits" if refused else "not seen")


@each
def test_a_full_context_is_summed_up_and_the_work_goes_on(run: Asked, agent: Agent) -> None:
    tables = run(agent, "tables")
    assert tables.ran.status == 0, tables
    summaries = tables.script("summary")
    assert summaries, tables
    assert {call.receipt["turn_kind"] for call in summaries} == {"compaction"}
    assert tables.text("after.py").strip() == "AFTER = 1", tables
    table.note(agent, "summary", "goes on")
