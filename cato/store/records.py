"""What the store keeps besides the values of the core and the estimators."""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.estimates import NodeMean, PoolErrors
from cato.core.receipt import SlaReceipt
from cato.estimators.output_lengths import LengthSample
from cato.estimators.stages import FinishedStages


@dataclass(frozen=True, slots=True)
class KeptReceipt:
    """A receipt and when its run ended, in seconds since the epoch. Its free text is not kept."""

    receipt: SlaReceipt
    ended_at_s: float


Record = LengthSample | NodeMean | PoolErrors | FinishedStages | KeptReceipt
"""What a writer takes. Of means and errors of the same name, and of receipts with the same request
id, the newest is kept."""


@dataclass(frozen=True, slots=True)
class Learnt:
    """All that a Profiler needs to go on where an earlier one stopped; samples oldest first."""

    means: tuple[NodeMean, ...] = ()
    errors: tuple[PoolErrors, ...] = ()
    samples: tuple[LengthSample, ...] = ()
    runs: tuple[FinishedStages, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is kept; what is older goes.

    `samples_per_node` counts for each task, node and model. 20,000 receipts of 5 kB are 100 MB.
    """

    receipts: int = 20_000
    receipt_age_s: float = 30 * 86_400.0
    samples_per_node: int = 2_500
    runs_per_task: int = 200
    documents_per_profile: int = 20
