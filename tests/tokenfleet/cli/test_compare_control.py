"""The error of `tokenfleet compare` at a control API that runs no fleet."""

import asyncio
import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from controlplane.errors import BadInput
from tokenfleet.cli.compare import _counters


class NoFleet(BaseHTTPRequestHandler):
    """Answers as `tokenfleet api` does, which only plans."""

    def do_GET(self):
        body = b'{"error": {"message": "Not Found"}}'
        self.send_response(404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_control_api_without_a_fleet_is_told_as_one():
    pytest.importorskip("aiohttp", reason="the live extra is not installed")
    server = HTTPServer(("127.0.0.1", 0), NoFleet)
    threading.Thread(target=server.serve_forever).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(BadInput) as refused:
            asyncio.run(
                _counters(SimpleNamespace(control=url, control_key=None), ssl.create_default_context())
            )
    finally:
        server.shutdown()
        server.server_close()
    assert str(refused.value).startswith(f"--control: {url}: does not answer as a fleet does: ")
