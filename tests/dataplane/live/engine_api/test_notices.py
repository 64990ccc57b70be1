"""Reclaim notices: each cloud's own format, a file, and whatever else may stand there."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from dataplane.live.engine_api.notices import (
    AWS,
    AZURE,
    GOOGLE,
    checked_source,
    of_aws,
    of_azure,
    of_file,
    of_google,
    read_notice,
)

AZURE_EVENTS = {
    "DocumentIncarnation": 1,
    "Events": [
        {"EventType": "Reboot", "Resources": ["vm-0"], "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"},
        {"EventType": "Preempt", "Resources": ["vm-1"], "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT"},
    ],
}


def test_aws_says_when_it_takes_its_machine():
    notice = of_aws('{"action": "terminate", "time": "2017-09-18T08:22:00Z"}')
    assert (notice.why, notice.at_s) == ("AWS will terminate its machine", 1505722920.0)


def test_google_says_true_or_false():
    assert of_google("TRUE\n").at_s is None
    assert of_google("FALSE") is None


def test_azure_tells_of_a_whole_group_of_machines():
    text = json.dumps(AZURE_EVENTS)
    assert of_azure(text, "vm-1").at_s == 1474309787.0
    assert of_azure(text, "vm-0") is None
    assert of_azure('{"Events": []}', "vm-0") is None


def test_azure_leaves_out_the_time_of_what_has_begun():
    event = {"EventType": "Terminate", "Resources": ["vm-1"], "NotBefore": ""}
    assert of_azure(json.dumps({"Events": [event]}), "vm-1").at_s is None


def test_a_file_names_workers_or_means_all_of_its_machine():
    assert of_file('{"deadline_s": 20, "workers": ["w1"]}', "w1", 100.0).at_s == 120.0
    assert of_file('{"deadline_s": 20, "workers": ["w1"]}', "w2", 100.0) is None
    assert of_file("", "w2", 100.0).at_s is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "expected a JSON object"),
        ('{"workers": "w0"}', "workers: expected a list of names"),
        ('{"deadline_s": "soon"}', "deadline_s: expected seconds"),
        ('{"deadline_s": -1}', "deadline_s: expected seconds"),
        ('{"deadline_s": true}', "deadline_s: expected seconds"),
    ],
)
def test_a_file_that_cannot_be_read_says_its_field(text, said):
    with pytest.raises(BadInput, match=said):
        of_file(text, "w0", 0.0)


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["workers", "deadline_s", "time", "action", "Events", "EventType", "NotBefore", "Resources"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(st.text(max_size=60) | values.map(json.dumps))
def test_no_answer_makes_a_reader_fail_in_another_way(text):
    for read in (
        of_aws,
        of_google,
        lambda said: of_azure(said, "vm"),
        lambda said: of_file(said, "w0", 0.0),
    ):
        try:
            notice = read(text)
        except BadInput:
            continue
        assert notice is None or notice.why


@pytest.mark.parametrize(
    "source", ["", "notices.json", "file:relative", "http://host/else", "ftp://h/x", "file:"]
)
def test_what_is_no_source_is_refused(source):
    with pytest.raises(BadInput, match="--reclaim-notice: expected"):
        checked_source(source)


@pytest.fixture
def cloud():
    """A metadata service that answers as AWS, Google and Azure do, to those who ask as each wants it."""
    answers, refused = {}, []

    class Answer(BaseHTTPRequestHandler):
        def do_PUT(self):
            self.reply("a-token" if self.headers["X-aws-ec2-metadata-token-ttl-seconds"] else None)

        def do_GET(self):
            path = self.path.partition("?")[0]
            asks = {
                AWS: self.headers["X-aws-ec2-metadata-token"] == "a-token",
                GOOGLE: self.headers["Metadata-Flavor"] == "Google",
            }
            if not asks.get(path, self.headers["Metadata"] == "true"):
                refused.append(path)
            self.reply(answers.get(path))

        def reply(self, text):
            self.send_response(200 if text is not None else 404)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    thread.join()
    server.server_close()
    assert not refused


def test_each_cloud_is_asked_as_it_wants_it(cloud):
    address, answers = cloud
    assert all(read_notice(address + path, "w0") is None for path in (AWS, GOOGLE, f"{AZURE}?api-version=1"))
    answers |= {
        AWS: '{"action": "stop", "time": "2017-09-18T08:22:00Z"}',
        GOOGLE: "TRUE",
        AZURE: json.dumps(AZURE_EVENTS),
        "/metadata/instance/compute/name": "vm-1",
    }
    assert read_notice(address + AWS, "w0").at_s == 1505722920.0
    assert read_notice(address + GOOGLE, "w0") is not None
    assert read_notice(f"{address}{AZURE}?api-version=1", "w0").why == "Azure: Preempt"


def test_a_file_is_read_once_it_is_there(tmp_path):
    path = tmp_path / "notice.json"
    assert read_notice(f"file:{path}", "w0") is None
    path.write_text('{"workers": ["w0"]}')
    assert read_notice(f"file:{path}", "w0") is not None
