"""Measures a model for a shared pool: in a temporary actor, or in an idle slot."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cato.cli.bars import waiting
from cato.cli.client import fail
from cato.cli.control_plane import result_of
from cato.config.deployments import ray_actor_options
from cato.config.paths import resolve
from cato.core.errors import CapacityError, CatoError
from cato.core.fleet import more_that_fit, resource_needs, why_full, why_infeasible
from cato.core.profile import Profile
from cato.core.topology import DeploymentSpec, HostedModel, SharedPoolSpec, Topology
from cato.profiles.load import load_profiles

if TYPE_CHECKING:
    from cato.control.staged import Staged


# How long to look for a place to measure in. An idle slot is used only when no host had room for
# `ROOM_WITHIN_S`: resources of the previous measurement are free a second after it.
PLACE_TIMEOUT_S = 120.0
ROOM_WITHIN_S = 3.0
# A slot's process starts in seconds; if it has not by then, the host has no room for it.
READY_TIMEOUT_S = 30.0
POLL_S = 0.5


def simulated_profile(
    spec: SharedPoolSpec, topology: Topology, hosted: HostedModel
) -> Profile | None:
    if _slots_for(spec, hosted).engine.kind != "simulated":
        return None
    profiles = load_profiles(resolve(topology.profiles_dir))
    if hosted.profile not in profiles:
        fail(f"--profile must name the simulated engine's profile, one of: {', '.join(profiles)}")
    return profiles[hosted.profile]


def stage(spec: SharedPoolSpec, hosted: HostedModel, profile: Profile | None) -> Staged:
    """Measure in a temporary actor with the resources of one slot or, when no host has room for
    it, in an idle slot. Raise the actor's errors, and `CapacityError` when there is neither."""
    from cato.control.ray_private import hosts

    needs = resource_needs(_slots_for(spec, hosted))
    why_not = why_infeasible(needs, [h.total for h in hosts()])
    if why_not is not None:
        fail(why_not)
    name = hosted.model.name
    with waiting() as bar:
        task = bar.add_task(f"waiting for room to measure {name}")

        def say(what: str) -> None:
            bar.update(task, description=what)

        started_s = time.monotonic()
        while (waited_s := time.monotonic() - started_s) < PLACE_TIMEOUT_S:
            try:
                if more_that_fit(needs, hosts(), 1):
                    return _stage_beside(spec, hosted, profile, say)
                if waited_s >= ROOM_WITHIN_S:
                    say(f"loading and measuring {name} in an idle slot of {spec.name}")
                    return _stage_in_a_slot(spec, hosted, profile)
            except CapacityError as error:
                say(f"waiting for room to measure {name}: {error.problem}")
            time.sleep(POLL_S)
    raise CapacityError(spec.name, f"{why_full(needs)} and none of its slots is idle", POLL_S)


def _stage_beside(
    spec: SharedPoolSpec, hosted: HostedModel, profile: Profile | None, say: Callable[[str], None]
) -> Staged:
    """Measure in a temporary actor; raise `CapacityError` when its resources were taken
    meanwhile."""
    import ray
    from ray.exceptions import GetTimeoutError

    from cato.serve.staging_slot import StagingSlot

    slots = _slots_for(spec, hosted)
    place: Any = ray.remote(StagingSlot).options(**ray_actor_options(slots)).remote(slots)
    try:
        ray.get(place.ready.remote(), timeout=READY_TIMEOUT_S)
        say(f"loading and measuring {hosted.model.name}")
        staged: Staged = result_of(place.measure.remote(hosted, profile))
        return staged
    except GetTimeoutError:
        raise CapacityError(
            spec.name, "the measuring actor did not start in time", POLL_S
        ) from None
    finally:
        ray.kill(place)


def _stage_in_a_slot(spec: SharedPoolSpec, hosted: HostedModel, profile: Profile | None) -> Staged:
    import ray
    from ray.exceptions import RayActorError

    from cato.control import actors

    manager: Any = actors.get(actors.EVICTION_MANAGER)
    measuring = manager.measure.remote(spec.name, hosted, profile)
    try:
        staged: Staged = result_of(measuring)
        return staged
    except KeyboardInterrupt:
        ray.cancel(measuring)
        raise
    except RayActorError as error:
        raise CatoError("the Eviction Manager cannot be reached; try again") from error


def _slots_for(spec: SharedPoolSpec, hosted: HostedModel) -> DeploymentSpec:
    """The deployment whose slots measure the model."""
    return spec.deployment(hosted.measured_on or spec.deployments[0].name)
