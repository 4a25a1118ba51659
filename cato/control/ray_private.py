"""All use of Ray's private API, in one place.

What is used and why:
- `RequestRouter._choose_replica_for_request`: two defects of 2.60 make a public subclass unusable
  (calls hang under fan-out from one request, and the FIFO hand-over gives a replica to the wrong
  call). A test fans 40 calls out of one request.
- `update_deployment_replicas` of the Serve controller: the public REST route needs the dashboard
  and a token. `get_serve_instance_details`: the public `serve.status` calls it too, but omits the
  targets, the draining replicas and the deployment file. `_all_running_replicas`: an application
  lists no deployments while Serve reads its new deployment file, and after Serve has refused it.
- `DeploymentConfig.to_proto`, which writes the version that Serve compares: Serve gives all
  deployments of an application one, a hash of all its `args`, and restarts each for any change.
- The controller's client, for the address that Serve's proxies listen on.
- Ray's free resources by host: the public function only returns their sum.
- The name of the resource that only the head node has.
- The call behind `ray drain-node`, which would need a shell.
- `Replica._direct_ingress_asgi`: Serve 2.60 opens the HTTP port of an ingress replica before it
  takes requests there, and answers those that come in between with 500, as uvicorn does for those
  that a dying process gives up.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any

import ray
from pydantic import PrivateAttr
from ray import serve
from ray._common.constants import HEAD_NODE_RESOURCE_NAME
from ray._private.state import available_resources_per_node
from ray.core.generated import autoscaler_pb2
from ray.serve._private.common import DeploymentID, ReplicaState
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.replica import Replica
from ray.serve.context import _get_global_client
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.serve.schema import ApplicationStatus

from cato import __version__
from cato.control import replica_sets
from cato.core.errors import CatoError, ReplicaLostError
from cato.core.fleet import HostResources, ServedDeployment, ServedFleet
from cato.core.ids import DeploymentName, ReplicaId
from cato.serve.engines_app import ServedApplication, ServedPart, refusal
from cato.serve.given_up import give_up

SUPPORTED = "2.60."
# Small enough for any number of actors; Serve does the same for its controller.
ON_HEAD_NODE = {HEAD_NODE_RESOURCE_NAME: 0.001}
# A new replica may report to its pool's router before Serve has announced it to this process.
UNLISTED_WAIT_S = 5.0
POLL_S = 0.01
# Between opening its HTTP port and taking requests a replica asks the controller, which may be
# restarting.
OPENING_S = 30.0
_PROBES = ("/-/healthz", "/-/routes")
# Of an application that lists no deployments although the earlier ones run.
_NOT_LISTING = (ApplicationStatus.DEPLOYING, ApplicationStatus.DEPLOY_FAILED)
_KINDS = {
    ReplicaState.STARTING: "starting",
    ReplicaState.STOPPING: "draining",
    ReplicaState.STOPPED: "draining",
}
"""State that `ServedDeployment` counts a replica in; all other states count as running."""


def check_ray_version() -> None:
    """Raise when the installed Ray is not the version this file was written for."""
    if not ray.__version__.startswith(SUPPORTED):
        raise CatoError(
            f"CATO was tested with Ray {SUPPORTED}x and found {ray.__version__}; "
            'install "ray[serve]>=2.60,<2.61"'
        )


class _OwnVersion(DeploymentConfig):  # type: ignore[misc]
    """A deployment's options, with a version of its own instead of its application's."""

    _own: str = PrivateAttr("")

    def to_proto(self) -> Any:
        self.version = self._own
        return super().to_proto()


def bound(deployment: serve.Deployment, *args: Any, **kwargs: Any) -> serve.Application:
    """`deployment.bind(...)`, restarted only if these arguments or its own options change, or CATO.

    Their `repr` has to say all that they are.
    """
    said = repr((__version__, args, sorted(kwargs.items())))
    config = _OwnVersion.model_construct(**dict(deployment._deployment_config))
    config._own = hashlib.sha256(said.encode()).hexdigest()[:16]
    deployment._deployment_config = config
    return deployment.bind(*args, **kwargs)


def http_host() -> str:
    """The address that Serve's proxies listen on. Blocks for an answer from the controller."""
    return str(_get_global_client().http_config.host)


def keep_requests_retryable() -> None:
    """Answer no request to this ingress replica with Serve's or uvicorn's own 500.

    Requests that come before Serve lets the replica answer wait: it has got the port of a replica
    that died, to which HAProxy still sends. Those that Serve or a dying process gives up get a 503.
    """
    answer = Replica._direct_ingress_asgi

    async def held(self: Any, scope: Any, receive: Any, send: Any) -> None:
        waited_s = 0.0
        while not (self._user_callable_initialized or waited_s > OPENING_S):
            if scope.get("path", "").endswith(_PROBES):
                break
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S
        try:
            await answer(self, scope, receive, send)
        except BaseException:  # uvicorn logs it
            await give_up(send)
            raise

    Replica._direct_ingress_asgi = held


