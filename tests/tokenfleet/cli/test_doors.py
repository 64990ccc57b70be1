"""Addresses that `serve` and `api` open to others, and how their clients trust them."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from made_certificates import made_certificate

from controlplane.errors import BadInput
from dataplane.http.keys import keys_of
from dataplane.http.tls import ServerCertificate, certificate_of
from tokenfleet.cli.main import main

OPEN = {"--host": "127.0.0.1", "--control-host": "0.0.0.0"}
CLOSED = {"--host": "localhost", "--control-host": "::1"}


def test_others_are_served_in_the_clear_only_where_that_is_asked(tmp_path):
    with pytest.raises(
        BadInput, match=r"--control-host: 0.0.0.0 is reachable by others.*--tls-cert.*--insec"
    ):
        certificate_of(None, None, False, OPEN)
    assert certificate_of(None, None, True, OPEN) is None
    assert certificate_of(None, None, False, CLOSED) is None
    assert certificate_of(*made_certificate(tmp_path), False, OPEN) is not None


def test_half_of_a_certificate_and_what_contradicts_one_are_refused(tmp_path):
    certificate, key = made_certificate(tmp_path)
    for pair, says in (
        ((certificate, None), "--tls-cert: needs --tls-key"),
        ((None, key), "--tls-key: needs"),
    ):
        with pytest.raises(BadInput, match=says):
            certificate_of(*pair, False, CLOSED)
    with pytest.raises(BadInput, match="--insecure"):
        certificate_of(certificate, key, True, OPEN)


def test_a_door_to_others_needs_a_key(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(BadInput, match="--api-key"):
        keys_of([], None, "0.0.0.0")
    assert keys_of([], None, "127.0.0.1") == ()
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert [key.secret for key in keys_of([], None, "0.0.0.0")] == ["k"]


def refused(capsys, *words):
    assert main([*words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_plan_service_is_locked_alike(capsys, tmp_path):
    open_to_others = ("api", "--host", "0.0.0.0", "--data", str(tmp_path / "data"))
    assert "--control-key" in refused(capsys, *open_to_others)
    line = refused(capsys, *open_to_others, "--control-key", "k")
    assert "--tls-cert and --tls-key, or --insecure" in line
    expired, key = made_certificate(tmp_path, ends_d=-0.5)
    words = (*open_to_others, "--control-key", "k", "--tls-cert", str(expired), "--tls-key", str(key))
    assert "expired on" in refused(capsys, *words)
    assert not (tmp_path / "data").exists()


@pytest.fixture
def https(tmp_path):
    """An API over TLS with one request under way, by its port and its certificate's file."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            body = (
                b'{"requests": [], "scaling": [], "wanted_workers": 2, "auto": false, '
                b'"advisory": false, "max_workers": 8, "says": {"scaling": "manual"}}'
            )
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    files = made_certificate(tmp_path / "served")
    server = HTTPServer(("127.0.0.1", 0), Answer)
    server.socket = ServerCertificate(*files).context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_port, files[0]
    server.shutdown()
    thread.join()
    server.server_close()


def test_fleet_trusts_whom_it_is_told_to(https, capsys, monkeypatch, tmp_path):
    port, certificate = https
    ask = ("fleet", "--control", f"https://localhost:{port}")
    assert main([*ask, "--tls-ca", str(certificate), "explain"]) == 0
    capsys.readouterr()
    line = refused(capsys, *ask, "explain")
    assert "its certificate is not accepted: self" in line
    assert "--tls-ca" in line
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert main([*ask, "explain"]) == 0
    capsys.readouterr()
    assert "--tls-ca: /nowhere: No such file" in refused(capsys, *ask, "--tls-ca", "/nowhere", "explain")


def test_a_certificate_of_another_name_is_said_to_be_that(https, capsys):
    port, certificate = https
    there = ("fleet", "--control", f"https://127.0.0.2:{port}", "--tls-ca", str(certificate), "explain")
    assert "does not answer" in refused(capsys, *there)  # it listens on one address only
    named = ("fleet", "--control", f"https://ip6-localhost:{port}", "--tls-ca", str(certificate), "explain")
    assert main([*named]) == 2


def test_compare_says_whom_it_does_not_trust(https, capsys, tmp_path):
    port, certificate = https
    trace, profile = tmp_path / "t.csv", "profiles/h100-sxm/llama-3.1-8b_tp1.yaml"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,10,5\n")
    words = ["--trace", str(trace), "--profile", profile, "--slo", "ttft=1s,tpot=50ms", "--workers", "1"]
    line = refused(capsys, "compare", *words, "--endpoint", f"https://localhost:{port}")
    assert "its certificate is not accepted" in line
    trusted = ("compare", *words, "--endpoint", f"https://localhost:{port}", "--tls-ca", str(certificate))
    assert "no OpenAI endpoint answers there" in refused(capsys, *trusted)
