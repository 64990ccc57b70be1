"""Profile files, the shipped library, prices: round trips, names, and any bytes at all."""

import math
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.errors import BadInput, ProfileMissing
from controlplane.perfmodel.coefficients import coefficient_row
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Frontend, Profile, Residuals, Source
from controlplane.perfmodel.ranks import Ranks
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.types import EngineMode
from tokenfleet.profiles.form import parse_profile, profile_text
from tokenfleet.profiles.library import (
    _shelves,
    age_warning,
    canonical_gpus,
    canonical_model,
    find_profiles,
    library,
    read_profile,
    write_profile,
)
from tokenfleet.profiles.prices import read_prices

seconds = st.floats(0, 1e3, allow_subnormal=False)
hinges = st.lists(
    st.builds(Hinge, st.sampled_from(["sequences", "prefill_tokens"]), st.floats(0, 1e5), seconds), max_size=2
).map(tuple)
names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=30)
profiles = st.builds(
    Profile,
    model=names,
    gpu=names,
    tp_degree=st.integers(1, 64),
    step=st.builds(StepModel, seconds, seconds, seconds, seconds, seconds, hinges, seconds),
    kv=st.builds(
        KvModel,
        st.integers(1, 10**9),
        st.integers(1, 256),
        st.integers(0, 10**7),
        st.integers(1, 10**12),
        st.floats(0, 1),
    ),
    frontend=st.builds(Frontend, seconds, seconds),
    engine=st.builds(
        EngineLimits,
        name=names,
        version=names,
        mode=st.sampled_from(EngineMode),
        max_batched_tokens=st.integers(1000, 10**6),
        max_seqs=st.integers(1, 1000),
    ),
    residuals=st.builds(
        Residuals, seconds, seconds, seconds, st.integers(0, 10**6), st.none() | seconds, st.none() | seconds
    ),
    source=st.builds(
        Source,
        st.sampled_from(["measured", "composed", "published"]),
        names,
        names,
        st.dates().map(date.isoformat),
        seconds,
    ),
    prefill=st.builds(PrefillModel, seconds, seconds, seconds),
    context_limit_tokens=st.integers(0, 10**7),
)


@given(profiles)
def test_a_profile_comes_back_as_it_was_written(profile: Profile) -> None:
    assert parse_profile(profile_text(profile), "it") == profile
    for ranks in (Ranks("data", 8, 1e-5), Ranks("pipeline", 2)):
        if profile.engine.mode != EngineMode.PREFILL_FIRST:
            ranked = replace(profile, ranks=ranks)
            assert parse_profile(profile_text(ranked), "it") == ranked


def test_files_are_written_and_read(tmp_path: Path) -> None:
    profile = library()[0]
    write_profile(profile, tmp_path / "new" / "p.yaml")
    assert read_profile(tmp_path / "new" / "p.yaml") == profile
    with pytest.raises(BadInput, match="is a folder"):
        write_profile(profile, tmp_path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_profile(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="UTF-8"):
        read_profile(tmp_path / "bytes.yaml")
    (tmp_path / "long.yaml").write_bytes(b"#" * 1_000_001)
    with pytest.raises(BadInput, match="at most 1000000"):
        read_profile(tmp_path / "long.yaml")


def changed(path: str, value: object) -> str:
    content = yaml.safe_load(profile_text(find_profiles("llama-3.1-8b", ["h100"], [1])[0]))
    part = content
    *folders, last = path.split(".")
    for name in folders:
        part = part[name]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return yaml.safe_dump(content)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("step.base_s", None),
        ("step.base_s", -0.01),
        ("step.per_sequence_s", math.nan),
        ("step.per_context_token_s", math.inf),
        ("step.per_prefill_token_s", "fast"),
        ("step.per_prefill_token_s", True),
        ("step.per_token_s", 1.0),
        ("kv.capacity_tokens", 0),
        ("tp_degree", 0),
        ("tp_degree", 1.5),
        ("engine.mode", "warp"),
        ("engine.max_seqs", 100_000),
        ("source.kind", "guessed"),
        ("source.date", "last week"),
        ("residuals.mean_relative", -1),
        ("schema", "tokenfleet.profile/9"),
        ("colour", "blue"),
    ],
)
def test_a_wrong_field_is_named_in_one_line(path: str, value: object) -> None:
    with pytest.raises(BadInput) as caught:
        parse_profile(changed(path, value), "my.yaml")
    message = str(caught.value)
    assert message.startswith("my.yaml: ")
    assert path.split(".")[-1] in message
    assert "\n" not in message


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "fuzz.yaml"
    path.write_bytes(content)
    for read in (read_profile, read_prices):
        with pytest.raises(BadInput) as caught:
            read(path)
        assert "\n" not in str(caught.value)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(["step", "prefill", "hinges", "kv", "engine", "residuals", "source", "model", "fitted"]),
    anything,
)
def test_any_value_in_any_field_is_a_profile_or_one_clear_line(field: str, value: object) -> None:
    content = yaml.safe_load(profile_text(library()[0]))
    content[field] = value
    said = "it: "
    try:
        parse_profile(yaml.safe_dump(content), "it")
    except BadInput as error:
        said = str(error)
    assert said.startswith("it: ")
    assert "\n" not in said