class PinnedRouter(RequestRouter):  # type: ignore[misc]
    """Sends a call to the replica named by its `cato={"replica": ...}` argument.

    A call without one goes to the replica with the shortest queue. When the named replica has
    left, the call fails at once with `ReplicaLostError` and the ingress asks for another lease.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        ids = frozenset(str(r.replica_id.unique_id) for r in replicas)
        replica_sets.note(self._deployment_id.name, ids)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[r] for r in candidate_replicas]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        if is_retry:
            await asyncio.sleep(POLL_S)
        wanted = (pending_request.kwargs.get("cato") or {}).get("replica")
        waited_s = 0.0
        while True:
            replicas = list(self.curr_replicas.values())
            if wanted is not None:
                replicas = [r for r in replicas if r.replica_id.unique_id == wanted]
                if not replicas:
                    deployment = self._deployment_id.name
                    if replica_sets.has_left(deployment, wanted) or waited_s > UNLISTED_WAIT_S:
                        problem = f"is no longer listed in {deployment}"
                        raise ReplicaLostError(wanted, problem, was_reached=False)
            if replicas:
                return min(replicas, key=self._queue_length)
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S

    def _queue_length(self, replica: RunningReplica) -> int:
        replica_id: ReplicaID = replica.replica_id
        return self.replica_queue_len_cache.get(replica_id) or 0


def _controller() -> Any:
    """Serve's controller; raise ValueError if Serve does not run."""
    return ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")


async def scale(app: str, deployment: str, replicas: int) -> None:
    """Set Serve's target number of replicas for `deployment` (external scaler)."""
    await _controller().update_deployment_replicas.remote(
        DeploymentID(name=deployment, app_name=app), replicas
    )


async def fleet(app: str, *others: str) -> ServedFleet:
    """The deployments of `app` with their replicas, and why the last deployment of `app` or
    `others` failed; empty if they or Serve do not run."""
    details = await _details()
    told = ((name, details[name]) for name in (app, *others) if name in details)
    problems = tuple(filter(None, (refusal(name, _application(d)) for name, d in told)))
    if app not in details:
        return ServedFleet(problems=problems)
    listed = details[app]["deployments"]
    unlisted = await _unlisted(app) if not listed and details[app]["status"] in _NOT_LISTING else {}
    return ServedFleet(
        {DeploymentName(name): _served(d) for name, d in listed.items()}, unlisted, problems
    )


async def application(app: str) -> ServedApplication | None:
    """Serve's details of `app`; None if `app` or Serve does not run."""
    details = await _details()
    return _application(details[app]) if app in details else None


async def is_stopping() -> bool:
    """Whether Serve stops the replica in this process."""
    mine = serve.get_replica_context().replica_id
    app = (await _details()).get(mine.deployment_id.app_name, {})
    listed = app.get("deployments", {}).get(mine.deployment_id.name)
    return listed is not None and mine.unique_id in _served(listed).draining


def _application(details: Mapping[str, Any]) -> ServedApplication:
    config = details.get("deployed_app_config") or {}
    return ServedApplication(
        _part(details),
        {name: _part(of_one) for name, of_one in details["deployments"].items()},
        config.get("args"),
    )


async def _details() -> dict[str, dict[str, Any]]:
    """Serve's details of all applications; empty if it does not run."""
    if not ray.is_initialized():  # `get_actor` would start a Ray
        return {}
    try:
        controller = _controller()
    except ValueError:
        return {}
    details: dict[str, Any] = await controller.get_serve_instance_details.remote()
    found: dict[str, dict[str, Any]] = details["applications"]
    return found


async def _unlisted(app: str) -> dict[DeploymentName, frozenset[ReplicaId]]:
    """The running replicas of the deployments of `app`, whether `app` lists them or not."""
    running: dict[DeploymentID, list[Any]] = await _controller()._all_running_replicas.remote()
    return {
        DeploymentName(id.name): frozenset(ReplicaId(r.replica_id.unique_id) for r in replicas)
        for id, replicas in running.items()
        if id.app_name == app
    }


def _part(details: Mapping[str, Any]) -> ServedPart:
    status, trigger = (
        str(getattr(word, "value", word))
        for word in (details["status"], details.get("status_trigger", ""))
    )
    return ServedPart(status, details.get("message") or "", trigger)


def is_on_head_node() -> bool:
    """Whether this process runs on the node of the control actors. Blocks for an answer of Ray."""
    mine = ray.get_runtime_context().get_node_id()
    return any(
        node["NodeID"] == mine and HEAD_NODE_RESOURCE_NAME in node["Resources"]
        for node in ray.nodes()
    )


def nodes() -> dict[str, bool]:
    """Ray's id of each living host -> whether it is the head."""
    return {
        n["NodeID"]: HEAD_NODE_RESOURCE_NAME in n["Resources"] for n in ray.nodes() if n["Alive"]
    }


def drain(node: str, until: float, why: str) -> str:
    """Tell Ray to drain `node` by the Unix time `until`; returns Ray's objection, or ""."""
    gcs = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    is_accepted, problem = gcs.drain_node(node, reason, why, int(until * 1000))
    return "" if is_accepted else str(problem)


def replicas_on(node: str) -> list[str]:
    """Serve's replicas on `node`, stopping ones included. Blocks for the controller's answer."""
    details: dict[str, Any] = ray.get(_controller().get_serve_instance_details.remote())
    return sorted(
        f"{name}#{replica['replica_id']}"
        for application in details["applications"].values()
        for name, deployment in application["deployments"].items()
        for replica in deployment["replicas"]
        if replica.get("node_id") == node  # a pending replica has none
    )


def _served(details: Mapping[str, Any]) -> ServedDeployment:
    by_state: dict[str, set[ReplicaId]] = {}
    for replica in details["replicas"]:
        state = ReplicaState(replica["state"])
        if state is ReplicaState.STARTING and replica.get("node_id") is None:
            kind = "pending"
        else:
            kind = _KINDS.get(state, "running")
        by_state.setdefault(kind, set()).add(ReplicaId(replica["replica_id"]))
    return ServedDeployment(
        target=details["target_num_replicas"],
        **{kind: frozenset(ids) for kind, ids in by_state.items()},
    )


def hosts() -> list[HostResources]:
    """Resources of the living hosts."""
    free = available_resources_per_node()
    return [
        HostResources(node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]
