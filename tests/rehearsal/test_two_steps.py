"""Moves while two steps are in flight, as GPU engines schedule: random schedules, and stories of single ones.

`TOKENFLEET_SCHEDULES`: how many random schedules; a few hundred by default.
"""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from made_profiles import made_profile
from test_gpu_engine import config_of
from two_steps import BLOCK, BLOCKS, END, STEP_S, Engine, Read, chain, next_token

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.step import StepModel
from controlplane.types import Slo, WorkerId
from controlplane.workload import Workload
from dataplane.live.engine_api.kv_messages import Transfer
from dataplane.live.engine_api.link import Step
from dataplane.live.engine_api.step_trace import StepTrace
from dataplane.simulated.simulate import WorkerSpec, simulate

SCHEDULES = int(os.environ.get("TOKENFLEET_SCHEDULES", "300"))
PLAIN = Transfer()


@pytest.fixture(scope="module")
def make(model):
    """Makes a new small GPU engine, with its clock in place of the connector's."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = config_of(model, max_num_batched_tokens=16, max_num_seqs=6, max_model_len=80)
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = BLOCKS
    config.cache_config.kv_cache_layout = "LBNHC"
    spec = FullAttentionSpec(num_kv_heads=1, head_size=32, block_size=BLOCK, dtype=torch.bfloat16)
    cache = get_kv_cache_configs(config, [{"model.layers.0.attn": spec}], [BLOCKS * spec.page_size_bytes])[0]
    assert cache.num_blocks == BLOCKS
    logging.disable(logging.WARNING)  # vLLM tells of each that is made
    yield lambda patch, loads_inside=True: Engine(config, cache, patch, loads_inside)
    logging.disable(logging.NOTSET)


@pytest.fixture
def engine(make, monkeypatch):
    return make(monkeypatch)


# Random schedules: what clients, gateways, readers, the rank and the GPU do, in any order.

PROMPTS = st.tuples(st.integers(0, 2), st.integers(1, 30))
NUMBER = st.integers(0, 63)
SOME, MANY = 1, 4  # how often, beside others
KINDS = {
    "turn": (MANY, ()),
    "turns": (SOME, ()),
    "tick": (SOME, ()),
    "look": (MANY, ()),
    "client": (MANY, (PROMPTS, st.integers(1, 14), st.booleans())),
    "abort": (SOME, ()),
    "abort in a step": (SOME, ()),
    "begin": (SOME, ()),
    "release": (SOME, ()),
    "read": (SOME, (st.integers(0, 5), st.integers(1, 9))),
    "read ends": (SOME, ()),
    "loader": (SOME, (PROMPTS,)),
    "load ends": (SOME, (st.booleans(),)),
    "go on": (MANY, (PROMPTS, st.booleans(), st.booleans())),
    "time": (SOME, ()),
}
NAMES = [name for name, (often, _) in KINDS.items() for _ in range(often)]
ACTIONS = st.sampled_from(NAMES).flatmap(lambda name: st.tuples(st.just(name), NUMBER, *KINDS[name][1]))


def prompt_of(family: int, length: int) -> list[int]:
    return [3 + (7 * family + at * (family + 1)) % 90 for at in range(length)]


class Play:
    """Carries actions out on an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.reads = engine, []

    def open(self) -> list[str]:
        return [name for name, client in self.engine.clients.items() if not client.finish]

    def act(self, what: str, number: int, *more) -> None:
        engine, name = self.engine, f"r{len(self.engine.clients)}"
        is_open = self.open()
        some = newest(is_open, number)
        if what == "turn":
            engine.turn()
        elif what == "turns":
            for _ in range(number % 6):
                engine.turn()
        elif what == "tick":
            engine.tick()
        elif what == "client":
            engine.add(name, prompt_of(*more[0]), more[1], PLAIN, number % 2)
            if more[2]:
                engine.control("begin", name)
        elif what == "loader":
            engine.load(name, prompt_of(more[0][0], more[0][1] + 1))
        elif what == "go on":
            engine.inline_fails = more[1]
            loaders = [n for n in is_open if engine.answers.get(n) == "loaded"]
            engine.go_on(name, prompt_of(more[0][0], more[0][1] + 1), 1 + number % 8, tuple(loaders[:1]))
            for loader in loaders[:1]:
                engine.clients[loader].finish = "dropped"
            if more[2]:
                engine.control("begin", name)
        elif what == "load ends" and engine.loading:
            engine.end_load(number % len(engine.loading), fails=more[0])
        elif what == "begin" and some:
            engine.control("begin", some)
        elif what == "release" and (segment := newest(list(engine.clients), number)):
            engine.control("release", segment)
        elif what == "abort" and some:
            engine.abort([some])
        elif what == "abort in a step" and some:
            engine.aborts.append(some)
        elif what == "time":
            engine.now_s += number
        elif what == "read" and (segment := newest(list(engine.tables._tables), number)):
            self.reads += self._read(segment, *more)
        elif what == "read ends" and self.reads:
            engine.end_read(self.reads.pop(number % len(self.reads)))
        elif what == "look":
            for segment in tuple(engine.tables._tables):
                for read in self._read(segment, 0, len(engine.tables._tables[segment][0])):
                    engine.end_read(read)

    def _read(self, segment: str, first: int, count: int) -> list[Read]:
        """Of a prefill its prompt, piece by piece; of an answer all that is known but the last token."""
        client = self.engine.clients[segment]
        tokens = client.known[:-1] if client.tokens else client.prompt
        last = min(first + count, -(-len(tokens) // BLOCK))
        read = self.engine.read(segment, first, last, chain(tokens)) if first < last else None
        return [] if read is None else [read]


def newest(names: list[str], number: int) -> str | None:
    """One of the last three."""
    return names[-1 - number % min(len(names), 3)] if names else None


@settings(
    max_examples=SCHEDULES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(actions=st.lists(ACTIONS, min_size=1, max_size=80), loads_inside=st.booleans())
def test_no_schedule_gives_a_client_or_a_reader_what_is_not_its_own(make, actions, loads_inside):
    note(f"actions: {actions}")
    with pytest.MonkeyPatch.context() as patch:
        engine = make(patch, loads_inside)
        play = Play(engine)
        for action in actions:
            play.act(*action)
            assert not engine.mistakes
        engine.drain()
        for read in play.reads:
            engine.end_read(read)
        for name, answer in engine.answers.items():
            if answer == "loaded":
                engine.clients[name].finish = "dropped"
        assert not engine.mistakes
        assert not engine.left_over()


# Stories: what random schedules have found, the shortest one of each.


def look(engine: Engine) -> list[str]:
    """Read all that is offered; what is wrong so far."""
    Play(engine).act("look", 0)
    return engine.mistakes


def turns(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.turn()


def test_a_load_inside_a_step_that_fails_after_its_request_has_gone_leaves_nothing_in_the_prefix_cache(
    engine,
):
    engine.inline_fails = True
    engine.go_on("moved", prompt_of(0, 4), 1, ())
    engine.turn()
    engine.abort(["moved"])
    engine.turn()
    engine.add("next", prompt_of(0, 5), 1, PLAIN)
    turns(engine, 4)
    assert engine.clients["next"].finish
    assert not engine.mistakes


def test_on_a_gpu_a_short_tail_is_loaded_between_steps_and_no_other_request_waits_for_it(make, monkeypatch):
    from dataplane.live.kv.connector import loads_inside_steps

    engine = make(monkeypatch, loads_inside_steps())  # what the platform says, which is CUDA's here
    engine.add("other", prompt_of(1, 6), 14, PLAIN)
    turns(engine, 2)
    engine.go_on("moved", prompt_of(0, 6), 3, ())
    turns(engine, 4)
    assert [job.segment for job in engine.loading] == ["moved"]
    assert not engine.clients["moved"].tokens
    before = len(engine.clients["other"].tokens)
    assert before > 2
    engine.end_load(0, fails=False)
    turns(engine, 5)
    assert engine.clients["moved"].tokens
    assert not engine.mistakes


def test_blocks_of_a_load_inside_a_step_are_offered_only_once_it_is_known_to_have_arrived(engine):
    engine.inline_fails = True
    engine.go_on("moved", prompt_of(0, 10), 5, ())
    engine.control("begin", "moved")
    for _ in range(6):
        engine.turn()
        assert not look(engine)
    assert engine.answers == {"begin-1": "leased"}


def test_a_held_request_whose_load_inside_a_step_turns_out_to_have_failed_is_not_offered(engine):
    engine.inline_fails = True
    engine.go_on("moved", prompt_of(0, 10), 5, ())
    engine.control("begin", "moved")
    engine.turn()
    engine.abort(["moved"])
    for _ in range(6):
        engine.turn()
        assert not look(engine)


def test_a_request_is_offered_with_what_its_neighbour_computes_only_a_step_later(engine):
    engine.add("first", prompt_of(0, 4), 1, PLAIN)
    engine.add("second", prompt_of(0, 6), 9, PLAIN)  # which finds the first one's block in the same step
    engine.control("begin", "second")
    engine.turn()
    assert not look(engine)
    engine.turn()
    engine.turn()
    assert not look(engine)
    assert engine.tables._tables


def test_a_block_is_offered_of_a_prompt_only_when_it_is_full(engine):
    """A reader that takes a prompt piece by piece waits for blocks, and takes whole ones."""
    engine.add("a", prompt_of(1, 5), 9, PLAIN)
    engine.add("b", prompt_of(0, 24), 9, PLAIN)  # of which the first step computes 11 tokens
    engine.control("begin", "b")
    seen = set()
    for _ in range(8):
        engine.turn()
        assert not look(engine)
        seen |= {len(blocks) for blocks, _ in engine.tables._tables.values()}
    assert {2, 6} <= seen


def test_a_request_that_ends_while_its_kv_arrives_is_not_held_under_it(engine):
    """vLLM frees its blocks when they have arrived; a hold of ours would free them once more, and end it."""
    engine.load("moved", prompt_of(0, 9))
    engine.control("begin", "moved")
    engine.turn()
    engine.abort(["moved"])
    turns(engine, 2)
    engine.end_load(0, fails=False)
    engine.now_s += 100.0
    turns(engine, 4)
    engine.drain()
    assert not engine.left_over()


def test_the_last_step_before_idle_is_recorded_with_its_own_time(engine):
    """An answer that ends by itself leaves a step behind that was planned when it had not."""
    for number in range(12):
        engine.add(f"r{number}", prompt_of(number % 3, 5 + number), 14, PLAIN)
        turns(engine, 24)
        engine.now_s += 1.0
    ends = [client.tokens[-1] for client in engine.clients.values()]
    assert ends.count(END) > 3  # ended by themselves
    for is_gpu in (True, False):  # by the GPU's clock, and by the engine's
        times = [step.step_s for step in recorded(engine, is_gpu)]
        assert times == pytest.approx([STEP_S] * len(times))


def recorded(engine, is_gpu: bool) -> list[Step]:
    """The steps as a worker's actor records them."""
    trace = StepTrace(WorkerId("w0"), BLOCKS)
    for told, ended_s, running in engine.steps:
        took_s = told["gpu_s"] if is_gpu else ended_s - told["began_s"]
        since_last_s = told["since_last_s"] if is_gpu else None
        trace.add(told["load"], took_s, ended_s, running, 0, 0.0, since_last_s)
    return list(trace.steps()[1])


@pytest.mark.parametrize("launch_s", [0.5 * STEP_S, 2.5 * STEP_S])
def test_a_prompt_that_joins_is_recorded_with_its_own_time(engine, monkeypatch, launch_s):
    """The engine launches a step before it waits for the last one's end.

    Where launching takes longer than that step, the engine sees its end late. By the engine's clock the
    prompt's time would fall on the step before.
    """
    launch = engine._launch

    def slow(output):
        began_s, before_s = engine.now_s, engine._ready_s
        moved, step = launch(output)
        is_prompt = any(count > 1 for count in output.num_scheduled_tokens.values())
        if is_prompt:
            engine.now_s = began_s + launch_s
            step.ready_s = engine._ready_s = max(max(before_s, began_s) + 2 * STEP_S, engine.now_s)
        return moved, step

    monkeypatch.setattr(engine, "_launch", slow)
    prompt = next(p for p in (prompt_of(0, length) for length in range(3, 12)) if goes_on(p, 12))
    engine.add("decodes", prompt, 12, PLAIN)
    turns(engine, 5)
    engine.add("joins", prompt_of(1, 7), 1, PLAIN)
    turns(engine, 20)
    for is_gpu in (True, False):
        joined = [step.step_s for step in recorded(engine, is_gpu) if step.sequences and step.prefill_tokens]
        assert (joined == pytest.approx([2 * STEP_S])) == (is_gpu or launch_s < STEP_S)
    assert not engine.mistakes


def goes_on(prompt: list[int], tokens: int) -> bool:
    """Whether the model answers a prompt with at least `tokens` tokens."""
    known = list(prompt)
    while len(known) < len(prompt) + tokens:
        known.append(next_token(chain(known)))
    return END not in known[len(prompt) :]


def test_first_tokens_come_when_the_simulator_says_that_an_engine_of_one_step_ahead_makes_them(engine):
    """All steps last alike. Requests come amid them: to an idle engine, a busy one, and several at once."""
    arrival = (0.5, 2.4, 2.6, 30.0, 31.5, 33.2, 60.2)  # in steps
    output = 9
    prompts = [prompt_of(n % 3, length) for length in range(4, 12) for n in range(3)]
    prompts = [one for one in prompts if goes_on(one, output)][: len(arrival)]
    assert len(prompts) == len(arrival)
    came, seen_s = 0, {}
    while len(seen_s) < len(arrival) or engine.scheduler.has_requests():
        if not engine.scheduler.has_requests() and not engine._queue:
            engine.now_s = max(engine.now_s, arrival[came] * STEP_S)
        while came < len(arrival) and arrival[came] * STEP_S <= engine.now_s + 1e-9:
            engine.add(f"r{came}", prompts[came], output, PLAIN)
            came += 1
        engine.turn()
        for number in range(came):
            if engine.clients[f"r{number}"].tokens:
                seen_s.setdefault(number, engine.now_s)
    work = Workload(
        np.array(arrival) * STEP_S, np.array([len(one) for one in prompts]), np.full(len(arrival), output)
    )
    limits = EngineLimits(max_batched_tokens=16, max_seqs=6)
    worker = made_profile(StepModel(STEP_S, 0.0, 0.0, 0.0), KvModel((BLOCKS - 1) * BLOCK, BLOCK), limits)
    for ahead, is_right in ((1.0, True), (0.0, False)):
        spec = WorkerSpec(worker.with_engine(steps_ahead=ahead))
        said_s = simulate(work, [spec], Slo(1e9, 1e9), "jsq").first_token_s
        assert np.allclose(said_s, list(seen_s.values())) == is_right, (ahead, said_s, seen_s)
