"""The guides for fleets that run already: their commands are taken, and their manifests have known fields."""

import re
import shlex

import pytest
import yaml
from checkout import ROOT

from tokenfleet.cli.main import VERBS, command_of

PAGES = [
    *(ROOT / "docs/guides" / name for name in ("already-run-vllm.md", "ways-in.md")),
    *(ROOT / "docs" / name for name in ("advise.md", "advise-scaling.md", "export.md")),
]
COMMAND = re.compile(r"^    tokenfleet ((?:.*\\\n)*.*)$", re.M)
YAML = re.compile(r"```yaml\n(.*?)```", re.S)


def commands(page):
    text = page.read_text()
    return [shlex.split(one.replace("\\\n", " ").partition(" > ")[0]) for one in COMMAND.findall(text)]


def manifests(page):
    return [one for block in YAML.findall(page.read_text()) for one in yaml.safe_load_all(block)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_is_one_that_is_taken(page):
    found = commands(page)
    assert found
    for verb, *words in found:
        command_of(VERBS[verb]).make_context(verb, words, resilient_parsing=False)


def test_the_manifests_of_the_guides_name_what_their_apis_have():
    compose, pool, service = [one for page in PAGES[:2] for one in manifests(page)]
    verb, *words = compose["services"]["advise"]["command"][1:]
    flags = command_of(VERBS[verb]).make_context(verb, words, resilient_parsing=False).params
    assert flags["addresses"] == ["dns:vllm:8000"]
    assert (pool["apiVersion"], pool["kind"]) == ("inference.networking.k8s.io/v1", "InferencePool")
    assert set(pool["spec"]) == {"selector", "targetPorts", "endpointPickerRef"}
    assert set(pool["spec"]["endpointPickerRef"]) == {"name", "port", "failureMode"}
    assert pool["spec"]["endpointPickerRef"]["port"] == {"number": 9002}
    notes = service["metadata"]["annotations"]
    assert notes["serving.kserve.io/autoscalerClass"] == "external"
