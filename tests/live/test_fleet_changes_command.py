"""`tokenfleet fleet evacuate`, `restart` and `update` against a served fleet, and what they refuse."""

import json
import shutil
from urllib.error import HTTPError

import pytest

from tokenfleet.cli.main import main


def fleet(served, *words):
    return main(["fleet", "--control", served.control, *words])


def workers(served):
    return {
        w["worker"]: w["revision"]
        for w in served.ask("GET", "/v1/fleet")["workers"]
        if w["state"] == "serving"
    }


def test_an_update_tells_how_it_goes_and_ends_wholly_new(emulated_fleet, capfd):
    before = workers(emulated_fleet)
    assert fleet(emulated_fleet, "update", "--format", "json", "--", "--max-num-seqs", "64") == 0
    told = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [event["replaced"] for event in told] == [0, 1, 2, 3, 3]
    assert told[-1]["state"] == "done"
    after = workers(emulated_fleet)
    assert len(after) == len(before)
    assert not after.keys() & before.keys()
    assert set(after.values()) == {max(before.values()) + 1}
    assert emulated_fleet.ask("GET", "/v1/fleet")["flags"] == ["--max-num-seqs", "64"]
    assert fleet(emulated_fleet, "status", "--verbose") == 0
    assert "Update 2: done, 3 workers replaced" in capfd.readouterr().out


def test_while_an_update_runs_no_other_begins_and_a_cancel_makes_the_fleet_old_again(emulated_fleet):
    before = workers(emulated_fleet)
    emulated_fleet.ask("POST", "/v1/fleet/update", {"flags": ["--max-num-seqs", "32"]})
    with pytest.raises(HTTPError) as refused:
        emulated_fleet.ask("POST", "/v1/fleet/update", {"flags": ["--max-num-seqs", "16"]})
    assert "is under way" in json.load(refused.value)["error"]["message"]
    emulated_fleet.ask("DELETE", "/v1/fleet/update")
    emulated_fleet.until(lambda: emulated_fleet.ask("GET", "/v1/fleet")["update"]["state"] == "rolled-back")
    assert set(workers(emulated_fleet).values()) == set(before.values())


def test_a_worker_is_restarted_and_another_evacuated(emulated_fleet, capfd):
    first, second, _ = sorted(workers(emulated_fleet))
    assert fleet(emulated_fleet, "restart", first) == 0
    assert fleet(emulated_fleet, "evacuate", second, "--deadline", "5s") == 0
    said = capfd.readouterr().out
    assert f"in place of {first} (start-first" in said
    assert f"{second}: empty after 0.0 s" in said
    assert fleet(emulated_fleet, "evacuate", "--node", "10.0.0.7") == 0
    assert "10.0.0.7: no worker runs there" in capfd.readouterr().out
    emulated_fleet.until(lambda: len(workers(emulated_fleet)) == 3)
    assert not {first, second} & workers(emulated_fleet).keys()
    assert emulated_fleet.metric("tokenfleet_evacuations_total", deadline="met") >= 1


@pytest.fixture(scope="module")
def other_model(model_folder, scratch):
    """The model with two tokens of its vocabulary exchanged."""
    folder = shutil.copytree(model_folder, scratch / "other-tiny")
    made = json.loads((folder / "tokenizer.json").read_text())
    tokens = made["model"]["vocab"]
    first, second, *_ = (token for token in tokens if len(token) == 1)
    tokens[first], tokens[second] = tokens[second], tokens[first]
    (folder / "tokenizer.json").write_text(json.dumps(made))
    return folder


def test_what_cannot_be_is_refused_in_one_line(emulated_fleet, other_model, capfd):
    def refused(*words):
        assert fleet(emulated_fleet, *words) == 2
        return capfd.readouterr().err.strip()

    before = workers(emulated_fleet)
    assert "give the engine flags" in refused("update")
    assert "takes neither" in refused("update", "--cancel", "--model", "x")
    assert "none is under way" in refused("update", "--cancel")
    assert "no such worker" in refused("restart", "w99")
    assert "no such worker" in refused("evacuate", "w99")
    assert "--deadline" in refused("evacuate", "w99", "--deadline", "soon")
    assert "a worker, or --node" in refused("evacuate")
    assert "a worker, or --node" in refused("evacuate", "w99", "--node", "10.0.0.7")
    assert "engine flags: unrecognized" in refused("update", "--", "--no-such-flag")
    assert "--served-model-name" in refused("update", "--", "--served-model-name", "x")
    assert "expected at least" in refused("update", "--", "--max-model-len", "64")
    assert "another tokenizer" in refused("update", "--model", str(other_model))
    assert "\n" not in refused("update", "--model", "/no/such/folder")
    assert workers(emulated_fleet) == before
