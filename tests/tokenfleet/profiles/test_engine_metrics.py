"""vLLM's metrics pages: what is read from them, between which scrapes, and what calibrates a profile."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from counting_engine import LIMITS, counted
from hypothesis import given
from hypothesis import strategies as st
from made_profiles import made_profile

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import KvModel
from controlplane.perfmodel.step import StepModel
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from tokenfleet.cli.main import main
from tokenfleet.profiles import engine_metrics
from tokenfleet.profiles.engine_metrics import GAUGES, NAMES, drafts, engine_counts, intervals_of, kv_of
from tokenfleet.profiles.library import read_profile, write_profile

TRUTH = StepModel(0.012, 6e-5, 2e-4, 1e-7)
PRIOR = made_profile(StepModel(0.006, 9e-5, 1e-4, 1e-7), KvModel(8_000, 16), LIMITS)
COUNTERS = [name for name in NAMES if name not in ("running", "kv_share", "drafted")]


def page(values, engine="0", newest=True, blocks=25_000, label="engine"):
    """A metrics page of one engine, in the names of a new version or an old one."""
    lines = [f'vllm:cache_config_info{{block_size="16",{label}="{engine}",num_gpu_blocks="{blocks}"}} 1.0']
    for name, value in values.items():
        lines.append(
            f'vllm:{NAMES[name][0 if newest else -1]}{{{label}="{engine}",model_name="m"}} {value!r}'
        )
    return "\n".join(lines) + "\n"


def zeros(**more):
    return dict.fromkeys(COUNTERS, 0.0) | {"running": 0.0, "kv_share": 0.0} | more


def pages(intervals, kv_tokens=400_000, **how):
    """The pages of an engine that did this, one at the beginning and one after each interval."""
    now = zeros()
    yield page(now, **how)
    for one in intervals:
        for name in ("gaps", "gaps_s", "first_tokens", "first_tokens_s", "finished", "finished_prefill_s",
                     "finished_prefill_tokens", "finished_queue_s"):  # fmt: skip
            now[name] += float(getattr(one, name))
        now["prompt_tokens"] += float(one.prefill_tokens) + 50.0
        now["cached_tokens"] += 50.0
        now["running"] = float(one.running + one.running_change / 2)
        now["kv_share"] = float(one.context_tokens / kv_tokens)
        yield page(now, **how)


@pytest.mark.parametrize("newest", [True, False])
def test_old_names_and_new_ones_are_read_alike(newest):
    first = engine_counts(page(zeros(), newest=newest), 0.0)
    values = zeros(gaps=100.0, gaps_s=1.5, first_tokens=4.0, first_tokens_s=0.2, prompt_tokens=900.0,
                   cached_tokens=400.0, running=2.0, kv_share=0.01)  # fmt: skip
    then = engine_counts(page(values, newest=newest), 3.0)
    (one,) = intervals_of([first, then])
    assert (one.seconds, one.gaps, one.gaps_s, one.prefill_tokens) == (3.0, 100.0, 1.5, 500.0)
    assert (one.running, one.running_change, one.context_tokens) == (1.0, 2.0, 0.005 * 400_000)
    assert kv_of(then) == (400_000, 16)


def test_a_restart_a_gap_and_what_is_no_number_are_left_out_and_nothing_else():
    def at(t, gaps, **more):
        return engine_counts(page(zeros(gaps=gaps, gaps_s=gaps / 100, **more)), t)

    scrapes = [at(0.0, 10.0), at(3.0, 20.0), at(6.0, 5.0), at(9.0, 9.0), at(100.0, 50.0)]
    scrapes += [at(103.0, 60.0, kv_share=float("nan")), at(106.0, 70.0), at(109.0, 80.0)]
    assert [one.gaps for one in intervals_of(scrapes)] == [10.0, 4.0, 10.0]


def test_engines_of_one_page_are_told_apart_and_sources_of_one_engine_added():
    text = page(zeros(gaps=5.0), "0") + page(zeros(gaps=7.0), "1")
    text += 'vllm:prompt_tokens_cached_by_source_total{engine="0",source="disk"} 3\n'
    found = engine_counts(text, 0.0)
    assert [one.values["gaps"] for one in found.values()] == [5.0, 7.0]
    gateway = engine_counts(page(zeros(), "w-1", label="worker") + page(zeros(), "w-2", label="worker"), 0.0)
    assert len(gateway) == 2


def test_the_kv_is_an_engines_own_whoever_adds_it_up():
    own = 'block_size="16",num_gpu_blocks="50000",kv_cache_size_tokens="400000"'
    told = {
        f'vllm:cache_config_info{{engine="0",{own}}} 1\n': (400_000, 16),
        'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="25000"} 1\n'  # of both together
        'vllm:cache_config_info{engine="1",block_size="16",num_gpu_blocks="25000"} 1\n': (200_000, 16),
        'vllm:cache_config_info{worker="w-1",block_size="64",num_gpu_blocks="25000"} 1\n': (0, 0),
        # slots of a gateway's, with a worker and without
        'vllm:cache_config_info{worker="w-1",block_size="64",num_gpu_blocks="25000"} 1\n'
        'vllm:cache_config_info{engine="1",block_size="64",num_gpu_blocks="25000"} 1\n': (0, 0),
        'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="None"} 1\n': (0, 16),
    }
    for info, expected in told.items():
        without = "\n".join(page(zeros()).splitlines()[1:]) + "\n"
        assert kv_of(engine_counts(info + without, 0.0)) == expected


def test_without_a_known_kv_running_requests_hold_mean_prompts_and_half_their_answers():
    texts = [page(zeros(), blocks="None"), page(zeros(gaps=100.0, gaps_s=1.0, first_tokens=4.0,
             prompt_tokens=800.0, running=6.0), blocks="None")]  # fmt: skip
    (one,) = intervals_of([engine_counts(text, 3.0 * n) for n, text in enumerate(texts)])
    assert one.context_tokens == 3.0 * (200 + 12.5)


def test_a_page_of_something_else_is_refused_by_the_name_that_is_missing():
    with pytest.raises(BadInput, match=r"u: no metrics of vLLM's: vllm:inter_token_latency_seconds_count is"):
        engine_counts("python_gc_objects_collected_total 4\n", 0.0, "u")
    with pytest.raises(BadInput, match="u: not Prometheus metrics"):
        engine_counts("<html>\n", 0.0, "u")


def test_an_engine_that_has_not_stepped_yet_needs_no_gauges():
    """As several API servers of vLLM show it: a gauge of the most recent value is absent until one is set."""

    def gaugeless(**counted):
        return page({name: value for name, value in zeros(**counted).items() if name not in GAUGES})

    first = engine_counts(gaugeless(), 0.0)
    assert [one.values["running"] for one in first.values()] == [0.0]
    later = engine_counts(page(zeros(gaps=8.0, gaps_s=1.0, first_tokens=1.0, running=1.0)), 3.0)
    assert len(intervals_of([first, later])) == 1
    with pytest.raises(BadInput, match="vllm:num_requests_running is missing"):
        engine_counts(gaugeless(gaps=8.0), 0.0)


def test_speculative_decoding_is_noticed():
    text = page(zeros()) + 'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 12\n'
    assert drafts([engine_counts(text, 0.0)])
    assert not drafts([engine_counts(page(zeros()), 0.0)])


@given(st.text(max_size=200) | st.text('vlm:gaps_sum{}="0123456789.eNnaif# \n', max_size=300))
def test_any_text_is_read_or_refused(text):
    try:
        found = engine_counts(text, 0.0)
    except BadInput:
        return
    assert found


class Clock:
    """A clock that only sleep moves."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def a_day(t):
    return 3.0 + 2.5 * np.sin(t / 70)