def test_a_model_read_by_itself_has_the_profiles_that_it_has_among_all() -> None:
    whole = _shelves()
    for model in {profile.model for _, profile in whole}:
        assert [row for row in _shelves(model) if row[1].model == model] == [
            row for row in whole if row[1].model == model
        ]


def test_the_library_has_what_it_promises() -> None:
    have = {(p.model, p.gpu, p.tp_degree): p for p in library()}
    for gpu in ("a100-sxm", "h100-sxm", "h200-sxm"):
        for model in ("llama-3.1-8b", "qwen3-32b", "llama-2-7b", "llama-2-13b"):
            assert all((model, gpu, n) in have for n in (1, 2, 4, 8))
        for model in ("llama-3.1-70b", "llama-2-70b"):
            assert all((model, gpu, n) in have for n in (2, 4, 8))
            assert (model, gpu, 1) not in have
    for mixture in (
        ("qwen3-30b-a3b", "h100-sxm", 1),
        ("gpt-oss-120b", "h100-sxm", 4),
        ("deepseek-v3", "h200-sxm", 8),
    ):
        assert [h.of for h in have[mixture].step.hinges if h.of == "experts"] == ["experts"]
    assert have["llama-3.1-8b", "rtx-pro-6000", 1].source.kind == "measured"
    for gpu in ("a100-80gb", "h100-80gb"):
        assert have["bloom-176b", gpu, 8].source.kind == "measured"
        assert all(have["llama-2-70b", gpu, n].source.kind for n in (2, 4, 8))
    for profile in library():
        assert profile.source.licence
        assert date.fromisoformat(profile.source.date)
        assert profile.kv.capacity_tokens >= 8192
        assert profile.residuals.samples > 0
        assert profile.source.kind != "composed" or profile.residuals.unseen_relative > 0
        assert profile.context_limit_tokens > 0
        coefficient_row(profile)  # fits the layout of compiled code


def test_kv_follows_the_share_of_memory_that_the_engine_takes() -> None:
    (profile,) = find_profiles("llama-3.1-70b", ["a100"], [2])
    assert profile.kv.capacity_tokens == 19_824
    # Measured at 0.95: requests that run hold up to 42,000 tokens at once, beside one in prefill.
    assert profile.with_kv(0.95, None).kv.capacity_tokens == pytest.approx(42_000, rel=0.1)
    assert profile.with_kv(0.9, None) == profile
    assert profile.with_kv(0.8, None).kv.capacity_tokens == 16  # no room: a block, which holds no request
    assert profile.with_kv(0.95, 40_000).kv.capacity_tokens == 40_000
    (small,) = find_profiles("llama-3.1-8b", ["rtx-pro-6000"], [1])
    with pytest.raises(BadInput, match=r"--gpu-memory-utilization: .*RTX|rtx.*give --kv-tokens"):
        small.with_kv(0.95, None)
    assert small.with_kv(None, 123_456).kv.capacity_tokens == 123_456


def test_a_worker_that_shares_its_gpu_takes_turns_and_has_an_equal_part_of_the_memory() -> None:
    (whole,) = find_profiles("llama-3.1-8b", ["h100"], [1])
    half = whole.shared(2)
    assert half.kv == whole.kv.with_utilization(0.45, 1)
    # Weights are there as often as workers: two halves hold less than a whole.
    assert 2 * half.kv.capacity_tokens < whole.kv.capacity_tokens - 100_000
    batch = (100.0, 8.0, 5000.0, 20_000.0)
    assert float(half.step.step_s(*batch)) == pytest.approx(2 * float(whole.step.step_s(*batch)))
    assert half.frontend == whole.frontend  # on the host
    assert parse_profile(profile_text(half), "half") == half
    assert (half.label, half.shared(2)) == ("llama-3.1-8b on 1/2 of h100-sxm TP1 (predicted)", half)
    (large,) = find_profiles("llama-2-13b", ["h100"], [1])
    (wide,) = find_profiles("llama-3.1-8b", ["h100"], [2])
    (unknown,) = find_profiles("llama-3.1-8b", ["rtx-pro-6000"], [1])
    split = whole.with_engine(EngineMode.SPLIT)
    for profile, n, says in (
        (large, 4, "weights do not fit into 1/4 of a GPU"),
        (wide, 2, "a worker of 2 GPUs shares none"),
        (unknown, 2, "does not say what memory"),
        (split, 2, "prefill and decode workers share no GPU"),
        (half, 4, "is of 2 workers on a GPU, not 4"),
    ):
        with pytest.raises(BadInput, match=says):
            profile.shared(n)


