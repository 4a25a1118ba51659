"""Links: who is let in, what is carried, and what their ends mean."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from kits.builders import an_invocation

from cato.core.errors import CapacityError, ContextLengthError, LinkCallError, LinkError
from cato.core.length import LengthBelief
from cato.core.pool.prefill import CallTarget
from cato.core.snapshot import Invocation
from cato.core.topology import AdapterSpec
from cato.engines.base import EngineChunk, EngineRequest
from cato.wire.endpoint import Endpoint
from cato.wire.link import connection as module
from cato.wire.link.codec import Codec, CodecError
from cato.wire.link.connection import Connection, Passive
from cato.wire.link.endpoints import Address, Listener, Tls, connect, listen

CODEC = Codec(
    (Invocation, LengthBelief, EngineRequest, CallTarget, EngineChunk, Endpoint, AdapterSpec)
)
SECRET = b"s" * 32
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
)


class Echo(Passive):
    """Streams what it is asked for; notes whose streams were cancelled, and notes."""

    def __init__(self) -> None:
        self.sent = 0
        self.cancelled = asyncio.Event()
        self.peers_gone = asyncio.Event()
        self.noted: asyncio.Queue[object] = asyncio.Queue()
        self.peer: Connection | None = None

    async def answer(self, peer: Connection, asked: object) -> object:
        self.peer = peer
        match asked:
            case "refuse":
                raise CapacityError("p", "full", 2.5)
            case "break":
                raise ZeroDivisionError
            case "hang":
                try:
                    await asyncio.sleep(100)
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
        return asked

    async def stream(self, peer: Connection, asked: object) -> AsyncGenerator[object, None]:
        assert isinstance(asked, int)
        try:
            for number in range(asked):
                yield (number, b"x" * 1000)
                self.sent += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    def note(self, peer: Connection, note: object) -> None:
        self.noted.put_nowait(note)

    def ended(self, peer: Connection) -> None:
        self.peers_gone.set()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def listener(tmp_path: Path, echo: Echo) -> AsyncIterator[Listener]:
    listener = await listen(
        CODEC, SECRET, echo, name="ingress", host="a", ip="127.0.0.1", folder=tmp_path / "links"
    )
    yield listener
    listener.close()


@contextlib.asynccontextmanager
async def link(
    address: Address, *, host: str = "a", secret: bytes = SECRET, codec: Codec = CODEC
) -> AsyncIterator[Connection]:
    opened = await connect(address, codec, secret, Passive(), name="echo", host=host)
    try:
        yield opened
    finally:
        opened.close("the test is over")


@pytest.mark.parametrize("host", ["a", "b"])
async def test_answers_come_over_a_socket_and_over_tcp(listener: Listener, host: str) -> None:
    invocation = an_invocation("i")
    async with link(listener.address, host=host) as mine:
        assert await mine.ask(invocation) == invocation
        assert [n async for n, _ in mine.call(3)] == [0, 1, 2]
        many = await asyncio.gather(*(mine.ask(n) for n in range(200)))
        assert many == list(range(200))


def test_a_maker_that_misses_a_field_of_its_type_is_refused_when_declared() -> None:
    with pytest.raises(TypeError):
        Codec((LengthBelief,), {LengthBelief: lambda points: LengthBelief(points)})


def test_links_run_on_rays_event_loop_too(tmp_path: Path) -> None:
    async def asked() -> object:
        found = await listen(
            CODEC, SECRET, Echo(), name="n", host="a", ip="127.0.0.1", folder=tmp_path
        )
        async with link(found.address) as mine:
            answer = await mine.ask("hello")
        found.close()
        return answer

    assert uvloop.run(asked()) == "hello"


@pytest.mark.parametrize(
    ("secret", "codec"), [(b"t" * 32, CODEC), (SECRET, Codec((Invocation, LengthBelief)))]
)
async def test_another_secret_or_another_version_is_refused(
    listener: Listener, echo: Echo, secret: bytes, codec: Codec
) -> None:
    with pytest.raises(LinkError):
        async with link(listener.address, secret=secret, codec=codec):
            pass
    assert not echo.peers_gone.is_set()  # it never was a peer


def a_certificate(folder: Path, name: str, authority: str = "") -> Tls:
    """Signed by itself; it believes `authority`, or itself."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    made += ["-nodes", "-keyout", str(key), "-out", str(certificate), "-subj", "/CN=cato"]
    subprocess.run(made, check=True, capture_output=True)
    return Tls(str(certificate), str(key), authority or str(certificate))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
