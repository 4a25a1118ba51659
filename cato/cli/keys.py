"""`cato keys`: API keys, tenant limits, usage and the audit log.

The commands write to the metadata store; a running deployment picks up a change within seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from cato.cli.client import ends_on, fail, this_user
from cato.cli.keys_history import audit, usage
from cato.cli.store import Store, has_store, moment, opened_store
from cato.config.deploy_file import DeployFile, load_deploy_file
from cato.config.paths import resolve
from cato.core.administration import (
    AddKey,
    DeleteKey,
    EndKey,
    OpenWithoutKeys,
    RotateKey,
    SetTenant,
    shown_key,
)
from cato.core.errors import ConfigError
from cato.core.tenancy import SLA_CLASSES, ApiKey, Role, Tenant
from cato.core.topology import model_called
from cato.serve.access.administration import MAX_DAYS, MAX_LIMIT, MAX_WEIGHT, TENANT_NAME
from cato.serve.access.keys import new_key
from cato.serve.ingress.bounds import NAMES
from cato.workflows.load import load_workflows

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Make, list, rotate and revoke API keys; limit tenants; show usage and changes.",
)

Id = Annotated[str, typer.Argument(help="The key's id, as `cato keys list` shows it.")]


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
        typer.Option(
            min=0.01,
            max=1440 * MAX_DAYS,
            help="Target time from a session's first call to its end.",
        ),
    ] = None,
    deployment: Annotated[
        str | None,
        typer.Option(help="The deployment file with these tasks and models, and the store."),
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Do not check the names of tasks and models.")
    ] = False,
    days: Annotated[
        float | None,
        typer.Option(min=0, max=MAX_DAYS, help="Days until the key expires."),
    ] = None,
    store: Store = None,
) -> None:
    """Create a key and print it; it is not shown again."""
    _check_tenant("--tenant", tenant)
    if sla not in SLA_CLASSES:
        fail(f"--sla must be one of {', '.join(SLA_CLASSES)}")
    tasks = tuple(task or ())
    if tasks and default_task and default_task not in tasks:
        fail(f"--default-task {default_task} must be one of the key's tasks (--task)")
    named_tasks = tuple(filter(None, (*tasks, default_task)))
    if deployment is not None:
        with ends_on(ConfigError):
            file = load_deploy_file(deployment)
            store = store or file.topology.store
            if not unchecked:
                _check_names(file, store, named_tasks, tuple(model or ()))
    elif not unchecked and (named_tasks or model):
        fail("give the deployment file with --deployment, or add --unchecked")
    now_s = time.time()
    secret, id, digest = new_key()
    key = ApiKey(
        id, digest, tenant, name, sla, tasks, tuple(model or ()), default_task, now_s,
        None if days is None else now_s + days * 86_400, role,
        tuple(map(_bound, bound or ())),
        None if session_minutes is None else session_minutes * 60,
    )  # fmt: skip
    with opened_store(store, creates=True) as opened:
        opened.administer(AddKey(key), this_user())
    _show_once(secret)


@app.command("list")
def list_keys(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: all keys, and all limits.")
    ] = False,
    store: Store = None,
) -> None:
    """Show all keys and tenants; secrets are not stored and cannot be shown."""
    with opened_store(store) as opened:
        keys, tenants = opened.api_keys(), opened.tenants()
    if as_json:
        found = {"keys": list(map(shown_key, keys)), "tenants": list(map(asdict, tenants))}
        print(json.dumps(found))
        return
    # Names are folded, not shortened: they are typed into other commands.
    names = ("tenant", "name", "role", "sla", "tasks", "models", "made", "until")
    table = Table(Column("id", no_wrap=True), *(Column(n, overflow="fold") for n in names))
    for key in keys:
        table.add_row(
            key.id, key.tenant, key.name, key.role.value, key.sla_class,
            ", ".join(key.tasks) or "all", ", ".join(key.models) or "all",
            moment(key.created_at_s), _until(key),
        )  # fmt: skip
    Console(markup=False).print(table, *([_limits(tenants)] if tenants else []))


@app.command()
def revoke(id: Id, store: Store = None) -> None:
    """Revoke a key now."""
    with opened_store(store) as opened:
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
    with opened_store(store) as opened:
        key = _known(next((k for k in opened.api_keys() if k.id == id), None), id)
        if key.is_valid(time.time()):
            fail(f"{id} is valid: revoke it with `cato keys revoke {id}` first")
        opened.administer(DeleteKey(id), this_user())
    print(f"{id} is deleted; if no key is left, every request is still refused")


@app.command("open")
def open_(store: Store = None) -> None:
    """Serve clients on this machine only, without a key; deletes revoked and expired keys."""
    with opened_store(store) as opened:
        valid = [key.id for key in opened.api_keys() if key.is_valid(time.time())]
        if valid:
            fail(f"some keys are valid; revoke them first: {', '.join(valid)}")
        opened.administer(OpenWithoutKeys(), this_user())
    print("a running deployment serves this machine without a key within seconds")


@app.command()
def rotate(
    id: Id,
    hours: Annotated[
        float,
        typer.Option(
            min=0,
            max=24 * MAX_DAYS,
            help="Hours that the old key stays valid.",
        ),
    ] = 24,
    store: Store = None,
) -> None:
    """Replace a key with a new one that has its rights and never expires; print it once."""
    now_s = time.time()
    secret, new_id, digest = new_key()
    with opened_store(store) as opened:
        old = _known(next((k for k in opened.api_keys() if k.id == id), None), id)
        if not old.is_valid(now_s):
            fail(f"{id} is revoked or expired; make a new key with `cato keys create`")
        new = replace(old, id=new_id, digest=digest, created_at_s=now_s, expires_at_s=None)
        opened.administer(RotateKey(id, new, now_s + hours * 3600), this_user())
    _show_once(secret)


@app.command()
def limit(
    tenant: Annotated[str, typer.Argument(help="The tenant.")],
    requests_per_minute: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_LIMIT, show_default="no limit", help="Most requests per minute."
        ),
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_LIMIT, show_default="no limit", help="Most tokens per minute."),
    ] = None,
    tokens_per_month: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_LIMIT,
            show_default="no limit",
            help="Most tokens per calendar month, in UTC.",
        ),
    ] = None,
    weight: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=MAX_WEIGHT,
            help="Its share of a full pool, relative to other tenants.",
        ),
    ] = 1.0,
    store: Store = None,
) -> None:
    """Set a tenant's limits, replacing all earlier ones; tokens count prompts and outputs."""
    _check_tenant("TENANT", tenant)
    limits = Tenant(tenant, requests_per_minute, tokens_per_minute, tokens_per_month, weight)
    with opened_store(store, creates=True) as opened:
        opened.administer(SetTenant(limits), this_user())
        has_key = any(k.tenant == tenant and k.is_valid(time.time()) for k in opened.api_keys())
    Console(markup=False).print(_limits([limits]))
    if not has_key:
        note = (
            f"No valid key belongs to {tenant}; `cato keys list` shows the tenants that have one."
        )
        Console(stderr=True, soft_wrap=True).print(
            note, style="yellow", markup=False, highlight=False
        )