def test_every_composed_profile_says_what_its_kv_is_from() -> None:
    for profile in library():
        if profile.gpu in ("a100-sxm", "h100-sxm", "h200-sxm"):
            assert profile.kv.gpu_memory_utilization == 0.9, profile.label
            assert profile.kv.gpu_memory_bytes > 79 * 1024**3, profile.label
            assert profile.frontend.per_request_s > 0.0, profile.label


def test_more_gpus_of_a_kind_are_faster_alone() -> None:
    for gpu in ("a100-sxm", "h100-sxm", "h200-sxm"):
        steps = [p.alone_tpot_s(1000) for p in find_profiles("llama-3.1-70b", [gpu])]
        assert steps == sorted(steps, reverse=True)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("meta-llama/Llama-2-13b-chat-hf", "llama-2-13b"),
        ("llama2-7b", "llama-2-7b"),
        ("bigscience/bloom", "bloom-176b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mixtral-8x22B-v0.1", "mixtral-8x22b"),
        ("RedHatAI/Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b-fp8"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.3-70b-fp8"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "llama-3.1-8b-instruct-awq-int4"),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", "llama-4-maverick-17b-128e-fp8"),
    ],
)
def test_models_are_known_by_the_names_people_write(written: str, meant: str) -> None:
    assert canonical_model(written) == meant


@pytest.mark.parametrize(
    ("written", "of", "context"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b", 131_072),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.1-70b-fp8", 131_072),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3.1-8b", 8192),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b", 262_144),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b", 262_144),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507-FP8", "qwen3-235b-a22b-fp8", 262_144),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3", 163_840),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek-v3", 163_840),
    ],
)
def test_models_of_the_same_layers_share_profiles_under_their_own_names(
    written: str, of: str, context: int
) -> None:
    mine, theirs = find_profiles(written), find_profiles(of)
    assert {p.model for p in mine} == {canonical_model(written)} != {of}
    assert {p.context_limit_tokens for p in mine} == {context}
    assert [(p.type_name, p.step, p.kv) for p in mine] == [(p.type_name, p.step, p.kv) for p in theirs]
    assert all(p.source.what.startswith(f"{of}, whose layers are the same: ") for p in mine)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("h100", "h100-sxm"),
        ("H100_SXM", "h100-sxm"),
        ("H100-SXM-80GB", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("a100", "a100-sxm"),
        ("a100-80gb", "a100-80gb"),
        ("H200", "h200-sxm"),
        ("RTX PRO 6000", "rtx-pro-6000"),
        ("h100-pcie", "h100-pcie"),
    ],
)
def test_gpus_are_known_by_the_names_people_write(written: str, meant: str) -> None:
    assert canonical_gpus(written)[0] == meant


def test_old_machines_answer_only_when_nothing_newer_does() -> None:
    assert {p.gpu for p in find_profiles("llama-2-70b")} == {"a100-sxm", "h100-sxm", "h200-sxm"}
    assert {p.gpu for p in find_profiles("llama-2-70b", ["a100"])} == {"a100-sxm"}
    assert {p.gpu for p in find_profiles("bloom")} == {"a100-80gb", "h100-80gb"}
    assert {p.gpu for p in find_profiles("bloom", ["a100"])} == {"a100-80gb"}
    old = find_profiles("llama-2-70b", ["a100-80gb"])
    assert [(p.tp_degree, p.source.kind) for p in old] == [(2, "measured"), (4, "measured"), (8, "measured")]
    assert [p.source.kind for p in find_profiles("llama-2-13b", ["a100-80gb"])] == ["composed"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("llama-3.1-9b",), "nearest: llama-3.1-8b"),
        (("llama-3.1-8b", ["h300"]), "nearest: h"),
        (("llama-3.1-8b", ["h100,a100"]), "'h100,a100': one name was expected; give --gpu once for each"),
        (("llama-3.1-8b", ["h100"], [3]), "no profile at TP 3; there is TP 1, 2, 4, 8"),
        (("llama-3.1-8b", ["h100"], [1, 3, 6]), "no profile at TP 3, 6; there is TP 1, 2, 4, 8"),
        (("bloom-176b", ["h200"]), "no profile on 'h200'; there is one on a100-80gb, h100-80gb"),
        (("zzzzzz",), "known: bloom-176b, deepseek-r1, "),
    ],
)
def test_what_is_missing_is_said_with_what_is_near(asked: tuple[object, ...], says: str) -> None:
    with pytest.raises(ProfileMissing) as caught:
        find_profiles(*asked)  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_age_is_told_plainly() -> None:
    profile = find_profiles("llama-3.1-8b", ["h100"], [1])[0]
    measured = date.fromisoformat(profile.source.date)
    assert age_warning(profile, measured) is None
    assert "365 days old" in str(age_warning(profile, measured.replace(year=measured.year + 1)))
    assert "10 years old" in str(age_warning(profile, measured.replace(year=measured.year + 10)))


