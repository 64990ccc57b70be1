"""Certificates: refused in one line, served to clients that trust them, renewed with connections open."""

import asyncio
import shutil
import ssl
from contextlib import nullcontext

import httpx
import pytest
import uvicorn
from made_certificates import made_certificate

from controlplane.errors import BadInput
from dataplane.http.server import address, bind, follow, server_options, until_answering
from dataplane.http.tls import ServerCertificate, client_context, own_host_context


@pytest.mark.parametrize(
    ("made", "hosts", "says"),
    [
        ({"ends_d": -0.5}, (), "--tls-cert: .*: expired on "),
        ({"begins_d": 0.5}, (), "--tls-cert: .*: not valid before "),
        ({}, ("127.0.0.1", "api.example.com"), "is for localhost, not for api.example.com"),
        ({"names": ("*.example.com",)}, ("a.b.example.com",), r"is for \*.example.com, not for a.b"),
        ({"password": b"p"}, (), "--tls-key: .*: holds no private key in PEM form without a password"),
    ],
)
def test_what_no_client_would_accept_is_refused(tmp_path, made, hosts, says):
    files = made_certificate(tmp_path, **made)
    with pytest.raises(BadInput, match=says):
        ServerCertificate(*files, hosts)


@pytest.mark.parametrize("hosts", [("0.0.0.0",), ("10.1.2.3", "::1"), ("API.example.com",), ()])
def test_a_certificate_serves_its_names_and_any_address(tmp_path, hosts):
    ServerCertificate(*made_certificate(tmp_path, names=("*.example.com",)), hosts)


def test_a_key_of_another_certificate_is_refused(tmp_path):
    ours, theirs = made_certificate(tmp_path / "a"), made_certificate(tmp_path / "b")
    with pytest.raises(BadInput, match=r"--tls-key: .*: does not fit .*tls\.crt"):
        ServerCertificate(ours[0], theirs[1])


def test_files_that_are_none_are_refused_by_the_flag_that_named_them(tmp_path):
    certificate, key = made_certificate(tmp_path)
    gone, text = tmp_path / "gone.pem", tmp_path / "text.pem"
    text.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n")
    for pair, says in (
        ((gone, key), "--tls-cert: .*gone.pem: cannot be read"),
        ((text, key), "--tls-cert: .*text.pem: holds no certificate"),
        ((certificate, gone), "--tls-key: .*gone.pem: cannot be read"),
        ((certificate, text), "--tls-key: .*text.pem: holds no private key"),
    ):
        with pytest.raises(BadInput, match=says):
            ServerCertificate(*pair)
    with pytest.raises(BadInput, match=r"--tls-ca: .*text\.pem: holds no certificate"):
        client_context(text)


async def echo(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": scope["scheme"].encode()})


def served(certificate, story):
    """Play a story while a server with this certificate runs; it answers with the scheme of the request."""

    async def play():
        listening = bind("127.0.0.1", 0, "--port")
        port = listening.getsockname()[1]
        options = {"log_level": "critical", "lifespan": "off", **server_options(certificate)}
        server = uvicorn.Server(uvicorn.Config(echo, **options))
        server.capture_signals = nullcontext
        answering = asyncio.ensure_future(server.serve([listening]))
        await until_answering("127.0.0.1", port, answering, certificate is not None)
        try:
            await asyncio.wait_for(story(port), 60)
        finally:
            server.should_exit = True
            await answering

    asyncio.run(play())


def test_clients_that_trust_it_are_served_and_others_send_nothing(tmp_path):
    files = made_certificate(tmp_path / "ours")
    stranger = made_certificate(tmp_path / "theirs")

    async def story(port):
        async with httpx.AsyncClient(verify=client_context(files[0])) as client:
            assert (await client.get(f"https://localhost:{port}/")).text == "https"
            assert (await client.get(f"https://127.0.0.1:{port}/")).text == "https"
            with pytest.raises(httpx.RemoteProtocolError):  # in the clear
                await client.get(f"http://127.0.0.1:{port}/")
        async with httpx.AsyncClient(verify=client_context(stranger[0])) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get(f"https://localhost:{port}/")

    served(ServerCertificate(*files), story)


async def shown(port):
    """The certificate that a new connection is shown, by its bytes; the client names no server."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=own_host_context())
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


def der(certificate):
    return ssl.PEM_cert_to_DER_cert(certificate.read_text())


def test_a_new_certificate_is_taken_and_a_bad_one_is_told_while_connections_go_on(tmp_path):
    certificate, key = made_certificate(tmp_path / "served")
    first = tmp_path / "first.crt"
    shutil.copy(certificate, first)
    renewed = made_certificate(tmp_path / "renewed")
    expired = made_certificate(tmp_path / "expired", ends_d=-0.5)
    serving, told = ServerCertificate(certificate, key), []

    async def until_told(what):
        while not told:
            await asyncio.sleep(0.005)
        line = told.pop()
        assert what in line
        assert not told

    async def story(port):
        following = asyncio.ensure_future(follow(serving.files, serving.reload, told.append, 0.05))
        async with httpx.AsyncClient(verify=client_context(first)) as old:
            url = f"https://localhost:{port}/"
            assert (await old.get(url)).status_code == 200
            shutil.copy(expired[1], key)
            shutil.copy(expired[0], certificate)
            await until_told("tls.crt: expired on")
            assert await shown(port) == der(first)
            shutil.copy(renewed[0], certificate)  # its key comes later: seen together or not at all
            shutil.copy(renewed[1], key)
            await until_told("in force from now on")
            assert await shown(port) == der(renewed[0])
            assert (await old.get(url)).status_code == 200  # on the connection that is open
        key.unlink()
        await until_told("tls.key: cannot be read")
        assert await shown(port) == der(renewed[0])
        following.cancel()

    served(serving, story)


def test_addresses_say_how_they_are_called(tmp_path):
    certificate = ServerCertificate(*made_certificate(tmp_path))
    assert address("::1", 8000, certificate) == "https://[::1]:8000"
    assert address("h", 80, None) == "http://h:80"
