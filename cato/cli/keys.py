"""`cato keys`: API keys, tenant limits, usage and the audit log.

The commands write to the metadata store; a running deployment picks up a change within seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from cato.cli.client import fail, this_user
from cato.config.deploy_file import load_deploy_file
from cato.config.paths import resolve
from cato.core.administration import (
    AddKey,
    DeleteKey,
    EndKey,
    OpenWithoutKeys,
    RotateKey,
    SetTenant,
)
from cato.core.errors import ConfigError
from cato.core.prices import NO_PRICES
from cato.core.tenancy import LAST_DAY, SLA_CLASSES, ApiKey, Role, Tenant
from cato.core.topology import model_called
from cato.serve.access.keys import new_key
from cato.serve.access.usage import GROUPS, SUMS, as_csv, columns, summed
from cato.serve.ingress.bounds import NAMES
from cato.store.errors import StoreError
from cato.store.location import STORE_VARIABLE, default_location
from cato.store.store import MetadataStore
from cato.workflows.load import load_workflows

app = typer.Typer(
    no_args_is_help=True,
    help="Make, list, rotate and revoke API keys; limit tenants; show usage and changes.",
)

Store = Annotated[
    str | None,
    typer.Option(
        help=f"The metadata store, as in `store` of the deployment file: a file or a "
        f"postgresql:// URL. Default: {STORE_VARIABLE}, else this host's own."
    ),
]
Id = Annotated[str, typer.Argument(help="The key's id, as `cato keys list` shows it.")]
Limit = Annotated[int | None, typer.Option(min=1, show_default="no limit")]


@app.command()
def create(
    tenant: Annotated[str, typer.Option(help="The tenant, which limits and usage are counted by.")],
    name: Annotated[str, typer.Option(help="What the key is for.")] = "",
    sla: Annotated[
        str, typer.Option(help=f"The most urgent SLA class it may claim: {', '.join(SLA_CLASSES)}.")
    ] = SLA_CLASSES[0],
    task: Annotated[
        list[str] | None,
        typer.Option(help="A task it may run, as named by GET /v1/tasks. Default: all."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model it may call. Default: all.")
    ] = None,
    role: Annotated[
        Role,
        typer.Option(
            help="A tenant admin also manages its tenant's keys; an operator manages and sees all."
        ),
    ] = Role.USER,
    default_task: Annotated[
        str, typer.Option(help="The task of conversations that name none.")
    ] = "",
    bound: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help=f"Override a limit on what one call may ask of an engine: {', '.join(NAMES)}.",
        ),
    ] = None,
    session_minutes: Annotated[
        float | None,
        typer.Option(min=0.01, help="Target time from a session's first call to its end."),
    ] = None,
    deployment: Annotated[
        str | None, typer.Option(help="The deployment file with these tasks and models.")
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Do not check the names of tasks and models.")
    ] = False,
    days: Annotated[float | None, typer.Option(min=0, help="Days until the key expires.")] = None,
    store: Store = None,
) -> None:
    """Create a key and print it; it is not shown again."""
    if not tenant.strip():
        fail("--tenant must not be empty")
    if sla not in SLA_CLASSES:
        fail(f"--sla must be one of {', '.join(SLA_CLASSES)}")
    tasks = tuple(task or ())
    if tasks and default_task and default_task not in tasks:
        fail(f"--default-task {default_task} must be one of the key's tasks (--task)")
    named_tasks = tuple(filter(None, (*tasks, default_task)))
    if not unchecked and (named_tasks or model):
        _check_names(deployment, store, named_tasks, tuple(model or ()))
    now_s = time.time()
    secret, id, digest = new_key()
    key = ApiKey(
        id, digest, tenant, name, sla, tasks, tuple(model or ()), default_task, now_s,
        None if days is None else now_s + days * 86_400, role,
        tuple(map(_bound, bound or ())),
        None if session_minutes is None else session_minutes * 60,
    )  # fmt: skip
    with _opened(store) as opened:
        opened.administer(AddKey(key), this_user())
    _show_once(secret)


@app.command("list")
def list_keys(store: Store = None) -> None:
    """Show all keys and tenants; secrets are not stored and cannot be shown."""
    with _opened(store) as opened:
        keys, tenants = opened.api_keys(), opened.tenants()
    table = Table(
        Column("id", no_wrap=True),
        "tenant",
        "name",
        "role",
        "sla",
        "tasks",
        "models",
        "made",
        "until",
    )
    for key in keys:
        table.add_row(
            key.id, key.tenant, key.name, key.role.value, key.sla_class,
            ", ".join(key.tasks) or "all", ", ".join(key.models) or "all",
            _moment(key.created_at_s), _until(key),
        )  # fmt: skip
    limits = Table("tenant", "requests/min", "tokens/min", "tokens/month", "weight")
    for tenant in tenants:
        numbers = (tenant.requests_per_minute, tenant.tokens_per_minute, tenant.tokens_per_month)
        limits.add_row(
            tenant.name, *("-" if n is None else f"{n:,}" for n in numbers), f"{tenant.weight:g}"
        )
    Console().print(table, *([limits] if tenants else []))


@app.command()
def revoke(id: Id, store: Store = None) -> None:
    """Revoke a key now."""
    with _opened(store) as opened:
        _known(opened.administer(EndKey(id, time.time()), this_user()), id)
        others = any(key.is_valid(time.time()) for key in opened.api_keys())
    print(f"{id} is revoked")
    if not others:
        note = (
            "It was the last valid key: every request is refused now, also from this machine. "
            "`cato keys create` makes another; `cato keys open` serves this machine without one."
        )
        Console(stderr=True).print(note, style="yellow")


@app.command()
def delete(id: Id, store: Store = None) -> None:
    """Delete a key that is revoked or expired; its usage is kept."""
    with _opened(store) as opened:
        key = _known(next((k for k in opened.api_keys() if k.id == id), None), id)
        if key.is_valid(time.time()):
            fail(f"{id} is valid: revoke it with `cato keys revoke {id}` first")
        opened.administer(DeleteKey(id), this_user())
    print(f"{id} is deleted; if no key is left, every request is still refused")


@app.command("open")
def open_(store: Store = None) -> None:
    """Serve clients on this machine only, without a key; deletes revoked and expired keys."""
    with _opened(store) as opened:
        valid = [key.id for key in opened.api_keys() if key.is_valid(time.time())]
        if valid:
            fail(f"some keys are valid; revoke them first: {', '.join(valid)}")
        opened.administer(OpenWithoutKeys(), this_user())
    print("a running deployment serves this machine without a key within seconds")


@app.command()
def rotate(
    id: Id,
    hours: Annotated[float, typer.Option(min=0, help="Hours that the old key stays valid.")] = 24,
    store: Store = None,
) -> None:
    """Replace a key with a new one that has its rights and never expires; print it once."""
    now_s = time.time()
    secret, new_id, digest = new_key()
    with _opened(store) as opened:
        old = _known(next((k for k in opened.api_keys() if k.id == id), None), id)
        if not old.is_valid(now_s):
            fail(f"{id} is revoked or expired; make a new key with `cato keys create`")
        new = replace(old, id=new_id, digest=digest, created_at_s=now_s, expires_at_s=None)
        opened.administer(RotateKey(id, new, now_s + hours * 3600), this_user())
    _show_once(secret)


@app.command()
def limit(
    tenant: Annotated[str, typer.Argument(help="The tenant.")],
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    tokens_per_month: Limit = None,
    weight: Annotated[
        float, typer.Option(min=0.01, help="Its share of a full pool, relative to other tenants.")
    ] = 1.0,
    store: Store = None,
) -> None:
    """Set a tenant's limits, replacing all earlier ones; tokens count prompts and outputs."""
    with _opened(store) as opened:
        limits = Tenant(tenant, requests_per_minute, tokens_per_minute, tokens_per_month, weight)
        opened.administer(SetTenant(limits), this_user())


