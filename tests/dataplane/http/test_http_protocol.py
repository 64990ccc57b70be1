"""Connections within bounds: what idles, drips, grows or crowds is closed; who is merely slow is served."""

import asyncio
import importlib
from contextlib import asynccontextmanager, nullcontext, suppress

import pytest
import uvicorn
from made_certificates import made_certificate

from dataplane.http import protocol
from dataplane.http.server import bind, server_options
from dataplane.http.tls import ServerCertificate, own_host_context

ASK = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n"


@pytest.fixture(params=["httptools_impl.HttpToolsProtocol", "h11_impl.H11Protocol"])
def parser(request, monkeypatch):
    """The module under test, over either of uvicorn's parsers: which one is there depends on the host."""
    module, _, name = request.param.partition(".")
    found = pytest.importorskip(f"uvicorn.protocols.http.{module}")
    with monkeypatch.context() as patch:
        patch.setattr("uvicorn.protocols.http.auto.AutoHTTPProtocol", getattr(found, name))
        yield importlib.reload(protocol)
    importlib.reload(protocol)


async def app(scope, receive, send):
    """Answers with the length of the body, once it has come and, asked for that, a signal has."""
    if scope["path"] == "/refused":
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})
        return
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    if scope["path"] == "/later":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await scope["state"]["go on"].wait()
        await send({"type": "http.response.body", "body": b"ended"})
        return
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def server(certificate=None, kind=None, **more):
    """A server of `app`; its port, and the event that `/later` waits for."""
    listening, go_on = bind("127.0.0.1", 0, "--port"), asyncio.Event()

    async def stated(scope, receive, send):
        scope["state"] = {"go on": go_on}
        await app(scope, receive, send)

    options = server_options(certificate) | ({} if kind is None else {"http": kind.BoundedHttp})
    config = uvicorn.Config(stated, log_level="critical", lifespan="off", **options, **more)
    serving = uvicorn.Server(config)
    serving.capture_signals = nullcontext
    running = asyncio.ensure_future(serving.serve([listening]))
    while not serving.started:
        await asyncio.sleep(0)
    try:
        yield listening.getsockname()[1], go_on
    finally:
        serving.should_exit = True
        await running


def play(story):
    asyncio.run(asyncio.wait_for(story(), 60))


