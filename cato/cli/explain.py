"""`cato explain`: a task's SLA receipt, or the turns of a session."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from cato.cli.client import Url, answer, client, fail
from cato.cli.outputs import print_json
from cato.core.words import counted

# Leaves room for the other columns in an 80-column terminal.
BAR_CHARS = 20
STYLES = {
    "done": "green",
    "absent": "yellow",
    "failed": "red",
    "deadline_exceeded": "red",
    "cancelled": "magenta",
}


def explain(
    id: Annotated[
        str, typer.Argument(help="The x-request-id of an answer, or the name of a session.")
    ],
    session: Annotated[
        bool, typer.Option("--session", help="Show the whole session of that answer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: Url = None,
) -> None:
    """Show a task's SLA receipt: nodes, budgets, queues, replicas and reasons.

    With a session's name, which is in the receipts of its turns, or with --session: the turns of
    that session that are still stored.
    """
    if not id.strip():
        raise typer.BadParameter("give the x-request-id of an answer, or the name of a session")
    with client(url) as http:
        found = http.get(f"/v1/requests/{quote(id, safe='')}")
        if found.is_success and not session:
            receipt = answer(found)
            shown, plain = rendered(receipt), receipt
        else:
            name = answer(found).get("session") if found.is_success else id
            if not name:
                fail(f"{id} was not a turn of a session")
            turns = answer(http.get("/v1/usage", params={"session": name}))["data"]
            if not turns:
                answer(found)  # neither is known: fails with the server's message
                fail(f"no turns of {name} are stored any more")
            shown, plain = rendered_session(turns), {"session": name, "turns": turns}
    if as_json:
        print_json(plain)
    else:
        Console(markup=False).print(shown)


def rendered_session(turns: list[dict[str, Any]]) -> Group:
    """The turns of a session as a table, oldest first; times in seconds."""
    prompt = sum(t["prompt_tokens"] for t in turns)
    cached = sum(t["cached_prompt_tokens"] for t in turns)
    text = Text(turns[-1]["session"], style="bold")
    if parent := turns[-1]["parent"]:
        text.append(f", started by {parent}", style="not bold")
    hits = f", {100 * cached / prompt:.1f} % of {prompt:,} prompt tokens cached" if prompt else ""
    text.append(f"\n{counted(len(turns), 'turn')} stored{hits}", style="not bold")
    slack_s = turns[-1]["session_slack_s"]
    if slack_s is not None:
        word = "to spare" if slack_s >= 0 else "too late"
        style = "green" if slack_s >= 0 else "red"
        text.append(f"\nexpected to end with {abs(slack_s):.0f} s {word}", style=style)
    table = Table(header_style="bold", caption="times in s")
    for name in ("turn", "think", "prompt", "cached", "new", "TTFT"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("SLO", "replica", "where"):
        table.add_column(name, no_wrap=name == "SLO")
    for t in turns:
        missed = "late" if t["status"] == "done" else t["status"]
        table.add_row(
            _turn(t),
            _seconds(t["think_s"]),
            f"{t['prompt_tokens']:,}",
            f"{t['cached_prompt_tokens']:,}",
            f"{t['uncached_prompt_tokens']:,}",
            _seconds(t["ttft_s"]),
            verdict(t, missed),
            Text(t["replica"] or "-"),
            Text(_where(t), style="yellow" if t["placement"] == "moved" else ""),
        )
    why = [
        Text.assemble((f"turn {_turn(t)}, {_where(t)}: ", "bold"), t["reason"])
        for t in turns
        if t["reason"] and (t["placement"] != "home" or not t["met"])
    ]
    return Group(text, table, *why)


def _turn(turn: dict[str, Any]) -> str:
    kind = "" if turn["kind"] == "main" else f" {turn['kind']}"
    return f"{turn['turn']}{kind}"


def _where(turn: dict[str, Any]) -> str:
    """Whether the turn ran on the session's home replica; if moved, from which replica."""
    if turn["placement"] == "moved":
        return f"moved from {turn['home']}"
    return str(turn["placement"]) or "not placed"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def rendered(receipt: dict[str, Any]) -> Group:
    """A receipt as text and tables; times in milliseconds."""
    return Group(_head(receipt), _nodes(receipt), *_reasons(receipt), _totals(receipt))


