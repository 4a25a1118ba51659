"""HAProxy supervisor: restarts HAProxy when it dies, and stops it when Ray Serve is gone.

Ray Serve 2.60 notices a dead HAProxy only after 24 to 34 s, and treats one that it did not start
itself as a failed start. HAProxy must not outlive Serve either: with SO_REUSEPORT it would keep
taking a share of the connections, with an old configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Pause between polls, and per short run before a restart. HAProxy itself starts in 20 ms.
_PAUSE_S = 0.05
# This many runs in a row shorter than this mean a bad configuration: exit, so that Serve sees it.
_LEAST_LIFE_S = 1.0
_MAX_STARTS = 5
_WATCH_S = 0.5
# How long to outlive the actor that started it: Serve replaces the actor within half a minute.
_ALONE_S = 60.0
_ANSWER_WITHIN_S = 4.0
_COMMAND_BYTES = 65_536
_PR_SET_PDEATHSIG = 1
_PID = re.compile(rb"(?m)^Pid: (\d+)")

_libc = ctypes.CDLL(None, use_errno=True)


class Supervisor:
    """Runs `command`, one HAProxy at a time; answers Serve on the socket `asked_at`.

    SIGUSR1 stops it after its open connections, as with HAProxy; SIGTERM stops it at once.
    """

    def __init__(self, command: Sequence[str], asked_at: str) -> None:
        self._command = [own_socket(asked_at) if a == asked_at else a for a in command]
        self._asked_at = asked_at
        self._own = own_socket(asked_at)
        self._process: asyncio.subprocess.Process | None = None
        self._is_leaving = False
        self._parent = os.getppid()
        self._grandparent = _parent_of(self._parent)

    async def run(self) -> int:
        """Supervise until the end; return the exit status of the last HAProxy."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leave, number)
        earlier = None if "-sf" in self._command else await self._earlier()
        watching = asyncio.create_task(self._watch())
        try:
            return await self._supervise(earlier)
        finally:
            watching.cancel()
            self._leave(signal.SIGKILL)

    async def _supervise(self, earlier: int | None) -> int:
        command, short_lives, server = self._command, 0, None
        while True:
            started_s = time.monotonic()
            self._process = await asyncio.create_subprocess_exec(
                *command, preexec_fn=_end_with_parent
            )
            if self._is_leaving:  # the signal came while no HAProxy ran
                self._leave(signal.SIGTERM)
            if server is None and await self._is_up():
                server = await self._listen()
                if earlier is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(earlier, signal.SIGUSR1)
            code = await self._process.wait()
            is_refused = server is None and code >= 0  # it left by itself: a bad configuration
            if self._is_leaving or is_refused:
                return code
            is_short = time.monotonic() - started_s < _LEAST_LIFE_S
            short_lives = short_lives + 1 if is_short else 0
            if short_lives >= _MAX_STARTS:
                return code
            print(f"cato-haproxy: HAProxy exited with {code}; restarting", file=sys.stderr)
            command = _fresh(self._command) if server is not None else self._command
            await asyncio.sleep(_PAUSE_S * short_lives)

    def _leave(self, number: int) -> None:
        self._is_leaving = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _watch(self) -> None:
        """Stop HAProxy when the actor that started us is gone and not replaced."""
        alone_since_s: float | None = None
        while True:
            await asyncio.sleep(_WATCH_S)
            if os.getppid() == self._parent and self._parent != 1:
                continue
            alone_since_s = alone_since_s or time.monotonic()
            is_down = not os.path.exists(f"/proc/{self._grandparent}")
            if is_down or time.monotonic() - alone_since_s > _ALONE_S:
                self._leave(signal.SIGTERM)

    # Serve's stats socket

    async def _is_up(self) -> bool:
        """Wait until this HAProxy answers (an earlier one may answer first); False if it exits."""
        assert self._process is not None
        while self._process.returncode is None:
            with contextlib.suppress(OSError):
                found = _PID.search(await _asked(self._own, b"show info\n"))
                if found is not None and int(found[1]) == self._process.pid:
                    return True
            await asyncio.sleep(_PAUSE_S)
        return False

    async def _earlier(self) -> int | None:
        """Process id of a supervisor left by an earlier actor that still holds our port."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                found = _PID.search(await _asked(self._asked_at, b"show info\n"))
            if found is not None and _parent_of(int(found[1])) != self._parent:
                return int(found[1])
        return None

    async def _listen(self) -> asyncio.Server:
        # Bind under another name and rename, so that clients can connect as soon as the path
        # exists. The name is no longer than the path: socket paths have a length limit.
        unready = str(Path(self._asked_at).with_name(f"{os.getpid()}.s"))
        server = await asyncio.start_unix_server(self._answer, unready, limit=_COMMAND_BYTES)
        os.chmod(unready, 0o600)
        os.rename(unready, self._asked_at)
        return server

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one command to HAProxy; its answer shows our process id instead of its own."""
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                command = await reader.readline()
                answer = await self._asked_until_up(command)
                if command.strip() == b"show info":
                    answer = _PID.sub(b"Pid: %d" % os.getpid(), answer)
                writer.write(answer)
                await writer.drain()
        except (OSError, ValueError, TimeoutError):
            pass  # Serve takes a closed connection as no answer
        finally:
            writer.close()

    async def _asked_until_up(self, command: bytes) -> bytes:
        while True:
            try:
                return await _asked(self._own, command)
            except OSError:
                if self._is_leaving:
                    raise
            await asyncio.sleep(_PAUSE_S)


def own_socket(asked_at: str) -> str:
    """HAProxy's own stats socket, for its supervisor; no longer than the path that Serve uses."""
    return str(Path(asked_at).with_name("own.sock"))


async def _asked(path: str, command: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(command)
        return await reader.read()
    finally:
        writer.close()


def _fresh(command: Sequence[str]) -> list[str]:
    """`command` without the options that take over from an earlier HAProxy."""
    fresh: list[str] = []
    is_pid = False
    for argument, before in zip(command, ["", *command], strict=False):
        is_pid = argument == "-sf" or (is_pid and argument.isdecimal())
        if not is_pid and "-x" not in (argument, before):
            fresh.append(argument)
    return fresh


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _parent_of(pid: int) -> int:
    """Parent process id; 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
