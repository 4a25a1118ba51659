"""Questions of the commands to the control actors."""

from __future__ import annotations

from typing import Any

from cato.cli.client import fail
from cato.cli.cluster import connect
from cato.core.errors import CatoError
from cato.core.topology import Topology

ASK_TIMEOUT_S = 30.0


def topology_at(address: str) -> Topology:
    """The topology of the cluster at `address`; ends the command when there is none."""
    connect(address)
    import ray

    from cato.control import actors

    try:
        provisioner = actors.get(actors.PROVISIONER)
    except ValueError:
        fail("CATO is not deployed on this cluster (no provisioner)")
    topology: Topology | None = ray.get(provisioner.topology.remote(), timeout=ASK_TIMEOUT_S)
    if topology is None:
        fail("CATO's control plane has not started; see `cato status`")
    return topology


def ask_manager(method: str, *args: object, within_s: float = ASK_TIMEOUT_S) -> Any:
    """The Eviction Manager's answer; raises its errors."""
    from cato.control import actors

    return _ask_actor(actors.EVICTION_MANAGER, method, *args, within_s=within_s)


def ask_provisioner(method: str, *args: object) -> Any:
    from cato.control import actors

    return _ask_actor(actors.PROVISIONER, method, *args)


def _ask_actor(name: str, method: str, *args: object, within_s: float = ASK_TIMEOUT_S) -> Any:
    from cato.control import actors

    return result_of(getattr(actors.get(name), method).remote(*args), within_s)


def result_of(asked: Any, timeout_s: float | None = None) -> Any:
    """An actor's answer; raises its `CatoError` as it was."""
    import ray
    from ray.exceptions import RayTaskError

    try:
        return ray.get(asked, timeout=timeout_s)
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, CatoError) else error from error
