"""Whether a run that failed was excused, so that it does not count against the SLA."""

from __future__ import annotations

from cato.core.errors import (
    CatoError,
    EngineDeadError,
    EngineError,
    InputError,
    UnknownNameError,
    WorkLimitError,
)
from cato.core.receipt import CLIENT_LEFT, SUPERSEDED, Excuse


def excuse_of(status: str, problem: str, error: CatoError | None) -> Excuse:
    """`status` and `problem` are those of the receipt; `error` ended the run."""
    if status == "cancelled":
        excuses = {SUPERSEDED: Excuse.SUPERSEDED, CLIENT_LEFT: Excuse.CLIENT_LEFT}
        return excuses.get(problem, Excuse.NONE)
    if status != "failed":
        return Excuse.NONE
    of_client = isinstance(error, InputError | UnknownNameError | WorkLimitError)
    if isinstance(error, EngineError) and not isinstance(error, EngineDeadError):
        of_client = error.status is not None and 400 <= error.status < 500 and error.status != 429
    return Excuse.CLIENT_ERROR if of_client else Excuse.NONE
