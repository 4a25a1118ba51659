"""The process that forks vLLM servers and makes sure that none outlives its owner.

    python zygote.py --socket PATH [--preload] [--accelerator cpu]

Run it by path with the interpreter that has vLLM: until it imports vLLM it needs only the standard
library, so that interpreter need not have CATO. With `--preload` (CPU only: an accelerator's
runtime does not survive a fork) vLLM is imported once and frozen, and an engine is a fork that
answers in 1-2 s; without it, the child imports vLLM itself (20 s and more).

Each connection to the Unix socket owns one engine; messages are JSON lines:

    client   {"argv": [...], "env": {...}, "log": "/path"}
    zygote   {"pid": 4711}          or {"error": "..."}
    zygote   {"exit": 0}            exit status, or minus the signal that ended it

An end of file from the client (closed, half-closed or dead) ends its engine: SIGTERM, then SIGKILL
for its whole session. An end of file on standard input, or a new parent process, means the owner
is gone: all engines end, then the zygote. If the zygote itself is killed, the kernel kills the
engines. The socket exists only once engines can be started.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NoReturn

# vLLM's CPU engine. One passive OpenMP thread per engine: spinning barriers of several engines on
# few cores cost up to 90 % of the throughput. No dynamo: the first request with logprobs would
# compile inside the engine step, and kill the engine where there is no compiler.
CPU_ENV: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
}
# For every engine. The server keeps idle connections longer than the client does (30 s), so that a
# request never meets a closing one. No usage reports to the vLLM project. Editors send a dozen
# stop strings, and fill-in-the-middle models have their own; vLLM 0.32 refuses more than 4.
ENGINE_ENV: Mapping[str, str] = {
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
    "VLLM_MAX_STOP_STRINGS": "64",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

KILL_AFTER_S = 3.0
_PARENT_CHECK_S = 1.0
_MAX_REQUEST_BYTES = 1_000_000
_ACCELERATOR_VARIABLE = "CATO_ENGINE_ACCELERATOR"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_HANDLED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_PRELOADED = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.layers.quantization.online.base",
    "compressed_tensors",
    "vllm.tokenizers",
    "vllm.v1.structured_output",
    "vllm.entrypoints.launchers.api_server.entry",
)

_SCHEDULER_FLAG = "--scheduler-cls"

_libc = ctypes.CDLL(None, use_errno=True)


def hide_cuda_media_packages() -> None:
    """Hide torchvision from transformers where torch has no CUDA.

    PyPI's torchvision, torchaudio and torchcodec link CUDA libraries; with a CPU torch they fail
    to import, and so does every model class of transformers.
    """
    torch = import_module("torch")
    if torch.version.cuda is None:
        for name in ("torchvision", "torchaudio", "torchcodec"):
            sys.modules[name] = None  # type: ignore[assignment]


def preload() -> None:
    """Import an engine's modules, single-threaded, so that forked engines share them.

    A garbage collection over this heap takes 0.4 s and starting an engine runs five: hence the
    freeze. The kernel overrides walk all modules (0.7 s): done once here, skipped in children.
    """
    hide_cuda_media_packages()
    vllm = import_module("vllm")  # fails here if vLLM is missing or broken
    for name in _PRELOADED:
        try:
            import_module(name)
        except ModuleNotFoundError as exc:  # other vLLM version: slower, still correct
            print(f"zygote: vLLM {vllm.__version__} has no {name} ({exc})", flush=True)
    current_platform = import_module("vllm.platforms").current_platform
    if current_platform.is_cpu():
        current_platform.import_kernels()
        if hasattr(current_platform, "register_triton_kernel_overrides"):
            current_platform.register_triton_kernel_overrides()
            type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    os.register_at_fork(before=_note_forking_thread, after_in_child=_follow_forking_thread)
    gc.collect()
    gc.freeze()


class _Engine:
    """One connection and the engine it owns, if it has asked for one."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection: socket.socket | None = connection
        self.received = b""
        self.pid: int | None = None
        self.kill_at_s: float | None = None

    def tell(self, message: Mapping[str, object]) -> None:
        if self.connection is not None:
            with contextlib.suppress(OSError):  # the client is gone; its end of file follows
                self.connection.sendall(json.dumps(message).encode() + b"\n")

    def terminate(self) -> None:
        if self.pid is not None and self.kill_at_s is None:
            self.kill_at_s = time.monotonic() + KILL_AFTER_S
            os.kill(self.pid, signal.SIGTERM)


