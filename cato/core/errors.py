"""The tree of errors that CATO raises on purpose.

CatoError
├── ConfigError            a file or setting is wrong; holds every `Problem` found
├── UnknownNameError       no such task, model, node, policy or replica
├── InputError             the caller's input cannot be served as it is (HTTP 400)
│   └── ContextLengthError prompt and output do not fit the model's context
├── ExpressionError        a template or condition of a workflow failed to evaluate
│   ├── WorkLimitError     it asked for more work than it may do at once
│   └── WrongValueError    its value is not of the kind that is needed there
├── NodeError              a node of a run failed
├── DeadlineError          a run passed its hard deadline, or a node its budget (HTTP 504)
├── AccessError            the caller may not do this, or nobody can say who it is (HTTP 401, 403)
├── QuotaError             the caller's tenant has used what it may for now (HTTP 429)
├── StartingError          the engines are not known yet (HTTP 503)
├── CapacityError          no replica can take the invocation now (HTTP 429)
│   ├── NotLoadedError     its model does not load on any card (HTTP 429)
│   └── RouterAwayError    the pool's router does not answer (HTTP 429)
├── PrefixUnknownError     the router does not have the session's prefix; send all of it
├── SupersededError        a newer run of the same buffer took the place (HTTP 499)
├── ReplicaLostError       the leased replica is gone; ask for a new lease
├── LinkError              no connection to a router or replica, or it ended
├── LinkCallError          the other end of a link could not serve one call
└── EngineError            the engine refused or broke
    └── EngineDeadError    the engine process is gone
(StoreError and what is below it are in `cato.store.errors`, CodecError in `cato.wire.link.codec`.)

Every class passes all its arguments to `super().__init__`: Ray pickles `args`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cato.core.words import did_you_mean


class CatoError(Exception):
    """Base of every exception CATO raises on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a file: where, what was found, and the rule it breaks."""

    file: str
    path: str
    value: str
    rule: str

    def __str__(self) -> str:
        where = f"{self.file}: {self.path}" if self.path else self.file
        found = f" (found {self.value})" if self.value else ""
        return f"{where}: {self.rule}{found}"


class ConfigError(CatoError):
    """Files or settings are wrong; `problems` holds all of them, not just the first."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        head = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        return "\n".join([f"{head}:", *(f"  {p}" for p in self.problems)])


class UnknownNameError(CatoError):
    """`name` is not one of the known `kind`s."""

    def __init__(self, kind: str, name: str, known: tuple[str, ...]) -> None:
        super().__init__(kind, name, known)
        self.kind = kind
        self.name = name
        self.known = known

    def __str__(self) -> str:
        known = ", ".join(self.known) or "none"
        hint = did_you_mean(self.name, self.known)
        return f"no {self.kind} named {self.name!r}{hint}; known: {known}"


class InputError(CatoError):
    """The caller's input cannot be served as it is; `param` names the field, if one is at fault.

    `code` is for clients that react to this case.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param, code)
        self.message = message
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.message


class ContextLengthError(InputError):
    """Prompt and output do not fit the model's context.

    The numbers are None if the engine's refusal did not contain them.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        prompt_tokens: int | None = None,
        max_tokens: int | None = None,
        context_tokens: int | None = None,
    ) -> None:
        super().__init__(message, param)
        # All arguments: Ray pickles `args`.
        self.args = (message, param, prompt_tokens, max_tokens, context_tokens)
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.context_tokens = context_tokens


class ExpressionError(CatoError):
    """A template or condition of a workflow failed to evaluate."""

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(source, problem)
        self.source = source
        self.problem = problem

    def __str__(self) -> str:
        return f"expression {self.source!r}: {self.problem}"


class WorkLimitError(ExpressionError):
    """A template or expression asked for more work than it may do."""


class WrongValueError(ExpressionError):
    """An expression gave a value that its node cannot use; `names` are the names that it uses."""

    def __init__(self, source: str, problem: str, names: frozenset[str]) -> None:
        super().__init__(source, problem)
        self.args = (source, problem, names)
        self.names = names


class NodeError(CatoError):
    """Node `node` of a run failed because of `problem`."""

    def __init__(self, node: str, problem: str) -> None:
        super().__init__(node, problem)
        self.node = node
        self.problem = problem

    def __str__(self) -> str:
        return f"node {self.node!r}: {self.problem}"