@app.command()
def usage(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    by: Annotated[str, typer.Option(help="Columns to group by, such as day,model.")] = ",".join(
        GROUPS
    ),
    since: Annotated[str, typer.Option(help="The first day, such as 2026-11-01.")] = "",
    until: Annotated[str, typer.Option(help="The last day.")] = LAST_DAY,
    deployment: Annotated[
        str | None, typer.Option(help="The deployment file with the `prices` and the store.")
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    store: Store = None,
) -> None:
    """Show usage and, with --deployment, what it costs."""
    groups = tuple(by.split(","))
    if not set(groups) <= set(GROUPS):
        fail(f"--by takes a list from {','.join(GROUPS)}")
    prices, bases = NO_PRICES, dict[str, str]()
    if deployment is not None:
        try:
            file = load_deploy_file(deployment)
        except ConfigError as error:
            fail(str(error))
        prices, store = file.ingress.prices, store or file.topology.store
        pools = file.topology.pools
        bases = {a.name: p.model.name for p in pools for a in p.model.adapters}
    with _opened(store) as opened:
        of_all, held = opened.usage(None, since, until), opened.card_time(since, until)
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
    Console().print(table)


@app.command()
def audit(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of entries, newest first.")] = 50,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
    store: Store = None,
) -> None:
    """Show administrative changes, newest first: who changed what, before and after."""
    with _opened(store) as opened:
        entries = opened.audit(tenant, limit)
    if as_json:
        for entry in entries:
            print(json.dumps(asdict(entry)))
        return
    narrow = (Column(name, no_wrap=True) for name in ("at", "action"))
    table = Table(*narrow, "who", "tenant", "target", "before", "after")
    for e in entries:
        table.add_row(
            _moment(e.at_s), e.action, e.who, e.tenant, e.target, *_difference(e.before, e.after)
        )
    Console().print(table)


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


def _bound(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if name not in NAMES or not number.isdecimal():
        fail(f"--bound takes NAME=NUMBER, with one of {', '.join(NAMES)}; not {text!r}")
    return name, int(number)


def _check_names(
    deployment: str | None, store: str | None, tasks: tuple[str, ...], models: tuple[str, ...]
) -> None:
    """End the command when the deployment has no such task or model: a key for a misspelt name
    would be refused everything, and would suddenly work if the name were added later."""
    if deployment is None:
        fail("give the deployment file with --deployment, or add --unchecked")
    try:
        file = load_deploy_file(deployment)
        known_tasks = load_workflows(resolve(file.ingress.workflows_dir))
    except ConfigError as error:
        fail(str(error))
    for task in tasks:
        if task not in known_tasks:
            fail(f"no task {task!r}; known: {', '.join(sorted(known_tasks))}")
    if not models:
        return
    with _opened(store or file.topology.store) as opened:
        added = {m.hosted.model.name: m.hosted.model for m in opened.models()}
        adapters = [n for a in opened.adapters() for n in (a.adapter.name, *a.adapter.aliases)]
    known_models = [p.model for p in file.topology.pools]
    known_models += [h.model for s in file.topology.shared_pools for h in s.models]
    known_models += added.values()
    for name in models:
        if model_called(name, known_models) is None and name not in adapters:
            names = sorted({n for m in known_models for n in m.names} | set(adapters))
            fail(f"no model {name!r}; known: {', '.join(names)}")


@contextmanager
def _opened(location: str | None) -> Generator[MetadataStore, None, None]:
    """The opened store; ends the command with the store's error when it cannot be used."""
    try:
        store = MetadataStore.open(location or default_location())
        try:
            yield store
        finally:
            store.close()
    except StoreError as error:
        fail(str(error))


def _known(key: ApiKey | Tenant | None, id: str) -> ApiKey:
    if not isinstance(key, ApiKey):
        fail(f"no key has the id {id}; see `cato keys list`")
    return key


def _show_once(secret: str) -> None:
    print(secret)
    note = "Save it: it is not shown again. A running deployment accepts it within seconds."
    Console(stderr=True).print(note, style="yellow")


def _until(key: ApiKey) -> str:
    if key.expires_at_s is None:
        return "-"
    return _moment(key.expires_at_s) + ("" if key.is_valid(time.time()) else " (ended)")


def _moment(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
