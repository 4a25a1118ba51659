"""`cato keys usage` and `cato keys audit`: what was used, and who changed what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from cato.cli.client import ends_on
from cato.cli.store import Store, moment, opened_store
from cato.config.deploy_file import load_deploy_file
from cato.core.errors import ConfigError, InputError
from cato.core.prices import NO_PRICES
from cato.core.tenancy import LAST_DAY
from cato.serve.access.administration import MAX_LIMIT
from cato.serve.access.usage import GROUPS, SUMS, as_csv, columns, days_of, groups_of, summed


def usage(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    by: Annotated[str, typer.Option(help="Columns to group by, such as day,model.")] = ",".join(
        GROUPS
    ),
    since: Annotated[str | None, typer.Option(help="The first day, such as 2026-11-01.")] = None,
    until: Annotated[str, typer.Option(help="The last day.")] = LAST_DAY,
    deployment: Annotated[
        str | None, typer.Option(help="The deployment file with the `prices` and the store.")
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    store: Store = None,
) -> None:
    """Show usage and, with --deployment, what it costs."""
    with ends_on(InputError):
        groups = groups_of(by, "--by")
        days = days_of(since, until, "--")
    prices, bases = NO_PRICES, dict[str, str]()
    if deployment is not None:
        with ends_on(ConfigError):
            file = load_deploy_file(deployment)
        prices, store = file.ingress.prices, store or file.topology.store
        pools = file.topology.pools
        bases = {a.name: p.model.name for p in pools for a in p.model.adapters}
    with opened_store(store) as opened:
        of_all, held = opened.usage(None, *days), opened.card_time(*days)
        bases |= {a.adapter.name: a.base for a in opened.adapters()}
    used = [u for u in of_all if tenant in (None, u.tenant)]
    rows = summed(used, prices.costs(used, of_all, held, bases), groups)
    if csv:
        print(as_csv(rows, columns(groups)), end="")
        return
    heads = ("requests", "prompt", "cached", "output", prices.currency or "cost")
    table = Table(*groups, *heads)
    for row in rows:
        cost = "-" if row["cost"] is None else f"{row['cost']:,.2f}"
        table.add_row(*(str(row[g]) for g in groups), *(f"{row[s]:,}" for s in SUMS), cost)
    Console(markup=False).print(table)


def audit(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=MAX_LIMIT, help="Number of entries, newest first.")
    ] = 50,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
    store: Store = None,
) -> None:
    """Show administrative changes, newest first: who changed what, before and after."""
    with opened_store(store) as opened:
        entries = opened.audit(tenant, limit)
    if as_json:
        for entry in entries:
            print(json.dumps(asdict(entry)))
        return
    narrow = (Column(name, no_wrap=True) for name in ("at", "action"))
    table = Table(*narrow, "who", "tenant", "target", "before", "after")
    for e in entries:
        table.add_row(
            moment(e.at_s), e.action, e.who, e.tenant, e.target, *_difference(e.before, e.after)
        )
    Console(markup=False).print(table)


def _difference(
    before: Mapping[str, object] | None, after: Mapping[str, object] | None
) -> tuple[str, str]:
    """The fields that differ, as text for each side."""
    names = sorted((before or {}).keys() | (after or {}).keys())
    changed = [n for n in names if (before or {}).get(n) != (after or {}).get(n)]
    old, new = (
        "-" if side is None else ", ".join(f"{n}={side[n]}" for n in changed if n in side)
        for side in (before, after)
    )
    return old, new
