"""Profiles from operation tables: what is asked of them, what is refused, and the notes on their numbers."""

import importlib.util
import json
import sys
from datetime import date
from pathlib import Path

import pytest

from controlplane.errors import BadInput, ProfileMissing
from controlplane.perfmodel.profile import Profile
from tokenfleet.cli.main import main

HAS_TABLES = importlib.util.find_spec("aiconfigurator_core") is not None
needs_tables = pytest.mark.skipif(
    not HAS_TABLES, reason="aiconfigurator-core is not installed (predict extra)"
)


def test_without_the_package_one_line_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    out = tmp_path / "p.yaml"
    words = ["profile", "--predict", "--model", "llama-3.1-8b", "--gpu", "h100", "--output", str(out)]
    assert main(words) == 2
    assert "pip install 'tokenfleet[predict]'" in capsys.readouterr().err
    assert not out.exists()


def test_a_gpu_must_be_named_and_only_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "p.yaml")
    assert main(["profile", "--predict", "--model", "m", "--output", out]) == 2
    assert "--gpu: which one?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ["--gpu h100", "--tp 2", "--speculate 0.8@1ms", "--expert-parallel", "--data-parallel 2"]
)
def test_what_is_composed_is_asked_of_no_engine(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--model", "m", *flag.split(), "--output", str(tmp_path / "p.csv")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {flag.split()[0]}: only with --predict")
    assert not list(tmp_path.iterdir())


@needs_tables
def test_a_composed_profile_says_what_it_is_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenfleet.profiles.library import find_profiles, read_profile

    out = tmp_path / "p.yaml"
    words = ["profile", "--predict", "--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "h100"]
    assert main([*words, "--host", "2ms", "--output", str(out), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    profile = read_profile(out)
    assert profile.source.kind == "composed"
    assert profile.source.host_s == 0.002
    assert (profile.model, profile.gpu) == ("llama-3.1-8b", "h100-sxm")
    assert told["kv_tokens"] == profile.kv.capacity_tokens
    assert 0.1 <= profile.residuals.unseen_relative < 0.2
    # The shipped one was composed from the same tables by another route.
    (shipped,) = find_profiles("llama-3.1-8b", ["h100-sxm"], [1])
    for batch in (1, 16, 128):
        ours = float(profile.step.step_s(0, batch, 1024 * batch)) - profile.source.host_s
        theirs = float(shipped.step.step_s(0, batch, 1024 * batch)) - shipped.source.host_s
        assert ours == pytest.approx(theirs, rel=0.1)
    assert profile.kv.capacity_tokens == pytest.approx(shipped.kv.capacity_tokens, rel=0.1)


@needs_tables
@pytest.mark.nightly
def test_drafts_composed_into_a_profile_count_as_those_that_are_asked_of_a_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafts, models = ["--speculate", "0.8/0.6@1ms"], ["meta-llama/Llama-3.1-8B-Instruct", "--gpu", "h100"]
    plain, drafted = tmp_path / "plain.yaml", tmp_path / "drafted.yaml"
    assert main(["profile", "--predict", "--model", *models, "--output", str(plain)]) == 0
    assert main(["profile", "--predict", "--model", *models, *drafts, "--output", str(drafted)]) == 0

    def tpot_s(profile: Path, *more: str) -> float:
        load = ["--trace", "examples/sample_trace.csv", "--window", "0s..10s", "--workers", "2"]
        slo = ["--slo", "ttft=1s,tpot=50ms", "--format", "json"]
        capsys.readouterr()
        assert main(["simulate", *load, *slo, "--profile", str(profile), *more]) == 0
        found = json.loads(capsys.readouterr().out)["tpot_s"]["mean"]
        assert isinstance(found, float)
        return found

    assert tpot_s(drafted) == tpot_s(plain, *drafts)
    assert tpot_s(drafted) < 0.9 * tpot_s(plain)
    assert main(["simulate", "--profile", str(drafted), *drafts, "--workers", "1"]) == 2
    out = str(tmp_path / "none.yaml")
    assert (
        main(["profile", "--predict", "--model", *models, "--speculate", "0.8/1.6@1ms", "--output", out]) == 2
    )
    assert not Path(out).exists()


@needs_tables
@pytest.mark.parametrize(
    ("model", "gpu", "tp", "error", "says"),
    [
        ("nope/x", "h100", 1, ProfileMissing, "not bundled"),
        ("llama-3.1-8b", "tpu", 1, ProfileMissing, "no tables"),
        ("llama-3.1-8b", "h100", 3, BadInput, "--tp: 3"),
        ("llama-3.1-70b", "h100", 1, ProfileMissing, "room for 0 KV tokens"),
        (".", "h100", 1, BadInput, "no config.json"),
    ],
)
def test_what_there_are_no_tables_for_is_refused(
    model: str, gpu: str, tp: int, error: type[Exception], says: str
) -> None:
    from tokenfleet.profiles.predict import PredictedWorker, predicted_profile

    with pytest.raises(error, match=says):
        predicted_profile(PredictedWorker(model, gpu, tp, 0.001), date(2026, 1, 1))


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, 15.5),
        ({"num_local_experts": 32, "num_experts_per_tok": 4}, 7.49),
        ({"n_routed_experts": 256, "num_experts_per_tok": 8}, 31.5),
        ({"num_experts": None, "num_experts_per_tok": None}, 0.0),
        ({"num_local_experts": 8, "num_experts_per_tok": 8}, 0.0),
        ({"hidden_size": 4096}, 0.0),
    ],
)
def test_a_configuration_says_how_many_tokens_touch_most_experts(
    config: dict[str, object], tokens: float
) -> None:
    from tokenfleet.profiles.predict import experts_scale

    assert experts_scale(config) == pytest.approx(tokens, rel=0.01)


