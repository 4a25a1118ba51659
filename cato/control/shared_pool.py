"""One shared pool, live: a thin driver of `SharedOrchestrator`.

Slots and ingresses connect to it over links, as they do to a pool's router. The actor that holds
this object may be restarted: slots report again what is loaded and running.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import assert_never

from cato.control.leases import Leases
from cato.control.load_book import LoadBook
from cato.control.messages import Told
from cato.control.slot_links import SlotLinks
from cato.control.slots import Slots
from cato.control.staged import Staged
from cato.core.arrival_rates import UsualArrivals
from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.errors import CatoError, InputError, NotLoadedError, UnknownNameError
from cato.core.events import (
    CacheChanged,
    Event,
    InvocationWithdrawn,
    ReplicaProgressed,
    ReplicaReported,
    StreamLost,
)
from cato.core.eviction import CopyId, ModelFacts
from cato.core.ids import DeploymentName, InvocationId, ModelName, ReplicaId
from cato.core.policies import Policies
from cato.core.pool.placement import Placement
from cato.core.pool.placement_events import (
    ArrivalsRemembered,
    CardPoliciesChanged,
    ClockTold,
    GiveUp,
    Load,
    ModelRemoved,
    Served,
)
from cato.core.profile import Profile
from cato.core.record import changed
from cato.core.residency import Resident
from cato.core.shards import NO_LOAD, ShardLoad
from cato.core.shared import (
    Looked,
    ModelAdded,
    ModelPoliciesChanged,
    OfLine,
    SharedEvent,
    SharedOrchestrator,
    Step,
)
from cato.core.shared import Told as LineTold
from cato.core.slots import HostedPart, SharedPoolPicture, SlotReport
from cato.core.snapshot import Invocation
from cato.core.topology import (
    DeploymentSpec,
    HostedModel,
    SharedPoolPolicies,
    SharedPoolSpec,
    TemplateFacts,
)
from cato.policies.eviction.registry import card_policies
from cato.policies.registry import policies_of
from cato.telemetry.decisions import LOAD, Decided, DecisionBook
from cato.telemetry.event_log import EventLog, opened_log

log = logging.getLogger("cato.shared_pool")

# Fresh state orders no load until every slot has had time to report what it holds.
SETTLE_S = 2.0
# How long a model being removed may take to finish its calls, and the polling interval.
REMOVE_WITHIN_S, REMOVE_POLL_S = 60.0, 0.1


HostedProfiles = Mapping[ModelName, Mapping[DeploymentName, Profile]]
"""The profile of each model on the deployments where it fits."""


class SharedPool:
    """Leases slots to invocations and orders model loads. Belongs to one asyncio loop."""

    def __init__(
        self,
        spec: SharedPoolSpec,
        profiles: HostedProfiles,
        settle_s: float = SETTLE_S,
        log_folder: str | None = None,
        secret: bytes = b"",
    ) -> None:
        """`secret` is that of the pool's links; it outlives the pool's state."""
        self.spec = spec
        self.profiles = dict(profiles)
        self._policies = spec.policies
        self.hosted: dict[ModelName, HostedModel] = {m.model.name: m for m in spec.models}
        self._leaving: set[ModelName] = set()  # removed once their pending calls have ended
        self.links = SlotLinks(spec.name, secret, self)
        self.slots = Slots(self, self.links.hold)
        self.loads = LoadBook()
        self._leases: dict[ModelName, Leases] = {}
        self._log_folder = log_folder
        self._logs: dict[ModelName, EventLog | None] = {}
        self._templates: dict[ModelName, TemplateFacts] = {}
        self.decisions = DecisionBook(spec.name)
        self._core = self._new_core(settle_s=settle_s)

    def _new_core(self, unit_s: float = 1.0, settle_s: float = 0.0) -> SharedOrchestrator:
        policies = card_policies(self._policies)
        life = uuid.uuid4().hex[:6]
        core = SharedOrchestrator(lambda tell: Placement(policies, tell, unit_s, life, settle_s))
        in_order = core.placement.in_order
        for name, hosted in self.hosted.items():
            core.handle(self._added(hosted, self.profiles[name], _now_s()))
            self._open_line(name, in_order=in_order)
        return core

    def _open_line(self, name: ModelName, *, in_order: bool) -> None:
        """Accept offers for the model and open a log for its queue."""
        self._leases.setdefault(name, self._leases_of(name))
        if (former := self._logs.get(name)) is not None:
            former.close()
        names = replace(self._policies.of_models, by_turns=in_order)
        part = self.spec.part_of(name)
        self._logs[name] = opened_log(self._log_folder, part, names, self._fastest(name))

    def _leases_of(self, name: ModelName) -> Leases:
        def handle(event: Event) -> None:
            self.handle(OfLine(name, event))

        return Leases(self.spec.part_of(name), handle)

    def _added(
        self, hosted: HostedModel, profiles: Mapping[DeploymentName, Profile], now_s: float
    ) -> ModelAdded:
        shapes = self.spec.where_fits(hosted)
        served = tuple(_served_on(s, hosted.at(s.name), profiles[s.name]) for s in shapes)
        policies = policies_of(self._policies.of_models, _fastest(profiles))
        return ModelAdded(now_s, self.spec.part_of(hosted.model.name), served, policies)

    def _policies_of(self, name: ModelName) -> Policies:
        return policies_of(self._policies.of_models, self._fastest(name))

    def _fastest(self, name: ModelName) -> Profile:
        """The model's profile on its fastest deployment."""
        return _fastest(self.profiles[name])

    @property
    def placement(self) -> Placement:
        return self._core.placement

    # Models and policies

    @property
    def policies(self) -> SharedPoolPolicies:
        return self._policies

    def configure(self, policies: SharedPoolPolicies) -> None:
        """Change the pool's policies; raise `UnknownNameError` for an unknown one."""
        if policies == self._policies:
            return
        changed = card_policies(policies)
        former, self._policies = self._policies.of_models, policies
        self.handle(CardPoliciesChanged(_now_s(), changed))
        if policies.of_models != former:
            for name in self.hosted:
                self.handle(ModelPoliciesChanged(_now_s(), name, self._policies_of(name)))
        self.slots.size_memories()

    def why_not_add(self, hosted: HostedModel) -> str | None:
        """Why the model cannot be added or measured again; None when it can."""
        model = hosted.model
        if any(m.model.name == model.name for m in self.spec.models):
            return f"{model.name!r} is a model of the deployment file: change it there"
        shapes = self.spec.where_fits(hosted)
        if not shapes:
            names = ", ".join(d.name for d in self.spec.deployments)
            return (
                f"{model.name!r} fits on none of the pool's deployments ({names}): measure it again"
            )
        if any(s.engine.sleep for s in shapes) and not hosted.weights_bytes:
            return f"say the --weights of {model.name!r}: its engine may sleep in the host's memory"
        others = [h.model for n, h in self.hosted.items() if n != model.name]
        taken = {name for other in others for name in other.names}
        for name in model.names:
            if name in taken:
                return f"{name!r} is the name of another model of {self.spec.name}"
        return None

    def add_model(self, hosted: HostedModel, profile: Profile) -> None:
        """Accept calls for the model from now on; for a known model, replace its facts.

        Raise `InputError` when its facts are impossible, or while calls run on a deployment where
        it no longer fits; nothing has changed then.
        """
        name, now_s = hosted.model.name, _now_s()
        profiles = {s.name: profile for s in self.spec.where_fits(hosted)}
        steps = self._core.handle(self._added(hosted, profiles, now_s))
        self.hosted[name], self.profiles[name] = hosted, profiles  # before orders that name them
        if name not in self._leases:
            self._open_line(name, in_order=self.placement.in_order)
        self._carry_out(steps, now_s)

    async def remove_model(self, name: ModelName) -> None:
        """Refuse new calls at once; calls already in the pool have a minute to end.

        Raise `UnknownNameError`, or `InputError` when the model is in the deployment file or some
        calls did not end; the model is then served as before.
        """
        if any(m.model.name == name for m in self.spec.models):
            raise InputError(f"{name!r} is a model of the deployment file: remove it there")
        self._leaving.add(name)
        try:
            for _ in range(int(REMOVE_WITHIN_S / REMOVE_POLL_S)):
                if not self.placement.uses(name):
                    break
                await asyncio.sleep(REMOVE_POLL_S)
            self._remove_model(name)
        finally:
            self._leaving.discard(name)

    def _remove_model(self, name: ModelName) -> None:
        now_s = _now_s()
        loaded = [c.id for c in self.placement.copies() if c.model == name]
        self.handle(ModelRemoved(now_s, name))
        for copy_id in loaded:
            self.loads.end(copy_id, now_s)
        del self.hosted[name], self.profiles[name], self._leases[name]
        if (log_ := self._logs.pop(name)) is not None:
            log_.close()
        self.slots.clear(name)  # the name may come back with other weights

    def remember_arrivals(self, slices: tuple[UsualArrivals, ...]) -> None:
        """Restore arrival times learnt before this pool's state was created."""
        self.handle(ArrivalsRemembered(_now_s(), slices))

    def learnt_arrivals(self) -> tuple[UsualArrivals, ...]:
        """Arrival times learnt since the last call."""
        return self.placement.learnt_arrivals()

    def reset(self, unit_s: float = 1.0) -> None:
        """Start over with empty slots and no arrival history; for measurements.

        `unit_s`: the length of a second to policies, see `Placement`. Raise `InputError` while
        calls wait or run, or a model is being measured.
        """
        known = sum(line.queued + len(line.leased) for line in self._core.lines.values())
        if known:
            raise InputError(f"{known} invocations wait or run in {self.spec.name}")
        if self.slots.is_measuring:
            raise InputError(f"a model is measured in {self.spec.name}")
        self._core = self._new_core(unit_s)
        self.loads = LoadBook()
        self.slots.size_memories()
        self.slots.clear()

    def parts(self) -> tuple[HostedPart, ...]:
        return tuple(self._part(name, hosted) for name, hosted in sorted(self.hosted.items()))

    def _part(self, name: ModelName, hosted: HostedModel) -> HostedPart:
        shapes = self.spec.where_fits(hosted)
        names = tuple(s.name for s in shapes)
        return HostedPart(
            name=self.spec.part_of(name),
            pool=self.spec.name,
            deployments=names,
            model=hosted.model,
            profile=self._fastest(name),
            simulated=all(s.engine.is_simulated for s in shapes),
            slots=self.slots.count(names),
            template=self._templates.get(name),
        )

    def picture(self) -> SharedPoolPicture:
        waiting = self.placement.waiting_by_model()
        return SharedPoolPicture(
            name=self.spec.name,
            queued=sum(waiting.values()),
            waiting=tuple(sorted(waiting.items())),
            slots=self.slots.pictures(),
            in_host_memory=tuple(sorted(self.slots.in_host_memory().items())),
            counts=self.loads.counts,
        )

    def residents(self) -> tuple[Resident, ...]:
        """What the slots hold, by their latest reports."""
        return self.slots.residents()

    # Events from links

    async def offer(
        self, invocation: Invocation, shared_blocks: int = 0, model: str = ""
    ) -> Dispatch:
        """Wait for a slot that holds `model`; raise as `Leases.offer`, `NotLoadedError` when the
        model fails to load, `UnknownNameError` when the pool does not host it."""
        name = ModelName(model)
        known = self._core.lines[name].invocation(invocation.id) if name in self.hosted else None
        is_new = known is None and invocation.attempt == 1 and not invocation.was_taken
        if name not in self.hosted or (is_new and name in self._leaving):
            served = sorted(self.hosted.keys() - self._leaving)
            raise UnknownNameError("model", model, tuple(served))
        return await self._leases[name].offer(invocation, shared_blocks)

    def take(self, told: Told) -> None:
        """Handle an event about calls; its `now_s` is replaced by this clock's."""
        match told:
            case InvocationWithdrawn(_, id, attempt, reason):
                for name in self._lines_of(id):
                    self._leases[name].withdraw(id, attempt, reason)
                return
            case (
                ReplicaProgressed(replica_id=slot)
                | CacheChanged(replica_id=slot)
                | StreamLost(replica_id=slot)
            ):
                model = self.slots.model_on(slot)
                names = [model] if model in self._core.lines else []
            case ReplicaReported():
                return  # the placement reports loaded models
            case _:
                names = self._lines_of(told.invocation_id)
        for name in names:
            self.handle(OfLine(name, changed(told, now_s=_now_s())))

    def _lines_of(self, id: InvocationId) -> list[ModelName]:
        """The queue that knows the call. A call that ran before this state was created is in no
        queue: then all of them, so each is told."""
        lines = self._core.lines
        return [n for n in lines if lines[n].invocation(id) is not None] or list(lines)

    def report(self, report: SlotReport) -> None:
        """The current state of a slot."""
        if report.model is not None and report.template is not None:
            self._templates[report.model] = report.template
        self.slots.report(report)

    def lose(self, replica: ReplicaId, reason: str) -> None:
        """See `Slots.lose`."""
        self.slots.lose(replica, reason)

    def leave(self, replica: ReplicaId) -> None:
        """See `Slots.leave`."""
        self.slots.leave((replica,))

    def load(self) -> ShardLoad:
        """Shared pools have one router, so there is no choice between shards."""
        return NO_LOAD

    async def measure(self, hosted: HostedModel, profile: Profile | None) -> Staged:
        """Load and measure a model in an idle slot of `hosted.measured_on`, or of the only
        deployment; the slot's own model is unloaded.

        The slot serves no calls meanwhile. Raise `CapacityError` when no slot is idle,
        `ReplicaLostError` when the slot is lost or takes too long, and errors of the measurement.
        """
        return await self.slots.measure(hosted, profile)

    def measured(self, slot: ReplicaId, copy_id: CopyId, found: Staged | CatoError) -> None:
        """Result of the measurement that the slot was lent for."""
        self.slots.measured(slot, copy_id, found)

    def tick(self) -> None:
        """Call it about every second: retries failed loads."""
        self.handle(ClockTold(_now_s(), _local_s()))
        self.handle(Looked(_now_s()))
        for log_ in self._logs.values():
            if log_ is not None:
                log_.flush()

    def close(self) -> None:
        """New state replaces this one; peers reconnect to it as to a restarted router."""
        self.slots.end_loans("its pool was redeployed")
        self.links.close()
        for log_ in self._logs.values():
            if log_ is not None:
                log_.close()

    # Commands

    def handle(self, event: SharedEvent) -> None:
        self._carry_out(self._core.handle(event), event.now_s)

    def _carry_out(self, steps: Iterable[Step], now_s: float) -> None:
        for step in steps:
            match step:
                case LineTold():
                    self._answer(step)
                case Load():
                    self._order(step, now_s)
                case GiveUp():
                    part = self.spec.part_of(step.model)
                    error = NotLoadedError(part, step.problem, step.retry_after_s)
                    self._leases[step.model].fail(step.id, error)
                case _:
                    assert_never(step)

    def _answer(self, told: LineTold) -> None:
        """Carry out the decisions of one model's queue."""
        if (log_ := self._logs.get(told.model)) is not None:
            in_order = self.placement.in_order
            names = replace(self._policies.of_models, by_turns=in_order)
            log_.write(told.event, told.commands, names, self._fastest(told.model))
        if not told.commands:
            return
        line = self._core.lines[told.model]
        self.loads.serve(len(told.started), len(told.hits))
        self.loads.refuse(sum(isinstance(c, Refuse) and not c.superseded for c in told.commands))
        commands = tuple(_with_hit(command, told) for command in told.commands)
        self.decisions.note_commands(time.time(), told.event, commands, line)
        for command in commands:
            match command:
                case Dispatch() | Refuse():
                    self._leases[told.model].answer(command)
                case Preempt():
                    self.links.order(command)  # the slot tells the ingress
                case _:
                    assert_never(command)

    def _order(self, load: Load, now_s: float) -> None:
        log.info("load %s on %s: %s", load.model, ", ".join(load.cards), load.reason)
        gone = "".join(f"; evicts {victim.model}" for victim in load.evicted)
        reason = f"{load.model}: {load.reason}{gone}"
        decided = Decided(time.time(), self.spec.name, LOAD, reason, ", ".join(load.cards))
        self.decisions.add(decided, load.reason)
        self.loads.begin(load, now_s)
        for card in load.cards:
            self.slots.tell(ReplicaId(card))


