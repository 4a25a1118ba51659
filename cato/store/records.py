"""Records of the store that are not already types of the core or the estimators."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.estimates import NodeMean, PoolErrors
from cato.core.ids import ModelName, PoolName
from cato.core.receipt import SlaReceipt
from cato.core.rollout import Rollout
from cato.core.topology import AdapterSpec, HostedModel
from cato.core.usage_outbox import UsageParcel
from cato.estimators.output_lengths import LengthSample
from cato.estimators.stages import FinishedStages
from cato.profiles.schema import ProfileFile


@dataclass(frozen=True, slots=True)
class KeptReceipt:
    """A receipt and when its run ended, in seconds since the epoch. Its free text is not kept."""

    receipt: SlaReceipt
    ended_at_s: float


@dataclass(frozen=True, slots=True)
class Reaction:
    """A user's reaction to the completion of `request_id`: `view`, `select` or `dismiss`.

    `view_id` and `choice` tell showings apart; `select_kind` is `line` when a part was accepted.
    `after_s` is the time since it was shown, None when the client sent none; `e2e_s` is the
    completion's latency. Repeats of a reaction within one `tenant` count once.
    """

    request_id: str
    reaction: str
    choice: int
    view_id: str
    select_kind: str
    after_s: float | None
    task: str
    model: str
    e2e_s: float
    at_s: float
    tenant: str = ""


Record = (
    Reaction
    | LengthSample
    | NodeMean
    | PoolErrors
    | FinishedStages
    | KeptReceipt
    | UsageParcel
    | Rollout
)
"""Records that a writer accepts. Usage and accelerator time are added to the stored sums, a parcel
of them once however often it comes. Of means, errors and rollouts with the same name, and of a
tenant's receipts with the same request id, the newest is kept."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """The state from which a Profiler resumes; samples oldest first."""

    means: tuple[NodeMean, ...] = ()
    errors: tuple[PoolErrors, ...] = ()
    samples: tuple[LengthSample, ...] = ()
    runs: tuple[FinishedStages, ...] = ()
    rollouts: tuple[Rollout, ...] = ()


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model that was added to a shared pool at run time, with its measurements.

    `version` counts its measurements from 1; `added_at_s` is in seconds since the epoch.
    """

    pool: PoolName
    version: int
    added_at_s: float
    hosted: HostedModel
    profile: ProfileFile

    @property
    def name(self) -> ModelName:
        return self.hosted.model.name


@dataclass(frozen=True, slots=True)
class AddedAdapter:
    """An adapter that was added to the model `base` at run time.

    Its `version` is the time of the addition, in milliseconds since the epoch.
    """

    base: ModelName
    adapter: AdapterSpec


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept; older records are deleted.

    `samples_per_node` is per task, node and model. All `samples` together are read in seconds, by a
    Profiler that needs 300 MB for it; models that are gone leave theirs behind. 20,000 receipts of
    5 kB are 100 MB. A sender of usage is forgotten `sender_days` after its last parcel. Usage,
    accelerator time and the audit log are kept for ever where no days are set. Of each table at
    most `old_rows` rows are deleted at once, so that no other call waits for long.
    """

    receipts: int = 20_000
    reactions: int = 100_000
    receipt_age_s: float = 30 * 86_400.0
    samples_per_node: int = 2_500
    samples: int = 250_000
    runs_per_task: int = 200
    documents_per_profile: int = 20
    sender_days: int = 30
    usage_days: int | None = None
    audit_days: int | None = None
    old_rows: int = 1_000