def watched(monkeypatch, texts, fails=()):
    """`calibrate` sees these pages; looks whose number is in `fails` get no answer."""
    clock, asked = Clock(), iter(enumerate(texts))

    def scraped(url):
        number, text = next(asked)
        if number in fails:
            raise BadInput(f"--metrics: {url}: does not answer: refused")
        return text

    fake = SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
    monkeypatch.setattr(engine_metrics, "time", fake)
    monkeypatch.setattr(engine_metrics, "scraped", scraped)


def run(tmp_path: Path, capsys, *more: str) -> tuple[int, str, str]:
    write_profile(PRIOR, tmp_path / "prior.yaml")
    words = ["calibrate", "--profile", str(tmp_path / "prior.yaml"), "--output", str(tmp_path / "made.yaml")]
    code = main([*words, *more])
    return code, *capsys.readouterr()


def test_a_watched_engine_becomes_a_profile_that_says_what_it_was(tmp_path, capsys, monkeypatch):
    watched(monkeypatch, pages(counted(TRUTH, a_day, 630.0)), fails=(40, 41))
    code, out, _ = run(tmp_path, capsys, "--metrics", "host:8000", "--minutes", "10", "--format", "json")
    assert code == 0
    said = json.loads(out)
    assert said["kv_tokens"] == 400_000
    assert "2 reads failed" in said["says"][0]
    made = read_profile(tmp_path / "made.yaml")
    assert made.source.kind == "measured"
    assert "over 10 minutes" in made.source.what
    assert made.kv.capacity_tokens == 400_000
    for batch in ((0, 8, 6000), (600, 8, 6000), (0, 30, 20_000)):
        assert float(made.step.step_s(*batch)) == pytest.approx(float(TRUTH.step_s(*batch)), rel=0.05)


