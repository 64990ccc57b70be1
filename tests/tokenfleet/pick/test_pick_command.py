"""`tokenfleet pick` on the command line: bad input is one line; health and metrics, over TLS."""

import asyncio
import subprocess
import sys
import urllib.request
from types import SimpleNamespace

import pytest
from counted_servers import answering
from made_certificates import made_certificate
from picked import free_ports

from harness.vllm_like import VllmLike
from tokenfleet.cli.main import main
from tokenfleet.pick.watch import ServerWatch

SLO = ["--slo", "ttft=1s,tpot=50ms"]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([*SLO], "pick: no server is named, expected addresses or --servers FILE"),
        (["h:1", *SLO, "--policy", "best"], "policy"),
        (
            ["h:1", *SLO, "--policy", "spread+migrate"],
            "--policy: expected one that places requests once, on arrival, got",
        ),
        (
            ["h:1", *SLO, "--kv-events", "5557"],
            "--kv-events: needs --tokenizer too, to know the tokens of prompts",
        ),
        (["h:1", *SLO, "--kv-replay", "5557"], "--kv-replay: needs --kv-events too"),
        (["h:1", *SLO, "--listen", "9002"], "--listen: expected HOST:PORT, got '9002'"),
        (["h:1", *SLO, "--listen", "0.0.0.0:9002"], "--listen: 0.0.0.0 is reachable by others"),
        (["h:1", *SLO, "--client-ca", "ca.pem"], "--client-ca: needs --tls-cert and --tls-key too"),
        (["127.0.0.1:1", *SLO, "--gpu", "h100"], "no server tells its model; give --model"),
        (["127.0.0.1:1", *SLO, "--gpu", "h100", "--profile", "p.yaml"], "--profile: names GPU and TP"),
        (["h:1", "--slo", "ttft=1s"], "--slo: tpot is missing"),
        (["h:1", *SLO, "--queue-wait", "soon"], "--queue-wait"),
    ],
)
def test_bad_input_is_one_line_and_code_two(flags, line, capsys):
    assert main(["pick", *flags]) == 2
    told = [one for one in capsys.readouterr().err.splitlines() if not one.startswith("warning:")]
    assert len(told) == 1
    assert line in told[0]


def test_why_no_server_tells_its_model_is_said(capsys):
    with answering("sglang:num_running_reqs 3.0\n") as address:
        assert main(["pick", address, *SLO, "--gpu", "h100"]) == 2
    assert f"{address}: metrics of SGLang, expected vLLM's" in capsys.readouterr().err


def test_a_picker_serves_health_over_tls_to_clients_of_its_authority_and_ends_on_a_signal(tmp_path):
    """gRPC's own client asks, once with a certificate and once without."""
    grpc = pytest.importorskip("grpc")
    certificate, key = made_certificate(tmp_path)
    port, metrics, *servers = free_ports(3)
    command = [sys.executable, "-m", "tokenfleet", "pick", f"127.0.0.1:{servers[0]}", *SLO]
    command += ["--listen", f"127.0.0.1:{port}", "--metrics-listen", f"127.0.0.1:{metrics}"]
    command += ["--tls-cert", str(certificate), "--tls-key", str(key), "--client-ca", str(certificate)]

    def ask(*own):
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes(), *own)
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            return channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=20)

    async def story():
        server = VllmLike(servers[0])
        await server.start()
        picker = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        try:
            async with asyncio.timeout(60):
                lines = [(await picker.stdout.readline()).decode() for _ in range(5)]
            assert lines == [
                f"127.0.0.1:{servers[0]}: gets requests; KV memory for 400,000 tokens\n",
                "placement: least loaded server (no --gpu, no --profile)\n",
                "prompt tokens: estimated from bytes (no --tokenizer)\n",
                "prefix caches: unknown (no --tokenizer)\n",
                f"picking at 127.0.0.1:{port}; servers that answer: 1 of 1\n",
            ]
            assert await asyncio.to_thread(ask, key.read_bytes(), certificate.read_bytes()) == b"\x08\x01"
            with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                await asyncio.to_thread(ask)
            url = f"http://127.0.0.1:{metrics}/metrics"
            text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
            assert "tokenfleet_pick_decision_seconds_count 0.0" in text
        finally:
            picker.terminate()
            assert await picker.wait() == 0
            assert await picker.stdout.read() == b"stopped\n"
            await server.stop()

    asyncio.run(story())


def test_a_worker_of_serve_is_refused_in_a_line():
    async def pages(at_s):
        return {"127.0.0.1:8001 w0": None}

    told, fleet = [], SimpleNamespace(clock=lambda: 0.0, calls={}, servers={})
    watch = ServerWatch(SimpleNamespace(pages=pages), fleet, None, None, told.append, "", "")
    asyncio.run(watch.look())
    assert told == [
        "127.0.0.1:8001 w0: gets no requests: it is a worker of `tokenfleet serve`, whose own gateway"
        " places requests"
    ]
