"""Requests of its own calibrate a profile: lone prompts, lone decodes and batches say what is off."""

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import numpy as np
import pytest

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import with_times
from controlplane.perfmodel.uncertainty import draw_profile
from tokenfleet.cli.calibrate import BATCH, WARM_UP, probes
from tokenfleet.cli.main import main
from tokenfleet.profiles.fit_log import calibrated, replay
from tokenfleet.profiles.form import parse_profile, profile_text
from tokenfleet.profiles.library import find_profiles
from tokenfleet.profiles.measurements import RequestLog

KNOWN = find_profiles("llama-3.1-8b", ["h100"], [1])[0]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("decode", "prefill", "rest_s"), [(1.3, 0.8, 0.004), (0.85, 1.4, 0.03)])
def test_a_profile_that_is_off_is_put_right_by_fewer_than_fifty_requests_each(
    decode, prefill, rest_s, workers
):
    """The requests are sent as by the wrong profile; the engine is the right one."""
    workload, judged = probes(KNOWN, workers)
    assert judged.sum() <= 50 * workers
    real = replace(with_times(KNOWN, decode, prefill), frontend=replace(KNOWN.frontend, per_request_s=rest_s))
    seen = replay(RequestLog(workload, np.zeros(0), np.zeros(0)), real, workers)
    log = RequestLog(workload, seen.arrival_s + seen.ttft_s, seen.finish_s)
    made, corrections, fit = calibrated(log, KNOWN, judged, workers)
    by_name = {one.name: one.factor for one in corrections}
    assert by_name["decode"] == pytest.approx(decode, rel=0.03)
    assert by_name["prefill"] == pytest.approx(prefill, rel=0.05)
    assert made.frontend.per_request_s == pytest.approx(rest_s, abs=0.005)
    assert not fit.is_refused
    assert parse_profile(profile_text(made), "made") == made, "a file can hold it"


def test_groups_do_not_meet_on_an_engine_as_fast_as_the_profile():
    workload, judged = probes(KNOWN)
    seen = replay(RequestLog(workload, np.zeros(0), np.zeros(0)), KNOWN)
    groups = np.unique(workload.arrival_s)
    for begin, end in pairwise(groups):
        assert seen.finish_s[workload.arrival_s == begin].max() < end
    assert not judged[:WARM_UP].any()
    assert judged[WARM_UP:].all()


def test_small_engines_get_smaller_requests():
    small = replace(KNOWN.with_kv(None, 4 * 304), context_limit_tokens=512).with_engine(max_seqs=64)
    workload, _ = probes(small)
    assert (workload.prompt_tokens + workload.output_tokens).max() <= 512
    batch = max(np.unique(workload.arrival_s, return_counts=True)[1])
    assert 1 < batch <= 4 < BATCH
    with pytest.raises(BadInput, match="a request of 128 tokens does not fit"):
        probes(replace(KNOWN, context_limit_tokens=100))


def test_an_engine_with_a_shorter_context_than_its_profile_gets_no_longer_request(tmp_path, capsys):
    asked = []

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200, {"data": [{"id": "small", "max_model_len": 600}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(len(body["prompt"]) + body["max_tokens"])
            self.answer(400, {"error": "none"})

        def answer(self, status, content):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        flags = ["--profile", "llama-3.1-8b", "--gpu", "h100", "--tp", "1", "--output", str(tmp_path / "x")]
        assert main(["calibrate", "--endpoint", url, *flags]) == 2
        server.shutdown()
    assert "48 of 48 requests failed: HTTP 400" in capsys.readouterr().err
    assert max(asked) == 600


def test_a_gateway_is_learned_and_what_it_is_uncertain_by_is_drawn():
    """A gateway takes 5 to 17 ms, another time for each request; another day's mean is within the draws."""
    workload, judged = probes(KNOWN)
    bare = replace(KNOWN, frontend=replace(KNOWN.frontend, per_request_s=0.0))
    seen = replay(RequestLog(workload, np.zeros(0), np.zeros(0)), bare)
    covered, without = 0, 0
    for seed in range(6):
        rng = np.random.default_rng(seed)
        rest_s = rng.uniform(0.005, 0.017, len(workload))
        log = RequestLog(workload, seen.arrival_s + seen.ttft_s + rest_s, seen.finish_s + rest_s)
        made, _, fit = calibrated(log, KNOWN, judged)
        assert not fit.is_refused
        assert made.frontend.per_request_s == pytest.approx(0.011, abs=2 * made.frontend.doubt_s)
        assert parse_profile(profile_text(made), "made") == made
        later_s = 0.011 + bare.alone_ttft_s(128)
        spread = [
            [draw_profile(one, np.random.default_rng(k)).alone_ttft_s(128) for k in range(200)]
            for one in (made, replace(made, frontend=replace(made.frontend, doubt_s=0.0)))
        ]
        low_high = np.quantile(spread, (0.05, 0.95), axis=1).T
        covered += low_high[0][0] <= later_s <= low_high[0][1]
        without += low_high[1][0] <= later_s <= low_high[1][1]
    assert covered == 6
    assert without == 0  # the third number takes a part of prefill's


def test_a_minute_of_requests_narrows_the_time_per_token_that_plans_draw():
    """Mean TPOT of a calibrated profile scatters less than that of the library's; first tokens need not."""
    workload, judged = probes(KNOWN)
    seen = replay(RequestLog(workload, np.zeros(0), np.zeros(0)), with_times(KNOWN, 1.05, 1.1))
    log = RequestLog(workload, seen.arrival_s + seen.ttft_s, seen.finish_s)
    made = calibrated(log, KNOWN, judged)[0]
    made = replace(made, source=replace(made.source, kind="measured"))  # as `calibrate` writes it
    spread = [
        [
            np.nanmean(replay(log, draw_profile(one, np.random.default_rng(k))).tpot_s[judged])
            for k in range(60)
        ]
        for one in (made, KNOWN)
    ]
    narrow, wide = np.ptp(np.quantile(spread, (0.05, 0.95), axis=1), axis=0)
    assert narrow < 0.9 * wide