def test_kv_that_stops_growing_is_a_requests_own() -> None:
    from tokenfleet.profiles.kv_memory import _kv_bytes

    def tokens_in(held: float, window: float) -> float:
        """Half of the layers attend to a window, each of 100 bytes a token."""
        return held / 200 if held <= 200 * window else window + (held - 200 * window) / 100

    for window in (128, 4096):
        memory = {
            "kv_size_per_token_bytes": 200.0,
            "tokens_from_kv_bytes": lambda held, window=window: tokens_in(held, window),
        }
        told = _kv_bytes(memory, {"sliding_window": window})
        assert told == (pytest.approx(100, rel=1e-6), pytest.approx(100 * window, rel=1e-4), window)
    whole = {"kv_size_per_token_bytes": 200.0, "tokens_from_kv_bytes": lambda held: held / 200}
    assert _kv_bytes(whole, {}) == (pytest.approx(200), pytest.approx(0, abs=1e-2), 0)
    chunks = _kv_bytes(whole, {"attention_chunk_size": 8192})  # Llama 4: every fourth layer attends to all
    assert chunks == (pytest.approx(50), pytest.approx(150 * 8192), 8192)


def test_gemma_3_is_told_to_the_tables_as_a_dense_gemma_4(tmp_path: Path) -> None:
    from tokenfleet.profiles.predict import _config, _known_form

    for inside in (False, True):  # a model of text alone, and one of images, too
        folder = tmp_path / f"gemma-3-{inside}"
        folder.mkdir()
        text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 14}
        written = {"model_type": "gemma3", "text_config": text} if inside else text
        (folder / "config.json").write_text(json.dumps(written))
        config = _config(str(folder))
        assert config["max_position_embeddings"] == 131_072  # which it leaves to transformers
        with _known_form(str(folder), config) as known:
            form = json.loads((Path(known) / "config.json").read_text())
        assert Path(known).name == folder.name
        assert form["architectures"] == ["Gemma4ForConditionalGeneration"]
        told = form["text_config"]
        assert told["layer_types"] == 2 * (5 * ["sliding_attention"] + ["full_attention"]) + 2 * [
            "sliding_attention"
        ]
        assert (told["num_experts"], told["head_dim"], told["hidden_size"]) == (None, 256, 2560)
        assert not Path(known).exists()


