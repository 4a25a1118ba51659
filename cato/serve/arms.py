"""The models that rollouts choose for a run: the drawn ones, and copies for canaries."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from cato.core.ids import TaskName
from cato.core.receipt import Drawn, TrafficArm
from cato.core.workflow import CallSettings, LlmSettings, Node, Workflow
from cato.engines.base import Endpoint
from cato.serve.pools import Pools, is_ready
from cato.serve.records import Records


class Arms:
    """Rollouts of one ingress replica."""

    def __init__(self, records: Records, pools: Pools) -> None:
        self._records = records
        self._pools = pools

    def draw(self, model: str, session: str) -> tuple[str, Drawn | None]:
        """The model that `session` gets for the name `model`, and its draw in that rollout."""
        rollout = self._records.rollouts().get(model)
        return (model, None) if rollout is None else rollout.draw(session, self.is_ready)

    def is_ready(self, model: str) -> bool | None:
        return is_ready(self._pools.all(), model)

    def chosen(
        self, workflow: Workflow, session: str, drawn: Sequence[Drawn]
    ) -> tuple[Workflow, tuple[Drawn, ...], dict[str, str]]:
        """`workflow` with the models drawn by its rollouts, the draws, and the stable model to
        fall back to from each canary.

        `drawn` are the draws that chose the model of a direct call.
        """
        rollouts = self._records.rollouts()
        if not rollouts:
            return workflow, (), {}
        arms, nodes = list(drawn), []
        for node in workflow.nodes:
            settings = node.settings
            if isinstance(settings, LlmSettings) and settings.model in rollouts:
                model, part = self.draw(settings.model, session)
                node = replace(node, settings=replace(settings, model=model))
                if part is not None and part not in arms:
                    arms.append(part)
            nodes.append(node)
        mine = [r for d in arms if d.arm is TrafficArm.CANARY and (r := rollouts.get(d.name))]
        instead = {r.canary: r.stable for r in mine}
        return replace(workflow, nodes=tuple(nodes)), tuple(arms), instead

    def copies(
        self, workflow: Workflow, drawn: Sequence[Drawn], request_id: str
    ) -> list[tuple[Workflow, Drawn]]:
        """Shadow copies of a run, one per canary in its shadow step. A run is copied only when the
        canary would serve all of it, so that no serving model gets extra work."""
        copies = []
        for rollout in self._records.rollouts().values():
            is_drawn = any(d.name == rollout.name for d in drawn)
            asked = {rollout.name, rollout.stable} if is_drawn else {rollout.name}
            if (
                not rollout.is_shadowed(request_id)
                or not _is_served_by(workflow, asked)
                or not self.is_ready(rollout.canary)
            ):
                continue
            name = workflow.name
            if any(isinstance(node.settings, CallSettings) for node in workflow.nodes):
                name = TaskName(f"model:{self._pools.pool_of(rollout.canary).model.name}")
            nodes = tuple(_asking(node, rollout.canary) for node in workflow.nodes)
            copies.append((replace(workflow, name=name, nodes=nodes), rollout.shadow))
        return copies


def _is_served_by(workflow: Workflow, models: Set[str]) -> bool:
    """Whether every node of `workflow` generates with one of `models`."""
    return all(
        isinstance(s := node.settings, LlmSettings | CallSettings)
        and s.model in models
        and (isinstance(s, LlmSettings) or Endpoint(s.endpoint).generates)
        for node in workflow.nodes
    )


def _asking(node: Node, model: str) -> Node:
    assert isinstance(node.settings, LlmSettings | CallSettings), "only generating nodes are copied"
    return replace(node, settings=replace(node.settings, model=model))
