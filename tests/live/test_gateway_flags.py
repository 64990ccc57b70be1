"""The flags a gateway gives vLLM's server."""

from dataclasses import replace
from pathlib import Path

import pytest
from front import profile

from controlplane.types import Slo

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("live_extra")]


def names(model: str, *flags: str) -> list[str]:
    """What the model is served as."""
    from dataplane.live.gateway.settings import GatewaySettings

    given = GatewaySettings(model, "127.0.0.1", 8000, flags).server_flags()
    after = given[given.index("--served-model-name") + 1 :]
    return after[: next((i for i, word in enumerate(after) if word.startswith("--")), len(after))]


def test_a_folder_is_served_by_its_name_and_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    assert names(str(folder)) == ["tiny-llama", str(folder)]
    monkeypatch.chdir(tmp_path)
    assert names("tiny-llama") == ["tiny-llama"]  # each once: /v1/models lists them
    monkeypatch.chdir(folder)
    assert names(".") == ["tiny-llama", "."]


def test_a_name_from_a_hub_is_served_as_it_is() -> None:
    assert names("meta-llama/Llama-3.1-8B") == ["meta-llama/Llama-3.1-8B"]


def test_the_operators_own_name_wins() -> None:
    assert names("meta-llama/Llama-3.1-8B", "--served-model-name", "mine") == ["mine"]


def test_host_memory_below_kv_is_the_engines_and_not_the_servers(model_folder: Path) -> None:
    from dataplane.live.gateway.server import Gateway, engine_settings_of
    from dataplane.live.gateway.settings import GatewaySettings
    from tokenfleet.cli.serve.flags import ServeFlags

    flags = ServeFlags(model=[str(model_folder)], host_kv="1.5GiB", engine_flags=["--seed=1"])
    words = flags.engine_words()
    gateway = Gateway(GatewaySettings(str(model_folder), "127.0.0.1", 8000, tuple(words)))
    assert engine_settings_of(gateway.arguments)["kv_offloading_size"] == 1.5
    assert gateway.config.kv_transfer_config is None


def test_targets_that_nobody_named_are_eased_to_what_the_fastest_kind_can_meet(live_extra):
    from dataplane.live.control.fleet import DEFAULT_SLO, EASE, LONE_TOKENS, _targets
    from dataplane.live.gateway.events import EventLog

    events, fast = EventLog(), profile()
    slow = replace(fast, step=replace(fast.step, base_s=2.0))
    assert _targets(None, (), events) == DEFAULT_SLO
    assert _targets(None, (slow, fast), events) == DEFAULT_SLO
    eased = _targets(None, (slow,), events)
    assert eased.tpot_s == pytest.approx(EASE * slow.alone_tpot_s(LONE_TOKENS))
    assert eased.ttft_s == pytest.approx(EASE * slow.alone_ttft_s(LONE_TOKENS))
    assert not list(events)
    assert _targets(Slo(5.0, 0.05), (slow,), events) == Slo(5.0, 0.05)  # an operator's stay, and it is said
    assert "no worker meets the targets" in next(iter(events)).reason
