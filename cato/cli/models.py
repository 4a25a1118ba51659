"""`cato models`: add, measure and remove models of shared pools and LoRA adapters at run time.

A model is loaded and measured before clients can call it, beside the pool or in one of its idle
slots. An adapter is tried on replicas of its base. Both are stored in the metadata store and
survive a restart.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from cato.cli.adapters import adapter_table, base_pool, dated, try_out
from cato.cli.client import ends_on, fail, this_user
from cato.cli.cluster import AUTO, Address
from cato.cli.control_plane import (
    UnansweredError,
    ask_manager,
    ask_provisioner,
    topology_at,
)
from cato.cli.profile import TRANSPORT_VARIABLE
from cato.cli.staging import simulated_profile, stage
from cato.cli.store import moment, opened_store
from cato.config.fields import PublicName
from cato.config.places import source_for_others
from cato.core.errors import CatoError, UnknownNameError
from cato.core.ids import DeploymentName, ModelName, PoolName
from cato.core.topology import AdapterSpec, HostedModel, ModelSpec, SharedPoolSpec, Topology
from cato.store.records import RegisteredModel
from cato.workflows.fim_families import FAMILIES, family_of

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Add, list, measure and remove models and adapters.",
)
console = Console(markup=False)

REMOVE_TIMEOUT_S = 90.0  # running and queued calls of the model end first

Pool = Annotated[str | None, typer.Option(help="The shared pool; needed when there are several.")]
Name = Annotated[str, typer.Argument(help="The name that clients use.")]


@app.command()
def add(
    name: Name,
    source: Annotated[str, typer.Option(help="A folder, `demo` or a Hugging Face id.")],
    base: Annotated[
        str | None, typer.Option(help="Add a LoRA adapter of this model, served by its replicas.")
    ] = None,
    pool: Pool = None,
    family: Annotated[
        str | None, typer.Option(help=f"Fill-in-the-middle format: {', '.join(FAMILIES)}.")
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(help="Another name of it; repeat for several.")
    ] = None,
    slo: Annotated[
        float, typer.Option(min=0.001, help="Target time to first token, in seconds.")
    ] = HostedModel(ModelSpec(ModelName(""), "", "")).slo_s,
    weights: Annotated[
        int, typer.Option(min=0, help="Size of the weights in bytes, if the source does not tell.")
    ] = 0,
    profile: Annotated[
        str | None, typer.Option(help="The profile that a simulated engine follows.")
    ] = None,
    deployment: Annotated[
        str | None,
        typer.Option(help="Where to measure and serve it, in a pool with several deployments."),
    ] = None,
    address: Address = AUTO,
) -> None:
    """Measure a model, store it and serve it."""
    with ends_on(CatoError):
        source = source_for_others(source)
        for one in (name, *(alias or ())):
            _check_name(one)
        if family is not None and family not in FAMILIES:
            fail(f"--family must be one of {', '.join(FAMILIES)}")
        if base is not None:
            if pool or family or profile or deployment:
                fail("--base: an adapter has its base's pool, deployments, family and profile")
            _add_adapter(AdapterSpec(ModelName(name), source, tuple(alias or ())), base, address)
            return
        topology = topology_at(address)
        spec = _shared_pool(topology, pool)
        _check_free(topology, (name, *(alias or ())))
        model = ModelSpec(ModelName(name), source, family or family_of(source), tuple(alias or ()))
        place = _deployment(spec, deployment)
        hosted = HostedModel(model, profile, weights_bytes=weights, slo_s=slo, measured_on=place)
        _measure_and_keep(spec, topology, hosted)


@app.command("profile")
def measure_again(name: Name, pool: Pool = None, address: Address = AUTO) -> None:
    """Measure an added model again and use the new profile from then on."""
    with ends_on(CatoError):
        topology = topology_at(address)
        spec = _shared_pool(topology, pool)
        known = _newest(topology, spec.name, name)
        _measure_and_keep(spec, topology, known.hosted)


@app.command("list")
def list_models(address: Address = AUTO) -> None:
    """Show the models of all shared pools, where they are loaded, and the adapters."""
    with ends_on(CatoError):
        topology = topology_at(address)
        adapters = [(p.model.name, a) for p in topology.pools for a in p.model.adapters]
        if adapters:
            console.print(adapter_table(adapters))
        if not topology.shared_pools:
            if not adapters:
                console.print("There are no shared pools and no adapters.")
            return
        table = Table("pool", "model", "from", "load s", "reload s", "weights", "slo s", "loaded")
        loaded = _loaded()
        for spec in topology.shared_pools:
            added = {m.name: m for m in _registered(topology) if m.pool == spec.name}
            rows = [(h, "the file") for h in spec.models]
            rows += [(m.hosted, f"version {m.version}") for m in added.values()]
            for hosted, origin in rows:
                table.add_row(
                    spec.name,
                    hosted.model.name,
                    origin,
                    _seconds(hosted.load_s),
                    _seconds(hosted.reload_s),
                    f"{hosted.weights_bytes / 1e6:,.0f} MB",
                    f"{hosted.slo_s:g}",
                    str(loaded.count((spec.name, hosted.model.name)) or ""),
                )
        console.print(table)


@app.command()
def show(name: Name, pool: Pool = None, address: Address = AUTO) -> None:
    """Show every measurement of an added model."""
    with ends_on(CatoError):
        topology = topology_at(address)
        spec = _shared_pool(topology, pool)
        _newest(topology, spec.name, name)
        table = Table("version", "measured", "source", "load s", "reload s", "TTFT ms", "tokens/s")
        for m in _registered(topology):
            if (m.pool, m.name) == (spec.name, name):
                speed = m.profile.to_profile()
                table.add_row(
                    str(m.version),
                    moment(m.added_at_s),
                    m.hosted.model.source,
                    _seconds(m.hosted.load_s),
                    _seconds(m.hosted.reload_s),
                    f"{1000 * speed.first_token_s(300):.0f}",
                    f"{1 / max(1e-9, speed.decode_step_s(1, 300)):.0f}",
                )
        console.print(table)
        console.print("TTFT of a 300-token prompt and tokens/s of one stream, without other load.")


@app.command()
def remove(name: Name, pool: Pool = None, address: Address = AUTO) -> None:
    """Remove a model or an adapter and its measurements.

    Calls of the model end first; if they take over a minute the command fails and the model stays.
    """
    with ends_on(CatoError):
        topology = topology_at(address)
        if not _removed_adapter(topology, name):
            spec = _shared_pool(topology, pool)
            _newest(topology, spec.name, name)
            with suppress(UnknownNameError):  # stored but not served
                ask_manager("remove_model", spec.name, ModelName(name), within_s=REMOVE_TIMEOUT_S)
            with opened_store(topology.store) as store:
                store.remove_model(spec.name, ModelName(name), this_user())
        console.print(f"{name} is no longer served.", highlight=False)


def _add_adapter(adapter: AdapterSpec, base: str, address: str) -> None:
    os.environ.setdefault(TRANSPORT_VARIABLE, "1")  # before Ray is imported
    topology = topology_at(address)
    _check_free(topology, (adapter.name, *adapter.aliases))
    pool = base_pool(topology, base)
    adapter = dated(adapter)
    took_s = try_out(pool, adapter)
    with opened_store(topology.store) as store:
        store.add_adapter(pool.model.name, adapter, this_user())
    ask_provisioner("read_adapters")
    console.print(
        f"{adapter.name} is served by {pool.name}, beside {pool.model.name}: load and first "
        f"answer took {took_s:.2f} s.",
        highlight=False,
    )


def _removed_adapter(topology: Topology, name: str) -> bool:
    """False when no adapter of that name was added."""
    with opened_store(topology.store) as store:
        if not store.remove_adapter(ModelName(name), this_user()):
            return False
    ask_provisioner("read_adapters")
    return True


def _measure_and_keep(spec: SharedPoolSpec, topology: Topology, hosted: HostedModel) -> None:
    staged = stage(spec, hosted, simulated_profile(spec, topology, hosted))
    with opened_store(topology.store) as store:
        added = store.add_model(spec.name, staged.hosted, staged.profile, this_user())
        try:
            ask_manager("add_model", added)
        except UnansweredError:
            raise  # it may serve the model by now
        except CatoError:
            if added.version == 1:
                store.remove_model(spec.name, hosted.model.name, this_user())
            raise
    found = added.hosted
    console.print(
        f"{hosted.model.name} is served by {spec.name}: loads in {_seconds(found.load_s)} s from "
        f"storage and {_seconds(found.reload_s)} s from memory, "
        f"{staged.memory_bytes / 1e6:,.0f} MB used{' on its GPUs' if staged.on_card else ''}.",
        highlight=False,
    )


def _check_name(name: str) -> None:
    try:
        TypeAdapter(PublicName).validate_python(name)
    except ValidationError as error:
        rule = error.errors()[0]["msg"].removeprefix("Value error, ")
        fail(f"{name!r}: {rule}")


def _check_free(topology: Topology, names: tuple[str, ...]) -> None:
    models = [p.model for p in topology.pools]
    models += [h.model for s in topology.shared_pools for h in s.models]
    models += [m.hosted.model for m in _registered(topology)]
    taken = {n: m.called(n) for m in models for n in m.names}
    for name in names:
        if name in taken:
            fail(f"{name!r} is already a name of the model {taken[name]!r}")


def _newest(topology: Topology, pool: PoolName, name: str) -> RegisteredModel:
    added = {m.name: m for m in _registered(topology) if m.pool == pool}
    if name not in added:
        known = ", ".join(added) or "none"
        fail(f"no model named {name!r} was added to {pool}; added: {known}")
    return added[ModelName(name)]


def _registered(topology: Topology) -> tuple[RegisteredModel, ...]:
    """All versions, the newest of each name last."""
    with opened_store(topology.store) as store:
        return store.models()


def _shared_pool(topology: Topology, name: str | None) -> SharedPoolSpec:
    if not topology.shared_pools:
        fail("the deployment has no shared pool; see deployments/shared.yaml")
    known = {s.name: s for s in topology.shared_pools}
    if name is None and len(known) == 1:
        return topology.shared_pools[0]
    if name is None or name not in known:
        fail(f"--pool must name one of the shared pools: {', '.join(known)}")
    return known[PoolName(name)]


def _deployment(spec: SharedPoolSpec, name: str | None) -> DeploymentName | None:
    """The deployment to measure on; None in a pool that has only one."""
    known = [d.name for d in spec.deployments]
    if name is None and len(known) == 1:
        return None
    if name is None or name not in known:
        fail(f"--deployment must name a deployment of {spec.name}: {', '.join(known)}")
    return DeploymentName(name)


def _loaded() -> list[tuple[str, str]]:
    return [
        (p.name, s.model) for p in ask_manager("pictures") for s in p.slots if s.model is not None
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