async def call(port, *pieces, tls=None):
    """What comes back, to the end, for these pieces of bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    said = b""
    with suppress(ConnectionResetError):  # it was closed with some of this unread
        said = await reader.read()
    writer.close()
    return said


@pytest.mark.parametrize("said", [b"", b"POST / HT", ASK, ASK + b"12"])
def test_a_request_that_does_not_arrive_ends_in_408(parser, monkeypatch, said):
    monkeypatch.setattr(parser, "ARRIVAL_S", 0.05)

    async def story():
        async with server(kind=parser) as (port, _):
            assert (await call(port, said)).startswith(b"HTTP/1.1 408 ")

    play(story)


def test_dripping_does_not_keep_a_connection_open(parser, monkeypatch):
    monkeypatch.setattr(parser, "ARRIVAL_S", 0.05)
    monkeypatch.setattr(parser, "LEAST_BYTES_PER_S", 1e9)

    async def story():
        async with server(kind=parser) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n")
            answer = asyncio.ensure_future(reader.read())
            while not answer.done():
                writer.write(b"x")
                await asyncio.sleep(0.001)
            if not isinstance(answer.exception(), ConnectionResetError):  # it came upon a drop
                assert answer.result().startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 400 "))
            writer.close()

    play(story)


def test_a_head_without_end_is_refused_and_a_long_one_is_not(parser):
    async def story():
        async with server(kind=parser) as (port, _):
            piece = b"x" * 4096
            endless = await call(port, b"GET / HTTP/1.1\r\nx-a: ", *[piece] * 16)
            bound_of_h11 = b"", b"HTTP/1.1 400 Bad Request"
            assert endless.startswith(b"HTTP/1.1 431 ") or endless.partition(b"\r\n")[0] in bound_of_h11
            last = b"\r\nconnection: close\r\n\r\n"
            assert b" 200 " in await call(port, b"GET / HTTP/1.1\r\nhost: x\r\nx-a: ", *[piece] * 3, last)

    play(story)


def test_a_slow_client_is_served_as_long_as_it_keeps_a_least_pace(monkeypatch):
    monkeypatch.setattr(protocol, "ARRIVAL_S", 0.05)
    monkeypatch.setattr(protocol, "LEAST_BYTES_PER_S", 10.0)

    async def story():
        async with server() as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 20\r\n\r\n")
            for _ in range(20):
                writer.write(b"1")
                await asyncio.sleep(0.01)
            assert (await reader.read()).endswith(b"20")
            writer.close()

    play(story)


def test_an_answer_that_takes_long_is_not_a_request_that_does(monkeypatch):
    monkeypatch.setattr(protocol, "ARRIVAL_S", 0.02)

    async def story():
        async with server() as (port, go_on):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            ask = b"POST /later HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi"
            writer.write(ask + b"\r\n")  # and what some clients send after a body
            await reader.readuntil(b"begun")
            asyncio.get_running_loop().call_later(0.1, go_on.set)
            assert b"ended" in await reader.read()
            writer.close()

    play(story)


def test_an_answer_ahead_of_a_large_body_reaches_its_client_and_so_does_the_next(parser):
    async def story():
        async with server(kind=parser) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            size = 16 * parser.HEAD_BYTES
            writer.write(b"POST /refused HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
            await reader.readuntil(b"\r\n\r\nno")
            for _ in range(16):
                writer.write(b"x" * parser.HEAD_BYTES)
                await writer.drain()
            writer.write(ASK + b"12345")
            await reader.readuntil(b"\r\n\r\n5")
            writer.close()

    play(story)


def test_a_body_without_end_is_cut_once_its_request_is_answered(parser, monkeypatch):
    monkeypatch.setattr(parser, "ARRIVAL_S", 0.05)

    async def story():
        async with server(kind=parser) as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /refused HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            await reader.readuntil(b"\r\n\r\nno")
            rest = asyncio.ensure_future(reader.read())
            while not rest.done():
                writer.write(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
                await asyncio.sleep(0.001)
            writer.close()
            assert isinstance(rest.exception(), ConnectionResetError) or rest.result() == b""

    play(story)


def test_a_connection_that_idles_after_a_body_that_came_too_late_is_closed():
    async def story():
        async with server(timeout_keep_alive=0.05) as (port, _):
            ask = ASK.replace(b"POST /", b"POST /refused")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ask)
            await reader.readuntil(b"\r\n\r\nno")
            writer.write(b"12345")
            assert await reader.read() == b""
            writer.close()

    play(story)


def test_one_connection_too_many_is_told_so_and_the_others_stay(monkeypatch):
    monkeypatch.setattr(protocol, "CONNECTIONS", 1)

    async def story():
        async with server() as (port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK + b"12345")
            await reader.readuntil(b"\r\n\r\n5")
            assert (await call(port)).startswith(b"HTTP/1.1 503 ")
            writer.write(ASK + b"12345")
            await reader.readuntil(b"\r\n\r\n5")
            writer.close()

    play(story)


def test_a_server_over_tls_stops_although_a_client_does_not_say_goodbye(monkeypatch, tmp_path):
    monkeypatch.setattr(protocol, "GOODBYE_S", 0.05)

    async def story():
        async with server(ServerCertificate(*made_certificate(tmp_path))) as (port, _):
            loop = asyncio.get_running_loop()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=own_host_context())
            writer.write(ASK + b"12345")
            await reader.readuntil(b"\r\n\r\n5")
            writer.transport.pause_reading()  # as a pool of connections that nobody looks at
            began_s = loop.time()
        assert loop.time() - began_s < 10.0  # of the 30 s that TLS would wait
        writer.transport.abort()

    play(story)