class PairsEngine:
    """Tables in which a layer's attention takes 1 ms for each pair of tokens, and all else takes 7 ms."""

    def __init__(self, *seen: int) -> None:
        self.seen = seen  # of each layer

    def _pairs(self, phase: int, n: int, length: int) -> float:
        tokens = range(1, length + 1) if phase == 0 else [length]
        return float(sum(n * min(at, seen) for seen in self.seen for at in tokens))

    def run_static_per_op(self, batch_size: int, isl: int, osl: int) -> list[list[tuple[str, float]]]:
        names = ("context", "generation")
        return [
            [(f"{name}_attention", self._pairs(phase, batch_size, isl)), (f"{name}_attn_norm", 7.0)]
            for phase, name in enumerate(names)
        ]

    def predict_prefill_latency(self, n: int, length: int, prefix: int) -> float:
        return self._pairs(0, n, length) + 7.0

    def predict_decode_latency(self, n: int, context: int, osl: int) -> float:
        return self._pairs(1, n, context) + 7.0

    def mixed_step_latency(self, prefill: int, n: int, length: int, out: int) -> float:
        return self._pairs(0, prefill // length, length) + self._pairs(1, n, length + out // 2) + 7.0


def test_windows_are_counted_from_attention_to_all_tokens() -> None:
    from tokenfleet.profiles.kernels import Kernels, Windows

    all_of_it, window = 10**9, 100
    exact = Kernels(PairsEngine(window, all_of_it, window, window), 1, 1.0)
    counted = Kernels(PairsEngine(*[all_of_it] * 4), 1, 1.0, Windows(0.75, window))
    for length in (1, 60, 100, 101, 400, 3000):
        assert counted.decode_s(3, length) == pytest.approx(exact.decode_s(3, length), rel=1e-9)
        # A sum over tokens, taken as an integral: off by half a token.
        assert counted.prefill_s(2, length) == pytest.approx(exact.prefill_s(2, length), rel=1e-2)
        if length <= window:  # of the prompts' chunks, that is
            mixed = counted.mixed_s(2, 3, length), exact.mixed_s(2, 3, length)
            assert mixed[0] == pytest.approx(mixed[1], rel=1e-9)
    assert Kernels(counted.engine, 1, 1.0).decode_s(3, 3000) > 3 * exact.decode_s(3, 3000)


@needs_tables
def test_windows_without_tables_are_counted_and_said(tmp_path: Path) -> None:
    from tokenfleet.profiles.predict import PredictedWorker, predicted_profile

    folder = tmp_path / "gemma-3-27b"
    folder.mkdir()
    sizes = {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "head_dim": 128}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 16, "sliding_window": 1024}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3_text"} | sizes | heads))
    profile = predicted_profile(PredictedWorker(str(folder), "h100", 4, 0.001), date(2026, 1, 1))
    assert "windows of 1024 tokens, derived from full attention (no measurements)" in profile.source.what
    assert (profile.kv.window_tokens, profile.kv.bytes_per_token) == (1024, 10 * 16 * 128 * 2 * 2)
    # Ten of 62 layers attend to all 131,072 tokens: memory's rate asks for 3 ms a GPU, all 62 for 20.
    far_s, near_s = (float(profile.step.step_s(0, 4, 4 * n)) for n in (131_072, 1024))
    assert 0.002 < far_s - near_s < 0.009
    with pytest.raises(ProfileMissing, match=r"^gemma-3-27b on h100_sxm TP 1: no tables"):
        predicted_profile(PredictedWorker(str(folder), "h100", 1, 0.001), date(2026, 1, 1))


@needs_tables
def test_a_mixture_is_fitted_with_the_experts_it_touches() -> None:
    from tokenfleet.profiles.predict import PredictedWorker, predicted_profile

    asked = PredictedWorker("Qwen/Qwen3-30B-A3B", "h100", 2, 0.001, precision="fp8")
    profile = predicted_profile(asked, date(2026, 1, 1))
    assert [h.start for h in profile.step.hinges if h.of == "experts"] == [pytest.approx(15.5, rel=0.01)]
    assert profile.residuals.held_out_mean is not None
    assert profile.residuals.held_out_mean < 0.08
    assert profile.model == "qwen3-30b-a3b-fp8"
    with pytest.raises(BadInput, match="--precision: one of bf16, fp8, int4, nvfp4, got 'int3'"):
        predicted_profile(PredictedWorker("llama-3.1-8b", "h100", 1, 0.001, precision="int3"), date.today())