class Zygote:
    """Accepts connections, forks engines, reaps them. Single-threaded, because it forks."""

    def __init__(self, socket_path: str, *, preloaded: bool) -> None:
        self._socket_path = socket_path
        self._preloaded = preloaded
        self._parent_pid = os.getppid()
        self._engines: list[_Engine] = []
        self._stopping = False
        self._was_terminated = False
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def serve(self) -> None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # adopt grandchildren of a dead engine
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler wakes the selector
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._note_termination)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._drain_wakeups)
        with contextlib.suppress(PermissionError):  # epoll refuses /dev/null and files
            self._selector.register(0, selectors.EVENT_READ, self._read_control)
        self._listen()
        while not (self._stopping and all(e.pid is None for e in self._engines)):
            for key, _ in self._selector.select(self._timeout_s()):
                key.data()
            self._reap()
            self._kill_overdue()
            if self._was_terminated or os.getppid() != self._parent_pid:
                self._stop()

    def _note_termination(self, *_: object) -> None:
        self._was_terminated = True  # the loop acts on it: a handler may interrupt a fork

    def _listen(self) -> None:
        # Bound under another name and renamed: once the path exists, a client can connect.
        unready = f"{self._socket_path}.starting"
        for path in (unready, self._socket_path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._listener.bind(unready)
        os.chmod(unready, 0o600)
        self._listener.listen(64)
        self._listener.setblocking(False)
        os.rename(unready, self._socket_path)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _timeout_s(self) -> float:
        now = time.monotonic()
        kills = [e.kill_at_s - now for e in self._engines if e.kill_at_s is not None]
        return max(0.0, min([_PARENT_CHECK_S, *kills]))

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)

    def _read_control(self) -> None:
        if not os.read(0, 4096):
            self._selector.unregister(0)
            self._stop()

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._socket_path)
            for engine in self._engines:
                engine.terminate()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has left already
            return
        connection.setblocking(True)
        engine = _Engine(connection)
        self._engines.append(engine)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(engine))

    def _read(self, engine: _Engine) -> None:
        assert engine.connection is not None
        try:
            data = engine.connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(engine.connection)
            if engine.pid is None:
                self._forget(engine)
            else:
                engine.terminate()
            return
        engine.received += data
        if engine.pid is None and b"\n" in engine.received:
            self._start(engine, engine.received.partition(b"\n")[0])
        elif len(engine.received) > _MAX_REQUEST_BYTES:
            engine.tell({"error": "the request is too long"})
            self._selector.unregister(engine.connection)
            self._forget(engine)

    def _start(self, engine: _Engine, line: bytes) -> None:
        if self._stopping:
            engine.tell({"error": "the zygote is stopping"})
            return
        try:
            request = json.loads(line)
            argv, env = [str(a) for a in request["argv"]], dict(request.get("env") or {})
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except (ValueError, KeyError, TypeError, OSError) as exc:
            engine.tell({"error": f"{type(exc).__name__}: {exc}"})
            return
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal between the fork and the reset of the handlers must not run ours in the child.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        zygote_pid = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_engine(zygote_pid, argv, env, log)
        except OSError as exc:  # no memory or process left: only this engine fails
            engine.tell({"error": f"fork: {exc}"})
            return
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
            os.close(log)
        engine.pid = pid
        engine.tell({"pid": pid})

    def _become_engine(
        self, zygote_pid: int, argv: list[str], env: dict[str, str], log: int
    ) -> NoReturn:
        code = 1
        try:
            os.setsid()
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != zygote_pid:  # the zygote died before the line above took effect
                os._exit(1)
            os.dup2(log, 1)
            os.dup2(log, 2)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            signal.set_wakeup_fd(-1)
            for number in _HANDLED:
                signal.signal(number, signal.SIG_DFL)
            self._close_inherited()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
            os.environ.update({k: str(v) for k, v in env.items()})
            code = run_server(argv, preloaded=self._preloaded)
        except BaseException:  # log it; never unwind into the zygote's frames
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _close_inherited(self) -> None:
        """Close the zygote's sockets; a connection held open here would hide its end of file."""
        self._selector.close()
        for end in (self._listener, self._wake_reader, self._wake_writer):
            end.close()
        for engine in self._engines:
            if engine.connection is not None:
                engine.connection.close()

    def _reap(self) -> None:
        while True:
            try:
                # WNOWAIT: a zombie's id cannot be reused, so the process group killed is really the
                # engine's.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            engine = next((e for e in self._engines if e.pid == ended.si_pid), None)
            if engine is not None:
                _kill_group(ended.si_pid)
            os.waitpid(ended.si_pid, 0)
            if engine is not None:
                killed = ended.si_code != os.CLD_EXITED
                engine.tell({"exit": -ended.si_status if killed else ended.si_status})
                self._forget(engine)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for engine in self._engines:
            if engine.pid is not None and engine.kill_at_s is not None and engine.kill_at_s <= now:
                engine.kill_at_s = now + KILL_AFTER_S
                _kill_group(engine.pid)
                os.kill(engine.pid, signal.SIGKILL)  # it may not have called setsid yet

    def _forget(self, engine: _Engine) -> None:
        engine.pid = None
        if engine.connection is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(engine.connection)
            engine.connection.close()
            engine.connection = None
        self._engines.remove(engine)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def run_server(argv: list[str], *, preloaded: bool) -> int:
    """Run vLLM's OpenAI server in this process until it ends; return its exit status."""
    sys.argv = ["vllm", *_without_missing_scheduler(argv)]
    if os.environ.get(_ACCELERATOR_VARIABLE) == "cpu" and not preloaded:
        hide_cuda_media_packages()
    if preloaded:
        _adapt_to_fork()
    try:
        try:
            entry = import_module("vllm.entrypoints.launchers.api_server.entry")
        except ModuleNotFoundError:  # before 0.32
            runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
        else:
            entry.main()
    except SystemExit as exc:
        if isinstance(exc.code, str):
            print(exc.code, file=sys.stderr)
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except KeyboardInterrupt:  # vLLM was terminated while starting
        return 128 + signal.SIGTERM
    return 0


