"""Lane worker process: runs jobs under a CPU-time limit, with a parent that forks it again.

Standard input is a socket. A message is a number and a length of four bytes each, then JSON; an
answer has its job's number. A job over its CPU time kills the worker. The parent then answers
`null` and forks another worker in 4 ms; a new interpreter would take 300 ms or more. End of file
ends both.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

# Address-space limit: pathological jobs use more memory than their input suggests.
MEMORY_BYTES = 2 << 30

_HEAD = struct.Struct("!II")
_NUMBER = struct.Struct("!I")


def read_message(socket_: socket.socket) -> tuple[int, bytes]:
    """Number and content of one message; raise `OSError` at end of file."""
    number, length = _HEAD.unpack(_read(socket_, _HEAD.size))
    return number, _read(socket_, length)


def write_message(socket_: socket.socket, number: int, message: bytes) -> None:
    socket_.sendall(_HEAD.pack(number, len(message)) + message)


def _read(socket_: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        if not (more := socket_.recv(count - len(data))):
            raise ConnectionResetError("the other end is closed")
        data += more
    return bytes(data)


def work(do: Callable[[dict[str, Any]], object]) -> None:
    """Run the lane's jobs with `do`. Modules imported before are shared by all forks. `argv` has
    the CPU seconds per job and the nice value."""
    cpu_s = float(sys.argv[1])
    os.nice(int(sys.argv[2]))
    gc.collect()
    gc.freeze()
    at_work = mmap.mmap(-1, _NUMBER.size)  # shared with the fork: the current job's number
    with socket.socket(fileno=0) as socket_:
        while True:
            pid = os.fork()
            if pid == 0:
                _work(socket_, do, cpu_s, at_work)
            _, status = os.waitpid(pid, 0)
            if os.WIFEXITED(status):
                return
            try:
                write_message(socket_, _NUMBER.unpack(at_work[:])[0], b"null")
            except OSError:
                return


def _work(
    socket_: socket.socket, do: Callable[[dict[str, Any]], object], cpu_s: float, at_work: mmap.mmap
) -> NoReturn:
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        while True:
            number, message = read_message(socket_)
            at_work[:] = _NUMBER.pack(number)
            job = json.loads(message)
            # SIGPROF kills the process when the CPU time is used up.
            signal.setitimer(signal.ITIMER_PROF, job.get("cpu_s", cpu_s))
            answer = json.dumps(do(job)).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_message(socket_, number, answer)
    except OSError:
        os._exit(0)
    except BaseException:  # goes to the owner's log
        traceback.print_exc()
        os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)
