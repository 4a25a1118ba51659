"""Log of a pool router's input events and commands, as JSON lines.

The first line names the pool and its policies. Every other line is one event with its commands.
Replaying the events gives the same commands (`cato.sim.replay`). It contains no prompts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cato.core.commands import Command, Dispatch, Preempt, Refuse
from cato.core.errors import ConfigError, Problem
from cato.core.events import (
    CacheChanged,
    Event,
    FirstTokenSent,
    InvocationEnded,
    InvocationOffered,
    InvocationWithdrawn,
    PoliciesChanged,
    ReplicaLost,
    ReplicaProgressed,
    ReplicaReported,
    StreamLost,
    Ticked,
    TurnCame,
    TurnsEnded,
)
from cato.core.ids import PoolName
from cato.core.profile import Profile
from cato.core.topology import PoolPolicies
from cato.estimators.speed_meter import NO_SPEEDS, Speeds
from cato.policies.registry import policies_of

log = logging.getLogger("cato.event_log")

VERSION = 1
# A busy pool writes about 1 kB per call; logs of whole days need a bigger disk than is usual.
MAX_BYTES = 1 << 30

_EVENTS: dict[str, type] = {
    c.__name__: c
    for c in (
        ReplicaReported,
        ReplicaLost,
        StreamLost,
        InvocationOffered,
        InvocationWithdrawn,
        FirstTokenSent,
        ReplicaProgressed,
        InvocationEnded,
        CacheChanged,
        Ticked,
        TurnCame,
        TurnsEnded,
    )
}
_COMMANDS: dict[str, type] = {c.__name__: c for c in (Dispatch, Refuse, Preempt)}


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(cls: type) -> TypeAdapter[Any]:
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


def _plain(value: object) -> dict[str, Any]:
    found: dict[str, Any] = _adapter(type(value)).dump_python(value, mode="python")
    return found


class EventLog:
    """Writes the log of one pool. A disk error ends the log, never the pool."""

    def __init__(
        self,
        path: Path,
        pool: PoolName,
        names: PoolPolicies,
        profile: Profile,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._path, self._left = path, max_bytes
        self._profiles: dict[Profile, int] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("x", encoding="utf-8")
        header = {"version": VERSION, "pool": pool, "policies": asdict(names)}
        self._line({**header, "profile": _plain(profile)})

    def write(
        self,
        event: Event,
        commands: tuple[Command, ...],
        names: PoolPolicies | None = None,
        profile: Profile | None = None,
        speeds: Speeds = NO_SPEEDS,
    ) -> None:
        """One event and its commands; the rest belongs to a `PoliciesChanged`."""
        if self._file.closed:
            return
        told: dict[str, Any]
        match event:
            case PoliciesChanged(now_s):
                assert names is not None, "a change of policies is written by its names"
                assert profile is not None, "and by the profile that they take"
                told = {"type": "PoliciesChanged", "now_s": now_s, "names": asdict(names)}
                told["profile"] = self._id_of(profile)
                if speeds:
                    told["speeds"] = list(speeds.items())
            case ReplicaReported(profile=its):
                told = {"type": "ReplicaReported", **_plain(event), "profile": self._id_of(its)}
            case _:
                told = {"type": type(event).__name__, **_plain(event)}
        line: dict[str, Any] = {"event": told}
        if commands:
            line["commands"] = [{"type": type(c).__name__, **_plain(c)} for c in commands]
        self._line(line)

    def flush(self) -> None:
        """Make everything written so far readable by others."""
        if not self._file.closed:
            self._do(self._file.flush)

    def close(self) -> None:
        self._do(self._file.close)

    def _id_of(self, profile: Profile) -> int:
        """Replicas report twice a second, so their profile is written only once."""
        if profile not in self._profiles:
            self._profiles[profile] = len(self._profiles)
            self._line({"profile": _plain(profile)})
        return self._profiles[profile]

    def _line(self, value: dict[str, Any]) -> None:
        if self._file.closed:
            return
        text = json.dumps(value, separators=(",", ":")) + "\n"
        self._left -= len(text)
        if self._left < 0:
            log.warning("the event log %s is full; the pool goes on without it", self._path)
            self.close()
            return
        self._do(lambda: self._file.write(text))

    def _do(self, action: Any) -> None:
        try:
            action()
        except OSError as error:
            log.warning("the event log %s ends: %s", self._path, error)
            self._abandon()

    def _abandon(self) -> None:
        with contextlib.suppress(OSError):  # the unwritten rest is lost
            self._file.close()


def opened_log(
    folder: str | None, pool: PoolName, names: PoolPolicies, profile: Profile
) -> EventLog | None:
    """A new log in `folder`; None without a folder, or when it cannot be written."""
    if folder is None:
        return None
    # One file per incarnation of the router: replay starts from empty state.
    name = f"{pool.replace('/', '-')}-{time.strftime('%Y%m%dT%H%M%S')}-{time.monotonic_ns()}.jsonl"
    try:
        return EventLog(Path(folder) / name, pool, names, profile)
    except OSError as error:
        log.warning("pool %s is not logged: %s", pool, error)
        return None


@dataclass(frozen=True, slots=True)
class Recorded:
    """One event and the router's commands."""

    event: Event
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """A log: the pool, its initial policies, and the events."""

    pool: PoolName
    names: PoolPolicies
    profile: Profile
    steps: tuple[Recorded, ...]


def read_log(path: Path) -> Recording:
    """Raise `ConfigError` if it is not an event log. A truncated last line is skipped."""
    lines = _lines(path)
    try:
        header = next(lines)
        if header.get("version") != VERSION:
            raise ConfigError((_problem(path, 1, "not an event log of this version"),))
        names = PoolPolicies(**header["policies"])
        profile = Profile(**header["profile"])
        steps = tuple(_steps(lines, profile))
    except StopIteration:
        raise ConfigError((_problem(path, 1, "the file is empty"),)) from None
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ConfigError((_problem(path, 0, f"not an event log: {error}"),)) from error
    return Recording(PoolName(header["pool"]), names, profile, steps)


def _steps(lines: Iterator[dict[str, Any]], pool_profile: Profile) -> Iterator[Recorded]:
    profiles: list[Profile] = []
    for line in lines:
        if "profile" in line:
            profiles.append(Profile(**line["profile"]))
            continue
        told = dict(line["event"])
        kind = told.pop("type")
        if kind == "PoliciesChanged":
            profile = profiles[told["profile"]] if "profile" in told else pool_profile
            speeds = {int(load): float(speed) for load, speed in told.get("speeds", ())}
            policies = policies_of(PoolPolicies(**told["names"]), profile, speeds)
            event: Event = PoliciesChanged(told["now_s"], policies)
        else:
            if kind == "ReplicaReported":
                told["profile"] = profiles[told["profile"]]
            event = _adapter(_EVENTS[kind]).validate_python(told)
        commands = [dict(c) for c in line.get("commands", ())]
        yield Recorded(
            event, tuple(_adapter(_COMMANDS[c.pop("type")]).validate_python(c) for c in commands)
        )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return  # the writer stopped in the middle of the line
            try:
                value = json.loads(text.decode())
            except UnicodeDecodeError as error:
                raise ConfigError((_problem(path, number, "not an event log"),)) from error
            except (ValueError, RecursionError) as error:
                raise ConfigError((_problem(path, number, f"not JSON: {error}"),)) from error
            if not isinstance(value, dict):
                raise ConfigError((_problem(path, number, "not an event log"),))
            yield value


def _problem(path: Path, line: int, message: str) -> Problem:
    return Problem(str(path), f"line {line}" if line else "", "", message)
