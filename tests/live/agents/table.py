"""The table of agents in `deployments/clients/README.md`, made of what the tests found.

`make agents` writes `deployments/clients/agents.json` and the table; a unit test compares the two.
"""

from __future__ import annotations

import json
from typing import Any

from tests.live.agents.agent import EXAMPLES, Agent
from tests.live.agents.roster import AGENTS

RESULTS = EXAMPLES / "agents.json"
README = EXAMPLES / "README.md"
BEGIN, END = "<!-- agents: begin -->", "<!-- agents: end -->"

Results = dict[str, dict[str, Any]]
found: Results = {}


def note(agent: Agent, name: str, value: object) -> None:
    found.setdefault(agent.name, {"version": agent.source.version})[name] = value


def note_least(agent: Agent, name: str, value: float) -> None:
    known = found.get(agent.name, {}).get(name, value)
    note(agent, name, round(min(known, value), 3))


def note_most(agent: Agent, name: str, value: float) -> None:
    known = found.get(agent.name, {}).get(name, value)
    note(agent, name, round(max(known, value), 3))


def failed(agent: Agent, test: str) -> None:
    known = found.get(agent.name, {}).get("failed", [])
    if test not in known:
        note(agent, "failed", [*known, test])


def skipped(agent: Agent, why: str) -> None:
    found[agent.name] = {"version": agent.source.version, "skipped": why}


def write() -> None:
    """Write what this session found, and the table."""
    RESULTS.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    README.write_text(with_table(README.read_text(), found))


def with_table(text: str, results: Results) -> str:
    begin, rest = text.split(BEGIN)
    _, end = rest.split(END)
    return f"{begin}{BEGIN}\n{rendered(results)}{END}{end}"


def rendered(results: Results) -> str:
    head = (
        "client",
        "version",
        "file",
        "needs",
        "turns",
        "sub-agents",
        "session",
        "cached from turn 2",
        "count off by (turn 1, later)",
        "summary",
        "cut stream",
        "lost engine",
        "429",
        "does not work yet",
    )
    lines = [_row(head), _row(["---"] * len(head))]
    lines += [_row(_cells(agent, results[agent.name])) for agent in AGENTS if agent.name in results]
    return "\n".join(lines) + "\n"


def _cells(agent: Agent, result: dict[str, Any]) -> list[str]:
    known = [
        agent.title,
        agent.source.version,
        f"[`{agent.example}`]({agent.example})",
        agent.needs,
    ]
    if "skipped" in result:
        return [*known, f"not run: {result['skipped']}", *[""] * 9]

    def cell(name: str) -> str:
        return str(result.get(name, "–"))

    errors = [f"{100 * result[n]:.0f} %" for n in ("first_error", "error") if n in result]
    return [
        *known,
        cell("turns"),
        cell("helpers"),
        cell("session"),
        f"{100 * result['cached']:.0f} %" if "cached" in result else "–",
        ", ".join(errors) or "–",
        *(cell(name) for name in ("summary", "cut_stream", "lost_engine", "refusal")),
        "; ".join(result.get("failed", [])) or "–",
    ]


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the table of the results that are there."""
    results = json.loads(RESULTS.read_text())
    README.write_text(with_table(README.read_text(), results))


if __name__ == "__main__":
    main()
