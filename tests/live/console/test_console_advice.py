"""The page of `tokenfleet advise --listen`: the terminal's sentences, the last day, and nothing to press."""

import json
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from checkout import ROOT
from counted_servers import busy

from harness.served import free_port


@pytest.fixture
def advised():
    """The address of an advice of a server that is asked things, once it answers."""
    port = free_port()
    with busy() as address:
        command = [sys.executable, "-m", "tokenfleet", "advise", address, "--gpu", "h100", "--every", "1s"]
        command += ["--slo", "ttft=1s,tpot=50ms", "--format", "json", "--listen", f"127.0.0.1:{port}"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            process.stdout.readline()  # the first look: it serves
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.communicate()


def test_the_page_shows_the_sentences_and_has_no_controls(advised, visit):
    tab = visit(f"{advised}/")
    tab.until("#verdict", "1 replica")
    with urllib.request.urlopen(f"{advised}/v1/advice", timeout=30) as reply:
        now = json.load(reply)["now"]
    table = tab.page.locator("#lines")
    for topic, _ in now["says"][1:]:
        table.get_by_role("rowheader", name=topic, exact=True).wait_for()
    assert tab.page.locator("#charts h3").all_inner_texts()[0] == "Replicas"
    assert tab.page.locator("button, input, select, form").count() == 0
    with pytest.raises(urllib.error.HTTPError) as missing:
        urllib.request.urlopen(f"{advised}/plan", timeout=30)
    assert missing.value.code == 404
    missing.value.close()