class DeadlineError(CatoError):
    """A run was still unfinished after its hard limit of `limit_s`, or its `node` after its own."""

    def __init__(self, limit_s: float, node: str = "") -> None:
        super().__init__(limit_s, node)
        self.limit_s = limit_s
        self.node = node

    def __str__(self) -> str:
        if self.node:
            return f"node {self.node!r}: not ready within its budget of {self.limit_s:g} s"
        return f"not finished within {self.limit_s:g} s"


class AccessError(CatoError):
    """The caller has no access; `status` and `code` are those of the HTTP answer.

    `retry_after_s` is None when the same request never works. `param` names the field or the part
    of the path, if one is at fault.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        retry_after_s: float | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(status, code, message, retry_after_s, param)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.param = param

    def __str__(self) -> str:
        return self.message


class QuotaError(CatoError):
    """The tenant's `limit` is used up for `retry_after_s`; `is_budget`: until the month ends."""

    def __init__(self, limit: str, retry_after_s: float, is_budget: bool = False) -> None:
        super().__init__(limit, retry_after_s, is_budget)
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.is_budget = is_budget

    def __str__(self) -> str:
        return f"the limit of {self.limit} is used up; retry in {self.retry_after_s:.1f} s"


class StartingError(CatoError):
    """The server has just started and does not know its engines yet."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


# Every agent tried honours Retry-After in this range. At 300 s Claude Code gives up, and Qwen Code
# and Continue retry after half a second.
MIN_RETRY_S, MAX_RETRY_S = 3.0, 40.0


def retry_s(seconds: float) -> float:
    """The expected time, clamped to the range in which clients honour it."""
    return min(MAX_RETRY_S, max(MIN_RETRY_S, seconds))


class CapacityError(CatoError):
    """No replica of a pool can take the invocation; try again after `retry_after_s`."""

    def __init__(self, pool: str, problem: str, retry_after_s: float) -> None:
        super().__init__(pool, problem, retry_after_s)
        self.pool = pool
        self.problem = problem
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"pool {self.pool!r}: {self.problem}; retry in {self.retry_after_s:.1f} s"


class NotLoadedError(CapacityError):
    """The model failed to load on every accelerator tried."""


class RouterAwayError(CapacityError):
    """The pool's router did not answer for longer than a restart takes."""


class PrefixUnknownError(CatoError):
    """A router got the new part of a session's prompt, but does not have the rest."""

    def __init__(self, session: str) -> None:
        super().__init__(session)
        self.session = session

    def __str__(self) -> str:
        return f"the prefix of session {self.session} is not known here; send all of it"


class SupersededError(CatoError):
    """A newer run of the same editor buffer has replaced this one."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.problem


class ReplicaLostError(CatoError):
    """The leased replica is gone; the lease's holder asks the router for another.

    `was_reached` is False if the call certainly never got to its engine.
    """

    def __init__(self, replica: str, problem: str, was_reached: bool = True) -> None:
        super().__init__(replica, problem, was_reached)
        self.replica = replica
        self.problem = problem
        self.was_reached = was_reached

    def __str__(self) -> str:
        return f"replica {self.replica!r}: {self.problem}"


class LinkError(CatoError):
    """There is no connection to `peer`, or it ended before the answer was complete."""

    def __init__(self, peer: str, problem: str) -> None:
        super().__init__(peer, problem)
        self.peer = peer
        self.problem = problem

    def __str__(self) -> str:
        return f"link to {self.peer}: {self.problem}"


class LinkCallError(CatoError):
    """The other end of a link could not serve this call; its link and other calls go on.

    Another try would most likely fail as well.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class EngineError(CatoError):
    """The engine refused a request or failed; `status` is the matching HTTP status.

    `param` is the request's field that it refused, if it names one.
    """

    def __init__(self, problem: str, status: int = 502, param: str | None = None) -> None:
        super().__init__(problem, status, param)
        self.problem = problem
        self.status = status
        self.param = param

    def __str__(self) -> str:
        return self.problem


class EngineDeadError(EngineError):
    """The engine process is gone; its replica restarts it."""