def _head(receipt: dict[str, Any]) -> Text:
    text = Text()
    text.append(f"{receipt['request_id']}", style="bold")
    text.append(f"  {receipt['task']}  ")
    text.append(receipt["status"], style=STYLES.get(receipt["status"], ""))
    if receipt["simulated"]:
        text.append("  simulated", style="yellow")
    text.append(f"\n{receipt['metric']} ")
    text.append(f"{_ms(receipt['achieved_s'])} of {_ms(receipt['target_s'])} ms: ")
    excuse = receipt.get("excuse")
    text.append_text(verdict(receipt, "missed", weight="bold"))
    if receipt["problem"]:
        text.append(f"\n{receipt['problem']}", style="" if excuse else "red")
    if session := receipt.get("session"):
        text.append(f"\nturn {receipt['turn']} of session {session}")
        if receipt["parent"]:
            text.append(f", started by {receipt['parent']}")
    if changes := receipt.get("changes"):
        text.append(f"\nmade stable in the prompt: {', '.join(changes)}")
    if why := receipt.get("passed"):
        text.append(f"\nsent to the model as it is: {why}")
    for note in receipt["notes"]:
        text.append(f"\n{note}", style="yellow")
    return text


def verdict(run: dict[str, Any], missed: str, weight: str = "") -> Text:
    """Whether `run`, a receipt or a line of a list, met its SLO; `missed` is the word if not.

    An excused run neither met nor missed it, so it has no colour.
    """
    if excuse := run.get("excuse"):  # unknown to servers of earlier versions
        return Text(f"excused: {excuse.replace('_', ' ')}", weight)
    colour = "green" if run["met"] else "red"
    return Text("met" if run["met"] else missed, f"{weight} {colour}".strip())


def _nodes(receipt: dict[str, Any]) -> Table:
    table = Table(header_style="bold", caption="times in ms; * on the longest path")
    table.add_column("node", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("time", no_wrap=True, min_width=BAR_CHARS)
    for name in ("start", "budget", "spent", "queue"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, node in enumerate(receipt["nodes"]):
        llm = node["llm"] or {}
        budget = node["budget_s"] if node["budget_s"] is not None else node["limit_s"]
        is_over = budget is not None and node["spent_s"] > budget
        table.add_row(
            _name(node) + (" *" if i in receipt["path"] else ""),
            Text(node["status"], style=STYLES.get(node["status"], "")),
            Text(_bar(node, receipt["e2e_s"]), style="cyan"),
            _ms(node["started_s"]),
            _ms(budget),
            Text(_ms(node["spent_s"]), style="red" if is_over else ""),
            _ms(llm["queue_s"]) if llm else "",
        )
    return table


def _name(node: dict[str, Any]) -> str:
    name = str(node["node"])
    if node["round"] > 1:
        name += f" round {node['round']}"
    return name if node["item"] is None else f"{name}[{node['item']}]"


def _bar(node: dict[str, Any], e2e_s: float) -> str:
    """The node's start and duration within the run, as a waterfall bar."""
    scale = BAR_CHARS / e2e_s if e2e_s > 0 else 0.0
    start = min(BAR_CHARS - 1, int(node["started_s"] * scale))
    length = max(1, int(node["spent_s"] * scale + 0.5))
    return f"{' ' * start}{'█' * min(length, BAR_CHARS - start)}"


def _reasons(receipt: dict[str, Any]) -> list[Text]:
    """For each LLM call its replica and the reason, and what went wrong."""
    lines = []
    for node in receipt["nodes"]:
        llm = node["llm"] or {}
        replica = f" on {llm['replica']}" if llm.get("replica") else ""
        tries = llm.get("reasons", [])
        for number, reason in enumerate(tries, 1):
            attempt = f", attempt {number} of {len(tries)}" if len(tries) > 1 else ""
            where = replica if number == len(tries) else ""
            lines.append(Text.assemble((f"{_name(node)}{where}{attempt}: ", "bold"), reason))
        if tries and llm.get("service_s"):
            lines.append(Text(f"  {_predicted(llm)}", style="dim"))
        if node["problem"]:
            lines.append(Text.assemble((f"{_name(node)}: ", "bold"), (node["problem"], "red")))
    return lines


def _predicted(llm: dict[str, Any]) -> str:
    """A call's measured times beside the predicted ones."""
    bound = llm["length_bound_tokens"]
    tokens = counted(llm["output_tokens"], "token")
    if bound and llm.get("calls", 1) == 1:
        tokens += f" (at most {bound} nine times in ten)"
    return (
        f"engine {_ms(llm['service_s'])} ms, predicted {_ms(llm['predicted_service_s'])}; "
        f"queue {_ms(llm['queue_s'])} ms, predicted {_ms(llm['predicted_queue_s'])}; {tokens}"
    )


def _totals(receipt: dict[str, Any]) -> Text:
    return Text(
        f"end to end {_ms(receipt['e2e_s'])} ms, including {_ms(receipt['queue_s'])} queueing and "
        f"{_ms(receipt['overhead_s'])} CATO overhead; first token {_ms(receipt['ttft_s'])}, "
        f"per token {_ms(receipt['tpot_s'])}; {counted(receipt['output_tokens'], 'token')}"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