app.command()(usage)
app.command()(audit)


def _check_tenant(option: str, name: str) -> None:
    if not TENANT_NAME.fullmatch(name):
        fail(
            f"{option} must have 1 to 100 characters, only letters, digits and . _ @ -, and begin "
            f"with a letter or digit; not {name!r}"
        )


def _limits(tenants: Iterable[Tenant]) -> Table:
    heads = ("requests/min", "tokens/min", "tokens/month", "weight")
    table = Table(Column("tenant", overflow="fold"), *heads)
    for t in tenants:
        numbers = (t.requests_per_minute, t.tokens_per_minute, t.tokens_per_month)
        table.add_row(t.name, *("-" if n is None else f"{n:,}" for n in numbers), f"{t.weight:g}")
    return table


def _bound(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    is_number = number.isascii() and number.isdecimal() and len(number) <= len(str(MAX_LIMIT))
    if name not in NAMES or not is_number or int(number) > MAX_LIMIT:
        fail(
            f"--bound takes NAME=NUMBER, with one of {', '.join(NAMES)} and at most {MAX_LIMIT}; "
            f"not {text!r}"
        )
    return name, int(number)


def _check_names(
    file: DeployFile, store: str | None, tasks: tuple[str, ...], models: tuple[str, ...]
) -> None:
    """End the command when the deployment has no such task or model: a key for a misspelt name
    would be refused everything, and would suddenly work if the name were added later."""
    known_tasks = load_workflows(resolve(file.ingress.workflows_dir)) if tasks else {}
    for task in tasks:
        if task not in known_tasks:
            fail(f"no task {task!r}; known: {', '.join(sorted(known_tasks))}")
    if not models:
        return
    known_models = [p.model for p in file.topology.pools]
    known_models += [h.model for s in file.topology.shared_pools for h in s.models]
    adapters: list[str] = []
    if has_store(store):  # nothing was added yet without one
        with opened_store(store) as opened:
            known_models += {m.name: m.hosted.model for m in opened.models()}.values()
            adapters = [n for a in opened.adapters() for n in (a.adapter.name, *a.adapter.aliases)]
    for name in models:
        if model_called(name, known_models) is None and name not in adapters:
            names = sorted({n for m in known_models for n in m.names} | set(adapters))
            fail(f"no model {name!r}; known: {', '.join(names)}")


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
    return moment(key.expires_at_s) + ("" if key.is_valid(time.time()) else " (ended)")