def _fastest(profiles: Mapping[DeploymentName, Profile]) -> Profile:
    return min(profiles.values(), key=attrgetter("typical_call_s"))


def _served_on(shape: DeploymentSpec, hosted: HostedModel, profile: Profile) -> Served:
    """How the slots of `shape` serve a model, whose values are those `at` this deployment."""
    load_s = profile.load_s if hosted.load_s is None else hosted.load_s
    facts = ModelFacts(
        name=hosted.model.name,
        load_s=load_s,
        reload_s=load_s if hosted.reload_s is None else hosted.reload_s,
        weights_bytes=hosted.weights_bytes,
        slo_s=hosted.slo_s,
        max_running=min(shape.engine.max_num_seqs, profile.max_running),
        min_copies=hosted.min_copies,
        max_copies=hosted.max_copies,
        call_s=profile.typical_call_s,
    )
    engine = shape.engine
    return Served(
        facts,
        profile,
        shape.name,
        prefix_caching=engine.prefix_caching,
        step_tokens=engine.max_num_batched_tokens or 0,
        mixes_prompts=engine.mixes_prompts,
    )


def _with_hit(command: Command, told: LineTold) -> Command:
    """A dispatch whose reason says whether the model was loaded; unchanged when it is a repeat."""
    if not isinstance(command, Dispatch) or command.invocation_id not in told.started:
        return command
    found = "hit" if command.invocation_id in told.hits else "miss"
    return replace(command, reason=f"{found}: {command.reason}")


def _now_s() -> float:
    return time.monotonic()


def _local_s() -> float:
    """Seconds since 1970 on a clock that shows local time."""
    now_s = time.time()
    return now_s + time.localtime(now_s).tm_gmtoff