async def test_between_hosts_both_ends_show_certificates_where_tls_is_on(
    tmp_path: Path, echo: Echo
) -> None:
    ours = a_certificate(tmp_path, "ours")
    stranger = a_certificate(tmp_path, "stranger", ours.authority)
    listener = await listen(
        CODEC, SECRET, echo, name="n", host="a", ip="127.0.0.1", folder=tmp_path / "l", tls=ours
    )
    dial = partial(connect, listener.address, CODEC, SECRET, Passive(), name="echo", host="b")
    link = await dial(tls=ours)
    assert await link.ask("hello") == "hello"
    link.close("the test is over")
    for wrong in (stranger, None):
        with pytest.raises(LinkError):
            await dial(tls=wrong)
    listener.close()


async def test_what_is_sent_before_the_proof_is_never_read(listener: Listener) -> None:
    reader, writer = await asyncio.open_unix_connection(listener.address.socket)
    await reader.readexactly(module._HEAD.size + 32)
    writer.write(module._HEAD.pack(1 << 20, 1, 1) + b"x" * (1 << 20))
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


async def test_the_folder_of_sockets_is_the_users_alone(listener: Listener) -> None:
    assert Path(listener.address.socket).parent.stat().st_mode & 0o777 == 0o700


async def test_errors_arrive_as_they_were_raised(listener: Listener) -> None:
    async with link(listener.address) as mine:
        with pytest.raises(CapacityError) as refused:
            await mine.ask("refuse")
        assert refused.value.args == ("p", "full", 2.5)
        with pytest.raises(LinkCallError, match="ZeroDivision"):
            await mine.ask("break")
        assert await mine.ask(1) == 1  # the link itself is whole


