"""gRPC over our own HTTP/2, against grpcio's client, and against bytes that are none."""

import asyncio
import random
import struct
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from picked import free_ports

from tokenfleet.pick.frames import CONTINUATION, DATA, HEADERS, PREFACE, RST_STREAM, SETTINGS
from tokenfleet.pick.hpack import BadHeaders, HeaderDecoder, unhuffed
from tokenfleet.pick.http2 import Connection

ECHO = "/test.Echo/Twice"


class Echo:
    """Gives each message back twice; a message `bad` cannot be read."""

    def __init__(self, send, ended):
        self.send, self.ended = send, ended

    def receive(self, data):
        if data == b"bad":
            raise ValueError(data)
        self.send(data)
        self.send(data)

    def closed(self):
        self.ended.append(self)


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self):
        super().__init__()
        self.written, self.is_closed = b"", False

    def write(self, data):
        self.written += data

    def close(self):
        self.is_closed = True


@asynccontextmanager
async def echoing(ended):
    grpc = pytest.importorskip("grpc")
    (port,) = free_ports(1)

    open_ = set()

    def made():
        def handle(path, send):
            return Echo(send, ended) if path == ECHO else None

        return Connection(handle, open_.add, open_.discard)

    server = await asyncio.get_running_loop().create_server(made, "127.0.0.1", port)
    async with server, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield grpc, channel
    async with asyncio.timeout(10):
        while open_:
            for one in list(open_):
                one.end()
            await asyncio.sleep(0.01)


def test_grpcio_gets_every_message_of_many_streams_also_larger_than_windows():
    async def story():
        ended = []
        async with echoing(ended) as (grpc, channel):
            draw = random.Random(1)
            sizes = [0, 1, 5, 16_384, 70_000, 1_500_000]

            async def one(number):
                call = channel.stream_stream(ECHO)(metadata=(("x-trace-id", f"t-{number % 3}"),))
                sent = [bytes([number]) * draw.choice(sizes) for _ in range(4)]
                for message in sent:
                    await call.write(message)
                    assert await call.read() == await call.read() == message
                await call.done_writing()
                assert await call.read() is grpc.aio.EOF
                assert await call.code() == grpc.StatusCode.OK

            await asyncio.gather(*(one(number) for number in range(20)))
            assert len(ended) == 20
            with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                await channel.unary_unary("/test.Echo/Other")(b"")
            with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
                await channel.unary_unary(ECHO)(b"bad")
            call = channel.stream_stream(ECHO)()
            await call.write(b"left")
            assert await call.read() == b"left"
            call.cancel()
            async with asyncio.timeout(10):
                while len(ended) < 22:
                    await asyncio.sleep(0.01)

    asyncio.run(story())


def frame(kind, flags, number, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, number) + payload


def path_of(path):
    return b"\x04" + bytes([len(path)]) + path.encode()


def played(*parts):
    """What a connection writes for these bytes, whether it has closed, and the handlers that ended."""

    async def story():
        ended, wire = [], Wire()
        one = Connection(lambda path, send: Echo(send, ended) if path == ECHO else None)
        one.connection_made(wire)
        for part in parts:
            if not wire.is_closed:
                one.data_received(part)
        await asyncio.sleep(0)
        one.connection_lost(None)
        return wire, ended

    return asyncio.run(story())


HELLO = b"\0" + struct.pack(">I", 5) + b"hello"


def test_a_message_in_any_pieces_is_the_same_message():
    whole = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 4, 1, path_of(ECHO))
    whole += frame(DATA, 0, 1, HELLO[:3]) + frame(DATA, 1, 1, HELLO[3:])
    at_once, _ = played(whole)
    one_by_one, ended = played(*(whole[n : n + 1] for n in range(len(whole))))
    assert at_once.written.count(HELLO) == one_by_one.written.count(HELLO) == 2
    assert len(ended) == 1
    split = frame(HEADERS, 0, 1, path_of(ECHO)[:4]) + frame(CONTINUATION, 4, 1, path_of(ECHO)[4:])
    continued, _ = played(PREFACE + split + frame(DATA, 1, 1, HELLO))
    assert continued.written.count(HELLO) == 2


@pytest.mark.parametrize(
    "bytes_",
    [
        b"GET / HTTP/1.1\r\nhost: a.example\r\n\r\n",
        PREFACE + frame(DATA, 0, 1, HELLO),
        PREFACE + frame(HEADERS, 4, 2, path_of(ECHO)),
        PREFACE + frame(HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff"),
        PREFACE + frame(CONTINUATION, 4, 1),
        PREFACE + frame(HEADERS, 0, 1) + b"".join(frame(CONTINUATION, 0, 1, b"\0" * 9000) for _ in range(9)),
        PREFACE + b"\xff\xff\xff" + struct.pack(">BBI", DATA, 0, 1),
        PREFACE + frame(HEADERS, 5, 1, path_of(ECHO)) + frame(HEADERS, 4, 1, path_of(ECHO)),
        PREFACE + frame(8, 0, 0, b"\0\0\0\0"),
    ],
)
def test_what_breaks_the_protocol_ends_the_connection(bytes_):
    wire, _ = played(bytes_)
    assert wire.is_closed


frames = st.builds(
    frame,
    st.sampled_from([DATA, HEADERS, RST_STREAM, SETTINGS, 6, 7, 8, CONTINUATION, 2, 11]),
    st.sampled_from([0, 1, 4, 5, 8, 0x2C]),
    st.integers(0, 5),
    st.one_of(st.binary(max_size=40), st.just(HELLO), st.just(path_of(ECHO))),
)


@given(st.lists(frames, max_size=12))
def test_no_frames_raise_or_leave_a_handler_behind(some):
    begun, ended = [], []

    async def story():
        wire = Wire()

        def handle(path, send):
            begun.append(Echo(send, ended))
            return begun[-1]

        one = Connection(handle)
        one.connection_made(wire)
        one.data_received(PREFACE)
        for part in some:
            if not wire.is_closed:
                one.data_received(part)
        one.connection_lost(None)

    asyncio.run(story())
    assert {id(one) for one in begun} == {id(one) for one in ended}


def test_headers_are_those_of_the_rfcs_examples():
    decoder = HeaderDecoder()
    blocks = [  # RFC 7541, C.4
        ("828684418cf1e3c2e5f23a6ba0ab90f4ff", {":path": "/", ":authority": "www.example.com"}),
        ("828684be5886a8eb10649cbf", {"cache-control": "no-cache", ":authority": "www.example.com"}),
        ("828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf", {"custom-key": "custom-value"}),
    ]
    for text, expected in blocks:
        assert expected.items() <= decoder.decoded(bytes.fromhex(text)).items()


@given(st.binary(max_size=60))
def test_any_bytes_are_headers_or_bad_headers(data):
    for read in (HeaderDecoder().decoded, unhuffed):
        try:
            read(data)
        except BadHeaders:
            continue
