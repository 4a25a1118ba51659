"""The process of a lane, and the one that starts it again when the kernel has ended it.

Its standard input is a socket. A message is a number and a length in four bytes each, and JSON; an
answer has the number of the job that it is about. A job that takes more than its CPU time ends the
process: its parent answers `null` and forks another, which costs 4 ms where a new interpreter would
cost 300 and more. An end of file ends both.
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

# Memory grows with what a job builds, and faster than it in those that this is for.
MEMORY_BYTES = 2 << 30

_HEAD = struct.Struct("!II")
_NUMBER = struct.Struct("!I")


def read_message(socket_: socket.socket) -> tuple[int, bytes]:
    """The number and the content of one message; raise an `OSError` at the end."""
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
    """`do` the jobs of the lane. What is imported before is shared by all forks; `argv` holds
    seconds of CPU time for a job, and how nice to be."""
    cpu_s = float(sys.argv[1])
    os.nice(int(sys.argv[2]))
    gc.collect()
    gc.freeze()
    at_work = mmap.mmap(-1, _NUMBER.size)  # shared: the number of the job that is done
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
    socket_: socket.socket,
    do: Callable[[dict[str, Any]], object],
    cpu_s: float,
    at_work: mmap.mmap,
) -> NoReturn:
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        while True:
            number, message = read_message(socket_)
            at_work[:] = _NUMBER.pack(number)
            job = json.loads(message)
            # Its signal ends the process.
            signal.setitimer(signal.ITIMER_PROF, job.get("cpu_s", cpu_s))
            answer = json.dumps(do(job)).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_message(socket_, number, answer)
    except OSError:
        os._exit(0)
    except BaseException:  # into the log of the owner
        traceback.print_exc()
        os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)