def test_an_engine_without_traffic_writes_nothing(tmp_path, capsys, monkeypatch):
    watched(monkeypatch, [page(zeros())] * 50)
    code, _, said = run(tmp_path, capsys, "--metrics", "host:8000", "--minutes", "1")
    assert (code, (tmp_path / "made.yaml").exists()) == (2, False)
    assert "0 tokens in 0 intervals with traffic" in said


def test_an_access_log_of_another_engine_corrects_a_profile(tmp_path, capsys):
    rng = np.random.default_rng(0)
    arrival = np.cumsum(rng.exponential(0.3, 200))
    work = Workload(arrival, rng.integers(50, 900, 200), rng.integers(2, 60, 200))
    truth = replace(PRIOR, step=PRIOR.step.scaled(1.4, 0.8))
    done = simulate(work, [WorkerSpec(truth)], Slo(9e9, 9e9), "round-robin")
    columns = (arrival + 1e9, work.prompt_tokens, work.output_tokens, done.ttft_s, done.finish_s - arrival)
    names = ("arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "e2e_s")
    lines = [json.dumps(dict(zip(names, map(float, row), strict=True))) for row in zip(*columns, strict=True)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    code, out, _ = run(tmp_path, capsys, "--log", str(tmp_path / "log.jsonl"), "--format", "json")
    assert code == 0
    factors = {one["name"]: one["factor"] for one in json.loads(out)["corrections"]}
    assert factors["decode"] == pytest.approx(1.4, rel=0.05)
    assert factors["prefill"] == pytest.approx(0.8, rel=0.1)
    made = read_profile(tmp_path / "made.yaml")
    assert made.residuals.mean_relative < 0.05
    assert "200 requests" in made.source.what


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ((), "give --metrics ADDRESS (or several), --log FILE, or --endpoint URL"),
        (
            ("--metrics", "h:1", "--log", "x"),
            "give --metrics ADDRESS (or several), --log FILE, or --endpoint URL",
        ),
        (("--metrics", "ftp://h/metrics"), "expected an http:// or https:// address"),
        (("--metrics", "h:port"), "http://h:port/metrics: does not answer: nonnumeric port"),
        (("--metrics", "127.0.0.1:9"), "http://127.0.0.1:9/metrics: does not answer: [Errno 111]"),
        (("--log", "no-such-log"), "cannot be read"),
    ],
)
def test_what_cannot_be_calibrated_is_told_before_the_work(tmp_path, capsys, more, line):
    code, _, said = run(tmp_path, capsys, *more)
    assert code == 2
    assert line in said
    assert not (tmp_path / "made.yaml").exists()


def test_a_models_name_stands_for_one_profile_of_the_library(tmp_path, capsys):
    words = [
        "calibrate",
        "--profile",
        "llama-3.1-70b",
        "--output",
        str(tmp_path / "m.yaml"),
        "--metrics",
        "h:9",
    ]
    assert main(words) == 2
    assert "choose with --gpu and --tp" in capsys.readouterr().err


labels = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.just("\n"), max_size=12)


@given(st.lists(st.tuples(labels, labels, st.floats(0, 1e9)), min_size=1, max_size=5))
def test_labels_of_any_text_are_read_as_prometheus_own_parser_reads_them(rows):
    from prometheus_client.parser import text_string_to_metric_families

    def quoted(text):
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

    lines = [
        f'vllm:{NAMES[name][0]}{{engine="{quoted(engine)}",model_name="{quoted(model)}"}} {value!r}'
        for engine, model, value in rows
        for name in ("gaps", "gaps_s", "first_tokens", "first_tokens_s", "prompt_tokens", "running")
    ]
    text = "\n".join(lines) + "\n"
    expected = {}
    for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
        if sample.name == f"vllm:{NAMES['gaps'][0]}":
            key = sample.labels["engine"], sample.labels["model_name"]
            expected[key] = expected.get(key, 0.0) + sample.value
    found = engine_counts(text, 0.0)
    by_name = {}
    for (engine, model), value in expected.items():
        name = " ".join(filter(None, (engine, model)))
        by_name[name] = by_name.get(name, 0.0) + value
    assert {name: one.values["gaps"] for name, one in found.items()} == pytest.approx(by_name)


def test_the_histograms_of_latency_and_the_models_name_are_read():
    edges = 'vllm:time_to_first_token_seconds_bucket{engine="0",model_name="m",le="%s"} %d\n'
    text = page(zeros()) + edges % ("0.5", 3) + edges % ("+Inf", 5)
    (one,) = engine_counts(text, 0.0).values()
    assert (one.model, one.buckets["ttft"]) == ("m", {0.5: 3.0, float("inf"): 5.0})


def test_another_engines_page_is_refused_by_its_name():
    with pytest.raises(BadInput, match="u: metrics of SGLang, expected vLLM's"):
        engine_counts('# HELP x\nsglang:num_running_reqs{model="m"} 1\n', 0.0, "u")