def _without_missing_scheduler(argv: list[str]) -> list[str]:
    """Drop CATO's scheduler in an interpreter without CATO."""
    if _SCHEDULER_FLAG not in argv:
        return argv
    at = argv.index(_SCHEDULER_FLAG)
    try:
        import_module(argv[at + 1].rpartition(".")[0])
    except ImportError as exc:
        print(f"zygote: using vLLM's own scheduler: {exc}", flush=True)
        return [*argv[:at], *argv[at + 2 :]]
    return argv


def _adapt_to_fork() -> None:
    """Make the server reuse the preloaded modules where vLLM would start a new process.

    The CPU platform asks for spawn each time a configuration is built. The registry inspects an
    architecture that is new to the host in a subprocess, to keep CUDA out (17 s).
    """
    registry: Any = import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()
    system_utils: Any = import_module("vllm.utils.system_utils")
    system_utils._maybe_force_spawn = lambda: None
    platform = import_module("vllm.platforms.cpu").CpuPlatform
    original = platform.check_and_update_config.__func__

    def check_and_fork(cls: object, config: object) -> None:
        original(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(check_and_fork)


_forked_by_main_thread = False


def _note_forking_thread() -> None:
    global _forked_by_main_thread
    _forked_by_main_thread = threading.current_thread() is threading.main_thread()


def _follow_forking_thread() -> None:
    # The signal follows the thread that forked, not its process: only the main thread will do.
    if _forked_by_main_thread:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_with_parent() -> None:
    """For processes that vLLM spawns: end when the parent ends, for any reason."""
    parent_pid = os.getppid()

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_CHECK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="cato-parent-watch", daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--socket", required=True)
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "gpu", "npu"))
    parser.add_argument("--preload", action="store_true")
    args = parser.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.curdir) != here]
    os.environ[_ACCELERATOR_VARIABLE] = args.accelerator
    defaults = {**ENGINE_ENV, **(CPU_ENV if args.accelerator == "cpu" else {})}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if args.preload:
        started_s = time.monotonic()
        preload()
        print(f"zygote: preloaded in {time.monotonic() - started_s:.1f} s", flush=True)
    Zygote(args.socket, preloaded=args.preload).serve()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a process that vLLM spawned
    _die_with_parent()
    if os.environ.get(_ACCELERATOR_VARIABLE) == "cpu":
        hide_cuda_media_packages()
