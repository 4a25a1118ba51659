"""`cato rollout`: replace a model by a new version step by step, under the same name.

The commands call a running deployment; where it has API keys they need an operator's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.text import Text

from cato.cli.client import Url, answer, client
from cato.cli.simulation import a_table
from cato.core.rollout_rule import MAX_HOLD_S, RolloutRule

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Give a new version of a model a growing share of its sessions.",
)

PATH = "/v1/admin/rollouts"
DEFAULT = RolloutRule()
PHASES = {"promoted": "green", "rolled-back": "red"}

Json = dict[str, Any]


def _fraction(help: str) -> Any:
    """An option from 0 to 1."""
    return typer.Option(min=0.0, max=1.0, help=help)


Name = Annotated[str, typer.Argument(help="The name that clients use.")]


@app.command()
def start(
    name: Name,
    canary: Annotated[str, typer.Option(help="The model to roll out; must be running already.")],
    url: Url = None,
    share: Annotated[
        list[float] | None,
        _fraction(
            "The canary's share of the sessions in one step, as a fraction; repeat for each "
            f"step. Default: {' and '.join(f'{s:g}' for s in DEFAULT.shares)}. After the last step "
            "it gets all.",
        ),
    ] = None,
    shadow: Annotated[
        float,
        _fraction(
            "First copy this share of the calls to the canary and discard the answers; 0 "
            "skips this step.",
        ),
    ] = DEFAULT.shadow_share,
    min_calls: Annotated[
        int, typer.Option(min=1, help="Fewest calls of each model in a step.")
    ] = DEFAULT.min_calls,
    max_calls: Annotated[
        int, typer.Option(min=1, help="Most calls of the canary in a step.")
    ] = DEFAULT.max_calls,
    hold: Annotated[
        float, typer.Option(min=0.0, max=MAX_HOLD_S, help="Shortest step, in seconds.")
    ] = DEFAULT.hold_s,
    min_shown: Annotated[
        int,
        typer.Option(min=1, help="Shown completions of each model before acceptance is compared."),
    ] = DEFAULT.min_shown,
    miss_limit: Annotated[
        float,
        _fraction("Allowed increase of SLO misses, as a fraction of all calls."),
    ] = DEFAULT.miss_limit,
    error_limit: Annotated[
        float,
        _fraction("Allowed increase of errors, as a fraction of all calls."),
    ] = DEFAULT.error_limit,
    ttft_limit: Annotated[
        float,
        _fraction(
            "Allowed increase of the mean TTFT, as a fraction of the stable model's.",
        ),
    ] = DEFAULT.ttft_limit,
    acceptance_limit: Annotated[
        float,
        _fraction(
            "Allowed increase of completions that are not accepted, as a fraction of those shown.",
        ),
    ] = DEFAULT.acceptance_limit,
) -> None:
    """Start a rollout. The limits say how much worse than the stable model the canary may be."""
    rule = {
        "shares": share or list(DEFAULT.shares),
        "shadow_share": shadow,
        "min_calls": min_calls,
        "max_calls": max_calls,
        "hold_s": hold,
        "min_shown": min_shown,
        "miss_limit": miss_limit,
        "error_limit": error_limit,
        "ttft_limit": ttft_limit,
        "acceptance_limit": acceptance_limit,
    }
    _ordered(url, "", {"name": name, "canary": canary, "rule": rule})


@app.command()
def status(url: Url = None) -> None:
    """Show all rollouts: the step, both models' calls, and the rule's verdict."""
    with client(url) as http:
        rollouts = answer(http.get(PATH))["data"]
        shown = rendered(rollouts) if rollouts else "no rollout"
    Console(markup=False).print(shown)


@app.command()
def promote(name: Name, url: Url = None) -> None:
    """Go to the next step now; after the last step the canary gets all sessions."""
    with client(url) as http:
        known = {r["name"]: r for r in answer(http.get(PATH))["data"]}
    # HAProxy sends a request again if an ingress dies before its answer: the order names its step.
    stage = known[name]["stage"] if name in known else None
    _ordered(url, "/promote", {"name": name, "stage": stage})


@app.command()
def rollback(name: Name, url: Url = None) -> None:
    """Return all sessions to the stable model; running streams finish where they are."""
    _ordered(url, "/rollback", {"name": name})


def _ordered(url: str | None, path: str, body: Json) -> None:
    with client(url) as http:
        shown = rendered([answer(http.post(PATH + path, json=body))])
    Console(markup=False).print(shown)


def rendered(rollouts: Sequence[Json]) -> Group:
    """Rollouts as a table."""
    table = a_table("Rollouts")
    for column in ("name", "stable", "canary", "phase"):
        table.add_column(column, no_wrap=True)
    for column in ("share", "calls", "for"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("rule's verdict", min_width=20)
    for r in rollouts:
        minutes = (time.time() - r["since_s"]) / 60
        table.add_row(
            r["name"],
            r["stable"],
            r["canary"],
            Text(r["phase"], PHASES.get(r["phase"], "yellow")),
            f"{100 * r['share']:g} %",
            f"{r['stable_counts']['calls']} + {r['canary_counts']['calls']}",
            f"{minutes:.0f} min",
            Text(r["outlook"]),
        )
    return Group(table)
