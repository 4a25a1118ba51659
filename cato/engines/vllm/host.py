"""The owner's side of a zygote: start it, wait until it can fork engines, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path

from cato.core.errors import EngineError
from cato.engines.vllm import zygote

# Linux: sockaddr_un holds 108 bytes with the closing zero; ".starting" is appended briefly.
MAX_SOCKET_PATH_BYTES = 107 - len(".starting")
# As the default of an engine's `start_timeout`: importing vLLM and torch from a cold network disk
# takes minutes.
START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = zygote.KILL_AFTER_S + 2.0
_POLL_S = 0.02
_ANSWERS_WITHIN_S = 5.0
_LAST_WORDS_BYTES = 8192
_LAST_WORDS_LINES = 30


class Zygote:
    """A zygote process; see `cato.engines.vllm.zygote` for what it does.

    Engines are given `socket`; `python` is the interpreter that has vLLM (None: this one).
    The zygote lives until `stop`, or until this process ends for any reason; its engines end
    with it. Belongs to one asyncio loop.
    """

    def __init__(
        self,
        socket: str | Path,
        *,
        python: str | None = None,
        accelerator: str = "cpu",
        preload: bool = True,
        env: Mapping[str, str] | None = None,
        log: str | Path | None = None,
    ) -> None:
        self.socket = str(socket)
        self.log = str(log) if log is not None else f"{self.socket}.log"
        self._python = python or sys.executable
        self._accelerator = accelerator
        self._preload = preload
        self._env = dict(env or {})
        self._process: Process | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the process without waiting for the preload. No effect while it runs."""
        if self.is_alive:
            return
        check_socket_path(self.socket)
        env = dict(os.environ)
        env.update(zygote.ENGINE_ENV)
        if self._accelerator == "cpu":
            env.update(zygote.CPU_ENV)
        env.update(self._env)
        argv = [zygote.__file__, "--socket", self.socket, "--accelerator", self._accelerator]
        if self._preload:
            argv.append("--preload")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket)
        log, self._log_start = open_log(self.log)
        try:
            self._process = await asyncio.create_subprocess_exec(
                self._python,
                *argv,
                env=env,
                stdin=PIPE,  # its end of file tells the zygote that we are gone
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process only
            )
        except OSError as exc:
            raise EngineError(f"cannot run {self._python!r} for vLLM: {exc}") from exc
        finally:
            os.close(log)

    async def ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start it if needed and return when it can fork engines.

        Raises `EngineError` with the end of its log when it cannot, or not within `timeout_s`.
        """
        if self._process is not None and os.path.exists(self.socket) and not await self._answers():
            await self._process.wait()  # just killed: its socket's file still exists
        await self.start()
        assert self._process is not None
        try:
            async with asyncio.timeout(timeout_s):
                while not os.path.exists(self.socket):
                    if self._process.returncode is not None:
                        raise EngineError(
                            f"vLLM's zygote ended with {self._process.returncode}; "
                            + last_words(self.log, self._log_start)
                        )
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as exc:
            await self.stop()
            raise EngineError(
                f"vLLM was not imported within {timeout_s:g} s (`start_timeout` of the engine); "
                + last_words(self.log, self._log_start)
            ) from exc

    async def _answers(self) -> bool:
        """Whether the zygote answers a request, if only with an error. A connection proves nothing:
        the kernel closes the socket of a killed process only after others learn of its death."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.socket)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:  # its backlog of connections is full
            return True
        try:
            writer.write(b"{}\n")
            async with asyncio.timeout(_ANSWERS_WITHIN_S):
                return bool(await reader.readline())
        except TimeoutError:  # it is busy forking
            return True
        except ConnectionError:
            return False
        finally:
            writer.close()

    async def wait_dead(self) -> str:
        """Return the reason once the process has ended."""
        assert self._process is not None, "start first"
        code = await self._process.wait()
        return f"vLLM's zygote ended with {code}"

    async def stop(self) -> None:
        """Stop it and its engines. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()  # it does not read its input while preloading
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # the kernel then ends the engines
            await process.wait()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket)


def check_socket_path(path: str) -> None:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise EngineError(
            f"socket path {path!r} is longer than {MAX_SOCKET_PATH_BYTES} bytes; "
            "choose a shorter socket folder"
        )


def open_log(path: str) -> tuple[int, int]:
    """A descriptor that appends to the log, and the offset where new output starts."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return log, os.fstat(log).st_size


def last_words(log: str, start: int = 0) -> str:
    """The end of a log, from byte `start` on, for an error message."""
    try:
        with open(log, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - _LAST_WORDS_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as exc:
        return f"no log ({exc})"
    lines = text.splitlines()[-_LAST_WORDS_LINES:]
    return f"last lines of {log}:\n" + "\n".join(lines) if lines else f"{log} is empty"
