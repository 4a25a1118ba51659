"""The table of agents says what the last run of `make agents` found."""

from __future__ import annotations

import json

from tests.live.agents.roster import AGENTS
from tests.live.agents.table import README, RESULTS, rendered, with_table


def test_the_table_of_agents_matches_the_results() -> None:
    text = README.read_text()
    assert text == with_table(text, json.loads(RESULTS.read_text()))


def test_the_results_are_of_the_versions_that_are_tested() -> None:
    results = json.loads(RESULTS.read_text())
    assert set(results) == {agent.name for agent in AGENTS}
    for agent in AGENTS:
        assert results[agent.name]["version"] == agent.source.version


def test_what_an_agent_cannot_do_stands_in_the_table() -> None:
    results = {"qwen": {"version": "1", "failed": ["nothing is lost"], "cached": 0.994}}
    row = rendered(results).splitlines()[-1]
    assert "nothing is lost" in row
    assert "99 %" in row