@needs_tables
@pytest.mark.nightly
def test_a_mixture_of_lower_precision_has_more_room_and_is_faster() -> None:
    from tokenfleet.profiles.predict import PredictedWorker, predicted_profile

    made = {
        precision: predicted_profile(
            PredictedWorker("Qwen/Qwen3-30B-A3B", "h100", 2, 0.001, precision=precision), date(2026, 1, 1)
        )
        for precision in (None, "fp8")
    }
    for profile in made.values():
        assert [h.start for h in profile.step.hinges if h.of == "experts"] == [pytest.approx(15.5, rel=0.01)]
        assert profile.residuals.held_out_mean is not None
        assert profile.residuals.held_out_mean < 0.08
    assert made["fp8"].kv.capacity_tokens > 1.2 * made[None].kv.capacity_tokens
    assert float(made["fp8"].step.step_s(0, 64, 65_536)) < float(made[None].step.step_s(0, 64, 65_536))


@needs_tables
@pytest.mark.nightly
def test_ranks_are_composed_as_the_tables_have_them_all_alike() -> None:
    from tokenfleet.profiles.predict import PredictedWorker, predicted_profile

    def made(model: str, tp: int, **more: int) -> Profile:
        return predicted_profile(PredictedWorker(model, "h100", tp, 0.001, **more), date(2026, 1, 1))

    whole, ranked = (made("Qwen/Qwen3-30B-A3B", 2), made("Qwen/Qwen3-30B-A3B", 1, data_parallel=2))
    assert (ranked.type_name, ranked.gpus) == ("h100-sxm TP1 DP2", 2)
    assert ranked.ranks is not None
    # Experts are most of a prefill here; the tables' mixed steps on all ranks are those of the sum.
    shared_s = ranked.ranks.shared_token_s * 4096
    assert 0.3 < shared_s / (ranked.alone_ttft_s(4096) - ranked.frontend.per_request_s) < 0.8
    assert 0.25 <= ranked.residuals.unseen_relative < 0.3  # mixtures are further off on measured runs
    # Keys and values are no longer split over two GPUs, nor attention over them.
    assert ranked.kv.capacity_tokens == pytest.approx(whole.kv.capacity_tokens / 2, rel=0.15)

    flat, staged = (made("meta-llama/Meta-Llama-3.1-70B", 4, pipeline_parallel=p) for p in (1, 2))
    assert (staged.type_name, staged.gpus) == ("h100-sxm TP4 PP2", 8)
    assert staged.kv.capacity_tokens > 2.5 * flat.kv.capacity_tokens  # weights are on twice the GPUs
    for batch in (1, 32, 128):
        one, both = (float(p.step.step_s(0, batch, 1024 * batch)) for p in (flat, staged))
        assert one * 0.99 < both < one * 1.05  # all layers, and the way between the stages
    with pytest.raises(BadInput, match="--data-parallel: ranks of a dense model"):
        made("meta-llama/Meta-Llama-3.1-70B", 4, data_parallel=2)
    with pytest.raises(BadInput, match="--data-parallel: not together"):
        made("Qwen/Qwen3-30B-A3B", 1, data_parallel=2, pipeline_parallel=2)


@pytest.mark.parametrize(("layers", "stages", "times"), [(80, 4, 1.0), (61, 2, 62 / 61), (61, 8, 64 / 61)])
def test_stages_are_as_long_as_the_one_with_most_layers(layers: int, stages: int, times: float) -> None:
    from tokenfleet.profiles.kernels import uneven_stages

    assert uneven_stages({"num_hidden_layers": layers}, stages) == pytest.approx(times)
    with pytest.raises(BadInput, match="stages"):
        uneven_stages({"num_hidden_layers": 3}, 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", "4096"),
        ("num_attention_heads", -1),
        ("num_hidden_layers", 0),
        ("max_position_embeddings", -5),
        ("vocab_size", True),
    ],
)
def test_a_configuration_without_its_sizes_is_refused_by_name(
    tmp_path: Path, name: str, value: object
) -> None:
    from tokenfleet.profiles.predict import SIZES, _config

    sizes: dict[str, object] = dict.fromkeys(SIZES, 64)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes))
    assert _config(str(tmp_path)) == sizes
    path.write_text(json.dumps(sizes | {name: value}))
    with pytest.raises(BadInput, match=f"config.json: {name}: .*expected a whole number, at least 1$"):
        _config(str(tmp_path))
