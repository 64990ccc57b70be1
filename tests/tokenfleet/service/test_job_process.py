"""A job's errors name the field that a faulty text was sent in."""

import json
import subprocess
import sys

import pytest
from checkout import ROOT

from controlplane.errors import BadInput
from tokenfleet.planning.threads import Watch
from tokenfleet.service.job_process import answer

NO_PRICE = """schema: tokenfleet.prices/1
prices:
- {gpu: h100-sxm, on_demand: -1, date: 2026-01-01, source: us}
"""


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ({"prices": NO_PRICE}, "prices: prices.0.on_demand: "),
        ({"prices": "gpu: 1"}, "prices: schema: "),
        ({"profiles": ["a: 1"], "gpu": []}, "profiles.0: "),
    ],
)
def test_a_faulty_text_is_named_by_the_field_that_it_was_sent_in(tmp_path, sent, says):
    trace = tmp_path / "day.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,20\n1,100,20\n")
    order = {
        "trace": {"upload": "any"},
        "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
        "model": "llama-3.1-8b",
        "gpu": ["h100"],
    }
    job = {"question": order | sent, "trace_path": str(trace), "trace_name": "day.csv", "threads": 1}
    with pytest.raises(BadInput) as refused:
        answer(job, Watch())
    assert str(refused.value).startswith(says), refused.value


def test_a_job_that_has_answered_ends_in_order_while_its_asker_still_holds_its_stdin():
    command = [sys.executable, "-m", "tokenfleet.service.job_process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        process.stdin.write(b'{"question": {}}\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["error"].endswith("trace: field required")
        assert process.wait(timeout=60) == 0