async def test_a_frame_that_cannot_be_read_fails_its_call_alone(
    listener: Listener, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the link to end, an offer that no router can read would end it again and again."""
    unpack = Codec.unpack

    def picky(codec: Codec, data: bytes) -> object:
        found = unpack(codec, data)
        if found == reads:
            raise CodecError("not understood: a test")
        return found

    monkeypatch.setattr(Codec, "unpack", picky)
    async with link(listener.address) as mine, link(listener.address) as other:
        reads = "nothing"
        hanging = asyncio.ensure_future(mine.ask("hang"))
        assert await mine.ask("who") == "who"
        reads = "poison"
        with pytest.raises(LinkCallError, match="the call was not understood"):
            await mine.ask("poison")
        mine.note("poison")
        mine.note("hello")
        assert await echo.noted.get() == "hello"
        reads = (3, b"x" * 1000)
        with pytest.raises(LinkCallError, match="its answer was not understood"):
            _ = [item async for item in mine.call(10_000)]
        await asyncio.wait_for(echo.cancelled.wait(), 5)  # the other end stops as well
        assert not hanging.done()
        assert await other.ask(1) == 1
        hanging.cancel()


async def test_giving_up_cancels_at_the_other_end(listener: Listener, echo: Echo) -> None:
    async with link(listener.address) as mine:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(mine.ask("hang"), 0.05)
        await asyncio.wait_for(echo.cancelled.wait(), 5)


async def test_a_call_that_is_given_up_at_once_leaves_nothing(
    listener: Listener, echo: Echo
) -> None:
    """The call and its cancellation arrive together: the task there never runs."""
    async with link(listener.address) as mine:
        given_up = asyncio.create_task(mine.ask("hang"))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await mine.ask("who") == "who"
        assert not echo.cancelled.is_set()
        assert echo.peer is not None
        assert not echo.peer._served


async def test_a_stream_that_is_left_ends_at_the_other_end(listener: Listener, echo: Echo) -> None:
    async with link(listener.address) as mine:
        async with contextlib.aclosing(mine.call(10_000)) as items:
            assert await anext(items) == (0, b"x" * 1000)
        await asyncio.wait_for(echo.cancelled.wait(), 5)


async def test_a_stream_that_is_not_read_stops_itself_alone(listener: Listener, echo: Echo) -> None:
    async with link(listener.address) as mine, contextlib.aclosing(mine.call(2000)) as items:
        await anext(items)
        while await mine.ask(echo.sent) != echo.sent:  # others go on meanwhile
            pass
        assert echo.sent <= module.WINDOW_BYTES / 1000 + 1
        assert [n async for n, _ in items] == list(range(1, 2000))


async def test_the_end_of_a_link_ends_what_it_carried(listener: Listener, echo: Echo) -> None:
    async with link(listener.address) as mine:
        hanging = asyncio.ensure_future(mine.ask("hang"))
        assert await mine.ask(1) == 1
    with pytest.raises(LinkError):
        await hanging
    await asyncio.wait_for(echo.cancelled.wait(), 5)
    await asyncio.wait_for(echo.peers_gone.wait(), 5)
    with pytest.raises(LinkError):
        await mine.ask(1)


async def test_notes_arrive_in_order(listener: Listener, echo: Echo) -> None:
    async with link(listener.address) as mine:
        for number in range(10):
            mine.note(number)
        assert [await echo.noted.get() for _ in range(10)] == list(range(10))


async def test_a_silent_peer_is_gone_and_a_living_one_is_not(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.02)
    async with link(listener.address) as living, link(listener.address) as deaf:
        monkeypatch.setattr(deaf, "data_received", lambda data: None)
        with pytest.raises(LinkError, match="no heartbeat"):
            await deaf.ask("hang")
        assert await living.ask(1) == 1


async def test_sockets_of_dead_processes_are_removed(tmp_path: Path, echo: Echo) -> None:
    left = tmp_path / f"{2**22 + 1}-dead"
    left.touch()
    ours = await listen(CODEC, SECRET, echo, name="n", host="a", ip="127.0.0.1", folder=tmp_path)
    assert not left.exists()
    ours.close()


async def test_a_listener_that_cannot_be_opened_leaves_nothing_open(
    tmp_path: Path, echo: Echo
) -> None:
    async def refused() -> int:
        """Open files after a try at an address of another machine."""
        with pytest.raises(OSError, match="assign"):
            await listen(CODEC, SECRET, echo, name="n", host="a", ip="203.0.113.1", folder=tmp_path)
        return len(os.listdir("/dev/fd"))

    first = await refused()
    assert [await refused() for _ in range(3)] == [first] * 3
    assert list(tmp_path.iterdir()) == []


@given(plain)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    assert CODEC.unpack(CODEC.pack(value)) == value


def test_typed_values_come_back_with_their_types() -> None:
    request = EngineRequest(
        "i", Endpoint.CHAT, {"a": [1, {"b": "\ud800"}]}, adapter=AdapterSpec("m", "s", ("x", "y"))
    )
    error = ContextLengthError("too long", "prompt", 9, 8, 7)
    back, raised = CODEC.unpack(CODEC.pack([request, error]))
    assert back == request
    assert isinstance(back.endpoint, Endpoint)
    assert (type(raised), raised.args) == (ContextLengthError, error.args)


def test_what_is_not_known_is_not_carried() -> None:
    with pytest.raises(CodecError, match="Path"):
        CODEC.pack(Path("x"))
    with pytest.raises(CodecError):
        CODEC.unpack(b"\xc7\x01\x7f\x90")