def test_every_gpu_of_the_library_has_a_dated_price() -> None:
    prices = read_prices()
    for gpu in {p.gpu for p in library()}:
        price = prices.usd_per_gpu_h(gpu)
        assert price is not None
        assert price.usd > 0
        assert price.source
        assert price.age_warning(price.date) is None
        assert "days old" in str(price.age_warning(price.date.replace(year=price.date.year + 1)))
    assert prices.usd_per_gpu_h("H100") == prices.usd_per_gpu_h("h100-sxm")
    assert prices.usd_per_gpu_h("b300") is None


def test_prices_of_three_providers_are_known_for_each_gpu_but_those_that_say_so() -> None:
    prices = read_prices()
    of: dict[str, set[str]] = {}
    for gpu, _, provider in prices.prices:
        of.setdefault(gpu, set()).add(provider)
    short = {gpu for gpu, names in of.items() if len(names - {""}) < 3}
    assert short <= {"gb200", "a100-80gb", "h100-80gb"}  # profiles/README.md; the last two are the same cards
    theirs = prices.usd_per_gpu_h("h100", "spot", "coreweave")
    ours = prices.usd_per_gpu_h("h100", "spot")
    assert theirs is not None
    assert ours is not None
    assert theirs.usd != ours.usd
    assert prices.usd_per_gpu_h("h100", "spot", "modal") is None  # it has none
    with pytest.raises(BadInput, match=r"--provider: .* has .*coreweave.*, got 'corewave'"):
        prices.usd_per_gpu_h("h100", "spot", "corewave")


def test_a_price_list_of_ones_own_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(
        "schema: tokenfleet.prices/1\nprices:\n"
        "- {gpu: H100, on_demand: 2, date: 2026-11-01, source: our contract}\n"
    )
    prices = read_prices(path)
    price = prices.usd_per_gpu_h("h100-sxm")
    assert price is not None
    assert (price.usd, price.date, price.source) == (2.0, date(2026, 11, 1), "our contract")
    assert prices.usd_per_gpu_h("h100-sxm", "spot") is None
    assert prices.usd_per_gpu_h("a100-sxm") is None
    assert prices.gpus == ["h100-sxm"]


def test_host_memory_has_the_price_of_its_row_and_else_none_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(
        "schema: tokenfleet.prices/1\nprices:\n"
        "- {gpu: h100, on_demand: 2, spot: 1, host_memory_gib: 0.004, date: 2026-11-01, source: x}\n"
        "- {gpu: h100, provider: other, on_demand: 3, date: 2026-11-01, source: y}\n"
    )
    prices = read_prices(path)
    of = [("on_demand", None, 0.004), ("spot", None, 0.004), ("on_demand", "other", 0.0)]
    for kind, provider, usd in of:
        price = prices.usd_per_gpu_h("h100", kind, provider)  # type: ignore[arg-type]
        assert price is not None
        assert price.host_memory_gib == usd
    assert not any(price.host_memory_gib for price in read_prices().prices.values())


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{gpu: h100, on_demand: 2, host_memory_gib: -1, date: 2026-11-01, source: x}", "host_memory_gib"),
        ("{gpu: h100, on_demand: 2, host_memory_gib: .inf, date: 2026-11-01, source: x}", "host_memory_gib"),
        ("{gpu: h100, on_demand: 2, host_memory_gib: yes, date: 2026-11-01, source: x}", "host_memory_gib"),
        ("{gpu: h100, host_memory_gib: 0.01, date: 2026-11-01, source: x}", "needs a price of the GPU"),
        ("{gpu: h100, on_demand: 0, date: 2026-11-01, source: x}", "on_demand"),
        ("{gpu: h100, on_demand: .nan, date: 2026-11-01, source: x}", "on_demand"),
        ("{gpu: h100, on_demand: 2, source: x}", "date"),
        ("{gpu: h100, on_demand: 2, date: soon, source: x}", "date"),
        ("{gpu: h100, price: 2, date: 2026-11-01, source: x}", "price"),
        (
            "{gpu: h100, on_demand: 2, date: 2026-11-01, source: x}\n"
            "- {gpu: h100-sxm, on_demand: 3, date: 2026-11-01, source: x}",
            "given twice",
        ),
    ],
)
def test_a_wrong_price_is_named(tmp_path: Path, row: str, says: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(f"schema: tokenfleet.prices/1\nprices:\n- {row}\n")
    with pytest.raises(BadInput) as caught:
        read_prices(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
