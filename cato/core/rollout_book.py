"""All rollouts of a deployment: orders by operators, results of runs, decisions by the rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import assert_never

from cato.core.errors import InputError, UnknownNameError
from cato.core.receipt import Drawn, SlaReceipt
from cato.core.rollout import Rollout
from cato.core.rollout_rule import ArmCounts, RolloutRule, counted

SHOWN = ArmCounts(shown=1)
TAKEN = ArmCounts(taken=1)


@dataclass(frozen=True, slots=True)
class StartRollout:
    """Map `name` to `stable`, and step by step to `canary`.

    If an earlier rollout of the name was promoted, its canary is the stable model now.
    """

    name: str
    stable: str
    canary: str
    rule: RolloutRule


@dataclass(frozen=True, slots=True)
class PromoteRollout:
    """Go to the next step, whatever the comparison says.

    With the present `stage` an order that comes again, since its answer was lost, changes nothing.
    """

    name: str
    why: str = "an operator promoted it"
    stage: int | None = None


@dataclass(frozen=True, slots=True)
class RollBackRollout:
    """Move all sessions to the stable model; works for a promoted rollout, too."""

    name: str
    why: str = "an operator rolled it back"


RolloutOrder = StartRollout | PromoteRollout | RollBackRollout


def action_of(order: RolloutOrder) -> str:
    """The audit log's name for `order`."""
    match order:
        case StartRollout():
            return "rollout.start"
        case PromoteRollout():
            return "rollout.promote"
        case RollBackRollout():
            return "rollout.rollback"


class RolloutBook:
    """The newest rollout of each name."""

    def __init__(self) -> None:
        self._rollouts: dict[str, Rollout] = {}

    def restore(self, rollouts: Iterable[Rollout]) -> None:
        """Restore rollouts from before a restart; known ones are newer and stay."""
        self._rollouts = {r.name: r for r in rollouts} | self._rollouts

    @property
    def all(self) -> Mapping[str, Rollout]:
        return self._rollouts

    def order(self, order: RolloutOrder, now_s: float) -> Rollout:
        """Apply `order` and return its rollout; raise `InputError` or `UnknownNameError`."""
        match order:
            case StartRollout():
                changed = self._start(order, now_s)
            case PromoteRollout(name, why, stage):
                known = self._named(name)
                if stage is not None and stage != known.stage:
                    return known
                if not known.phase.is_under_way:
                    raise InputError(f"the rollout of {name!r} is {known.phase} already", "name")
                changed = known.promoted(now_s, why)
            case RollBackRollout(name, why):
                known = self._named(name)
                if not known.share and not known.phase.is_under_way:
                    raise InputError(f"the rollout of {name!r} is {known.phase} already", "name")
                changed = known.rolled_back(now_s, why)
            case _:
                assert_never(order)
        self._rollouts[changed.name] = changed
        return changed

    def _start(self, order: StartRollout, now_s: float) -> Rollout:
        known, stable = self._rollouts.get(order.name), order.stable
        if known is not None:
            if known.phase.is_under_way:
                raise InputError(
                    f"a rollout of {order.name!r} is under way; promote it or roll it back first",
                    "name",
                )
            stable = known.canary if known.share else known.stable
        if stable == order.canary:
            raise InputError(f"{order.name!r} is served by {stable!r} already", "canary")
        return Rollout.started(order.name, stable, order.canary, order.rule, now_s)

    def _named(self, name: str) -> Rollout:
        if name not in self._rollouts:
            raise UnknownNameError("rollout", name, tuple(sorted(self._rollouts)))
        return self._rollouts[name]

    def record(self, receipt: SlaReceipt) -> None:
        for drawn in receipt.rollouts:
            self.count(drawn, counted(receipt, drawn))

    def count(self, drawn: Drawn, counts: ArmCounts) -> None:
        if (known := self._rollouts.get(drawn.name)) is not None:
            self._rollouts[drawn.name] = known.seen(drawn, counts)

    def judge(self, now_s: float) -> tuple[Rollout, ...]:
        """Apply the rule to all rollouts; return those that changed."""
        moved = []
        for name, known in self._rollouts.items():
            changed = known.at(now_s)
            if changed is not known:
                self._rollouts[name] = changed
                moved.append(changed)
        return tuple(moved)
