"""Questions of the commands to the control actors."""

from __future__ import annotations

from typing import Any

from cato.cli.client import fail
from cato.cli.cluster import connect
from cato.core.errors import CatoError
from cato.core.topology import Topology

ASK_TIMEOUT_S = 30.0


class UnansweredError(CatoError):
    """A control actor is away, or did not answer in time; it may have done what it was asked."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name = name
        self.why = why

    def __str__(self) -> str:
        return f"no answer from {self.name}: {self.why}; try again, or see its log"


def topology_at(address: str) -> Topology:
    """The topology of the cluster at `address`; ends the command when there is none. Raise
    `UnansweredError`."""
    connect(address)
    from cato.control import actors

    try:
        actors.get(actors.PROVISIONER)
    except ValueError:
        fail("CATO is not deployed on this cluster (no provisioner)")
    topology: Topology | None = ask_provisioner("topology")
    if topology is None:
        fail("CATO's control plane has not started; see `cato status`")
    return topology


def ask_manager(method: str, *args: object, within_s: float = ASK_TIMEOUT_S) -> Any:
    """The Eviction Manager's answer; raises its errors and `UnansweredError`."""
    from cato.control import actors

    return ask(actors.EVICTION_MANAGER, method, *args, within_s=within_s)


def ask_provisioner(method: str, *args: object) -> Any:
    from cato.control import actors

    return ask(actors.PROVISIONER, method, *args)


def ask(name: str, method: str, *args: object, within_s: float = ASK_TIMEOUT_S) -> Any:
    """The answer of the control actor `name`; raises its `CatoError`, and `UnansweredError`."""
    from ray.exceptions import GetTimeoutError, RayActorError

    from cato.control import actors

    try:
        actor = actors.get(name)
    except ValueError:
        raise UnansweredError(name, "there is no such actor") from None
    try:
        return result_of(getattr(actor, method).remote(*args), within_s)
    except GetTimeoutError:
        raise UnansweredError(name, f"it takes more than {within_s:g} s") from None
    except RayActorError as error:
        raise UnansweredError(name, str(error).partition("\n")[0]) from error


def result_of(asked: Any, timeout_s: float | None = None) -> Any:
    """An actor's answer; raises its `CatoError` as it was."""
    import ray
    from ray.exceptions import RayTaskError

    try:
        return ray.get(asked, timeout=timeout_s)
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, CatoError) else error from error
