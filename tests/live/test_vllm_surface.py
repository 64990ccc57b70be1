"""The contract with vLLM's private surface: what we rely on is there, and means what we think."""

import dataclasses
import inspect

import msgspec
import numpy as np
import pytest
import quiet_vllm  # noqa: F401  # first
from msgspec.structs import fields

from controlplane.types import WorkerId
from dataplane.live.engine_api import messages
from dataplane.live.engine_api import vllm_surface as surface
from dataplane.live.engine_api.kv_messages import Control, KvLoad, Transfer, message_of
from dataplane.live.engine_api.link import WorkerInfo
from dataplane.live.engine_api.segment import (
    control_request,
    obstacle_to_move,
    obstacle_to_replay,
    plain_request,
    segment_request,
)
from dataplane.live.worker.engine import KvDoor, engine_args

pytestmark = pytest.mark.live
SP = surface.SamplingParams


def request(prompt=(1, 2, 3), **params):
    return surface.EngineCoreRequest(
        request_id="r",
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=SP(**({"max_tokens": 100} | params)),
        pooling_params=None,
        arrival_time=1.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def info(**facts):
    plain = {"block_tokens": 32, "kv_blocks": 8, "kv_bytes_per_token": 1, "max_model_len": 99, "max_seqs": 8}
    plain |= {"max_batched_tokens": 99, "tp_degree": 1, "vllm_version": "0", "dtype": "float32", "pid": 1}
    return WorkerInfo(WorkerId("w"), "vllm", "m", "", ("x",), **(plain | facts))


def test_a_process_told_to_sleep_no_longer_yields(monkeypatch):
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import shm_broadcast

    assert shm_broadcast.sched_yield is utils.sched_yield  # what its queues call while they wait
    monkeypatch.setattr(utils, "USE_SCHED_YIELD", True)
    monkeypatch.setattr("os.sched_yield", lambda: pytest.fail("it yields"))
    surface.sleep_while_spinning()
    utils.sched_yield()


def test_requests_and_outputs_survive_the_codec():
    sent = segment_request(request(), [4], "r#1", Transfer(KvLoad(("a",), "r", 3), hold=True, drop=("x",)))
    back = surface.MsgpackDecoder(surface.EngineCoreRequest).decode(surface.MsgpackEncoder().encode(sent))
    assert (back.request_id, back.prompt_token_ids) == ("r#1", [1, 2, 3, 4])
    assert message_of(back) == message_of(sent) == Transfer(KvLoad(("a",), "r", 3), hold=True, drop=("x",))
    batch = surface.EngineCoreOutputs(outputs=[surface.EngineCoreOutput("r", [5])])
    again = surface.MsgpackDecoder(surface.EngineCoreOutputs).decode(surface.MsgpackEncoder().encode(batch))
    assert again.outputs[0].new_token_ids == [5]


def test_the_connector_overrides_only_hooks_that_vllm_has():
    from dataplane.live.kv.connector import MigrationConnector
    from dataplane.live.kv.host_memory import TieredConnector

    hooks = {n for n, _ in inspect.getmembers(surface.KVConnectorBase_V1, inspect.isroutine)}
    hooks.add("request_finished_all_groups")  # of SupportsHMA
    ours = {n for n in vars(MigrationConnector) | vars(TieredConnector) if not n.startswith("_")}
    assert ours <= hooks
    assert not MigrationConnector.__abstractmethods__
    # All that vLLM's offloading does, but what is nothing there, what other hooks of ours call, and metrics.
    left = {"wait_for_layer_load", "save_kv_layer", "get_finished", "request_finished_all_groups"}
    left |= {"take_events", "build_kv_connector_stats", "build_prom_metrics"}
    assert (
        hooks & vars(surface.OffloadingConnector).keys() - vars(TieredConnector).keys() - {"__init__"} == left
    )


def test_the_scheduler_output_has_the_fields_that_a_steps_load_is_read_from():
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    def fields(kind):
        return {f.name for f in dataclasses.fields(kind)}

    assert {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "preempted_req_ids",
    } <= fields(SchedulerOutput)
    assert {"req_ids", "num_computed_tokens", "num_output_tokens"} <= fields(CachedRequestData)
    assert {"req_id", "num_computed_tokens"} <= fields(NewRequestData)


def test_a_complete_load_can_be_kept_from_the_scheduler_and_its_blocks_be_found():
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import KVConnectorOutput

    assert KVConnectorOutput(finished_recving={"s"}).finished_recving == {"s"}
    told = inspect.getsource(Scheduler._update_from_kv_xfer_finished)
    hook, read = "update_connector_output(kv_connector_output)", "in kv_connector_output.finished_recving"
    assert 0 < told.index(hook) < told.index(read)
    names = list(inspect.signature(KVCacheManager.cache_blocks).parameters)
    assert names[:3] == ["self", "request", "num_computed_tokens"]
    assert "_kv_cache_manager" in inspect.getsource(surface.KVConnectorBase_V1.bind_kv_cache_manager)


def test_a_control_message_is_aborted_on_arrival():
    control = control_request(request(), "c", Control("begin", "r"))
    assert control.abort_immediately
    assert message_of(control) == Control("begin", "r")


def test_a_continuation_counts_what_is_left_and_leaves_the_original_alone():
    first = request(min_tokens=5, presence_penalty=0.5, prompt_logprobs=1)
    later = segment_request(first, [7, 8, 9], "r#1", Transfer())
    params = later.sampling_params
    assert (later.prompt_token_ids, params.max_tokens, params.min_tokens) == ([1, 2, 3, 7, 8, 9], 97, 2)
    assert params.prompt_logprobs is None
    assert params.extra_args["tokenfleet_prior_tokens"] == [7, 8, 9]
    assert (first.prompt_token_ids, first.sampling_params.max_tokens) == ([1, 2, 3], 100)
    assert first.sampling_params.extra_args is None


def structured(**more):
    from vllm.sampling_params import StructuredOutputsParams

    return request(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), **more)


def test_a_grammar_goes_on_from_the_tokens_so_far_unless_reasoning_hides_where_it_began():
    asked = structured()
    assert "reasoning" in obstacle_to_replay(asked, [1], True)
    assert obstacle_to_replay(asked, [], True) is None
    asked.reasoning_ended = True
    assert obstacle_to_move(asked, [1], info()) is None
    later = segment_request(asked, [7, 8], "r#1", Transfer())
    assert later.sampling_params.extra_args["tokenfleet_prior_tokens"] == [7, 8]


def test_no_request_of_an_engine_with_several_kv_groups_is_moved_once_it_has_begun():
    assert obstacle_to_move(request(), [1], info(why_fixed="its KV")) == "its KV"
    assert obstacle_to_move(request(), [], info(why_fixed="its KV")) is None


CANNOT = {
    "several outputs": {"n": 2},
    "thinking": {"thinking_token_budget": 5},
}


@pytest.mark.parametrize("what", CANNOT)
def test_what_cannot_go_on_is_refused_once_a_token_was_sent(what):
    asked = request(**CANNOT[what])
    assert obstacle_to_replay(asked, [], True) is None
    assert what in obstacle_to_replay(asked, [1], True)
    assert what in obstacle_to_move(asked, [1], info())


def test_seeds_are_an_obstacle_to_a_move_alone_and_penalties_where_engines_do_not_carry_them():
    seeded = request(seed=3, temperature=0.7)
    assert "seeded" in obstacle_to_move(seeded, [1], info())
    assert obstacle_to_move(seeded, [1], info(has_stateless_seeds=True)) is None
    assert obstacle_to_replay(seeded, [1], True) is None
    penalised = request(frequency_penalty=0.1)
    assert obstacle_to_replay(penalised, [1], True) is None
    assert "penalties" in obstacle_to_replay(penalised, [1], False)
    assert "penalties" in obstacle_to_move(penalised, [1], info(carries_penalties=False))
    assert obstacle_to_replay(penalised, [], False) is None
    assert obstacle_to_move(request(seed=3, temperature=0.0), [1], info()) is None


def test_every_sampling_parameter_has_been_judged():
    """A new one must be looked at: does it depend on where the prompt ends?"""
    harmless = {
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "logprob_token_ids",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
        "_eos_token_id",
        "_all_stop_token_ids",
        "_watermarking_skipped",
        "logit_bias",
        "allowed_token_ids",
        "extra_args",
        "bad_words",
        "skip_reading_prefix_cache",
    }
    judged = {
        "n",
        "structured_outputs",
        "_bad_words_token_ids",
        "repetition_detection",
        "thinking_token_budget",
        "watermarking",
        "trace_decode_token_ids",
        "routed_experts_prompt_start",
        "seed",
    }
    assert set(SP.__struct_fields__) == harmless | judged


def test_engine_settings_that_the_live_plane_needs_cannot_be_taken_away():
    from controlplane.errors import BadInput

    door = KvDoor(("unix://x",), "secret")
    made = engine_args({"model": "m", "max_num_seqs": 8, "enable_prefix_caching": False}, door)
    assert (made.max_num_seqs, made.enable_prefix_caching, made.mm_processor_cache_gb) == (8, False, 0)
    for asked in (
        {"kv_transfer_config": {"kv_connector": "Other"}},
        {"logits_processors": ["mine"]},
        {"kv_offloading_size": 0.0},
        {"kv_offloading_backend": "lmcache", "kv_offloading_size": 1.0},
        {"no_such_flag": 1},
    ):
        with pytest.raises(BadInput, match=next(iter(asked))):
            engine_args({"model": "m"} | asked, door)


class Config:
    """As much of vLLM's configuration as is looked at before an engine starts."""

    def __init__(self, pipeline=1, replicas=1, runner="generate", has_encoder=False, **context):
        from types import SimpleNamespace

        contexts = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1} | context
        self.parallel_config = SimpleNamespace(
            pipeline_parallel_size=pipeline, data_parallel_size=replicas, **contexts
        )
        self.model_config = SimpleNamespace(model="m", runner_type=runner, is_encoder_decoder=has_encoder)


def test_what_is_out_of_reach_is_refused_by_name():
    from controlplane.errors import BadInput

    surface.check_served(Config())
    for config, named in (
        (Config(pipeline=2), "pipeline-parallel"),
        (Config(replicas=2), "data-parallel"),
        (Config(decode_context_parallel_size=2), "--decode-context-parallel-size 2"),
        (Config(prefill_context_parallel_size=2), "--prefill-context-parallel-size 2"),
        (Config(runner="pooling"), "pooling"),
        (Config(has_encoder=True), "encoder"),
    ):
        with pytest.raises(BadInput, match=named):
            surface.check_served(config)


def test_kv_is_moved_of_layers_that_keep_every_token_only():
    from types import SimpleNamespace

    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    from dataplane.live.kv.connector import KEEPS_ALL, why_fixed

    shape = {"block_size": 32, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    full, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=64)
    assert {FullAttentionSpec.__name__, MLAAttentionSpec.__name__} == KEEPS_ALL

    def cache(*groups, zeroes=False):
        return SimpleNamespace(kv_cache_groups=list(groups), needs_kv_cache_zeroing=zeroes)

    assert why_fixed(cache(KVCacheGroupSpec(["a"], full)), None) == ""
    assert "precisions" in why_fixed(cache(KVCacheGroupSpec(["a"], full), zeroes=True), None)
    assert "SlidingWindowSpec" in why_fixed(cache(KVCacheGroupSpec(["a"], window)), None)
    for method, fixed in (("ngram", ""), ("eagle3", "its engine takes drafts by eagle3")):
        assert why_fixed(cache(KVCacheGroupSpec(["a"], full)), SimpleNamespace(method=method)) == fixed
    assert "2 groups" in why_fixed(
        cache(KVCacheGroupSpec(["a"], full), KVCacheGroupSpec(["b"], window)), None
    )


def test_a_gateway_sends_images_whole_and_engines_expect_no_less():
    from types import SimpleNamespace

    from vllm.multimodal.cache.factories import _get_cache_type

    def kind_of_cache(gigabytes, gateways):
        images = SimpleNamespace(mm_processor_cache_gb=gigabytes, mm_processor_cache_type="lru")
        model = SimpleNamespace(supports_multimodal_inputs=True, get_multimodal_config=lambda: images)
        parallel = SimpleNamespace(
            _api_process_count=gateways, data_parallel_size=1, data_parallel_external_lb=False
        )
        return _get_cache_type(SimpleNamespace(model_config=model, parallel_config=parallel))

    assert kind_of_cache(4, gateways=1) == "lru"  # vLLM's own: an image is sent to its engine once
    assert kind_of_cache(4, gateways=2) == "processor_only"  # what `engine_config` asks of the gateway
    assert kind_of_cache(0, gateways=1) is None  # and `engine_args` of engines


class Word:
    """A grammar of one word, by tokens."""

    def __init__(self, *tokens):
        self.left = list(tokens)

    def accept_tokens(self, name, tokens):
        taken, self.left = self.left[: len(tokens)], self.left[len(tokens) :]
        return taken == tokens


def test_a_grammar_is_advanced_when_it_is_compiled_and_is_an_error_where_it_cannot_be():
    from concurrent.futures import Future
    from types import SimpleNamespace

    from vllm.v1.structured_output.request import StructuredOutputRequest

    from dataplane.live.kv.connector import advance_grammar

    holder = StructuredOutputRequest(params=None, _grammar=(compiled := Future()))
    advance_grammar(SimpleNamespace(request_id="r", structured_output_request=holder), [1, 2])
    assert holder.grammar is None  # the scheduler waits
    compiled.set_result(Word(1, 2, 3))
    assert holder.grammar.left == [3]
    for result in (Word(4, 5), ValueError("no such grammar")):
        holder = StructuredOutputRequest(params=None, _grammar=(compiled := Future()))
        advance_grammar(SimpleNamespace(request_id="r", structured_output_request=holder), [1, 2])
        compiled.set_exception(result) if isinstance(result, ValueError) else compiled.set_result(result)
        assert isinstance(holder.grammar, ValueError)


def test_carried_penalties_equal_vllms_own_over_the_whole_output():
    import torch

    from dataplane.live.engine_api.penalties import PriorPenalty

    generator = torch.Generator().manual_seed(0)
    prior, later = [3, 3, 5, 9], [5, 7]
    presence, frequency, repetition = 0.7, 0.4, 1.3
    logits = torch.randn(16, generator=generator)

    def penalise(row, counted):
        """vLLM's order: repetition for all tokens seen, then frequency and presence for those counted."""
        seen = torch.zeros(16, dtype=torch.bool)
        seen[prior + later] = True
        row = torch.where(seen, torch.where(row > 0, row / repetition, row * repetition), row)
        counts = torch.bincount(torch.tensor(counted), minlength=16)
        return row - frequency * counts - presence * (counts > 0)

    whole = penalise(logits.clone(), prior + later)
    carried = penalise(PriorPenalty(prior, presence, frequency, repetition)(later, logits.clone()), later)
    assert torch.allclose(whole, carried, atol=1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (messages.EngineRequest, surface.EngineCoreRequest),
        (messages.SegmentOutput, surface.EngineCoreOutput),
        (messages.StepOutputs, surface.EngineCoreOutputs),
        (messages.Adapter, surface.LoRARequest),
        (messages.Moment, surface.EngineCoreEvent),
    ],
)
def test_a_message_of_ours_begins_with_the_fields_of_vllms(ours, theirs):
    def shape(of):
        return [(f.encode_name, f.default, f.default_factory) for f in fields(of)]

    mine, others = shape(ours), shape(theirs)
    assert mine == others[: len(mine)]
    assert ours.__struct_config__.array_like == theirs.__struct_config__.array_like
    assert ours.__struct_config__.omit_defaults == theirs.__struct_config__.omit_defaults


def test_how_to_sample_and_how_it_ended_mean_the_same_on_both_sides():
    theirs = {f.encode_name: (f.default, f.default_factory) for f in fields(surface.SamplingParams)}
    for f in fields(messages.Sampling):
        assert theirs[f.encode_name] == (f.default, f.default_factory), f.name
    for ours, others in (
        (messages.Finish, surface.FinishReason),
        (messages.MomentKind, surface.EngineCoreEventType),
    ):
        assert {one.name: one.value for one in ours} == {one.name: one.value for one in others}
    for ours, others in (
        (messages.Prefilled, surface.PrefillStats),
        (messages.EngineLoad, surface.SchedulerStats),
    ):
        assert {f.name for f in dataclasses.fields(ours)} <= {f.name for f in dataclasses.fields(others)}
    assert messages.Logprobs._fields == surface.LogprobsLists._fields


def test_our_messages_cross_the_wire_as_vllms_and_come_back_the_same():
    codec = surface.VllmCodec()
    params = messages.Sampling(temperature=0.0, max_tokens=7, detokenize=False, extra_args={"a": [1]})
    lora = messages.Adapter("a1", 1, "/somewhere", load_inplace=True)
    sent = plain_request("r", [1, 2], params, 3.0, priority=-1, abort_immediately=True)
    sent.lora_request = lora
    theirs = codec.request(codec.encode(sent))
    assert isinstance(theirs, surface.EngineCoreRequest)
    assert (theirs.sampling_params.max_tokens, theirs.sampling_params.extra_args) == (7, {"a": [1]})
    assert (theirs.priority, theirs.abort_immediately, theirs.lora_request.load_inplace) == (-1, True, True)
    assert codec.adapter(msgspec.to_builtins(lora)) == theirs.lora_request
    back = msgspec.msgpack.decode(codec.encode(theirs)[0], type=messages.EngineRequest)
    assert (back.prompt_token_ids, back.sampling_params.max_tokens, back.lora_request) == ([1, 2], 7, lora)


@pytest.mark.parametrize("way", ["over the wire", "to the front end"])
def test_the_outputs_of_an_emulated_step_are_vllms_for_the_front_end(way):
    chances = messages.Logprobs(np.array([[5, 6]]), np.array([[-0.5, -1.5]], np.float32), np.array([1]))
    moments = [messages.Moment(messages.MomentKind.QUEUED, 1.0)]
    output = messages.SegmentOutput("r", [5], chances, finish_reason=messages.Finish.LENGTH, events=moments)
    output.prefill_stats = messages.Prefilled(9, 3, 6, 4, 2)
    sent = messages.StepOutputs(3, [output], messages.EngineLoad(1, 2, 0.5), 7.0)
    codec = surface.VllmCodec()
    batch = codec.outputs(codec.encode(sent)) if way == "over the wire" else surface.as_vllm(sent)
    assert isinstance(batch, surface.EngineCoreOutputs)
    (made,) = batch.outputs
    assert isinstance(made.finish_reason, surface.FinishReason)
    assert isinstance(made.new_logprobs, surface.LogprobsLists)
    assert isinstance(made.prefill_stats, surface.PrefillStats)
    assert made.new_logprobs.logprobs.tolist() == [[-0.5, -1.5]]
    assert (made.new_token_ids, str(made.finish_reason), batch.engine_index, batch.timestamp) == (
        [5],
        "length",
        3,
        7.0,
    )
    found = made.prefill_stats
    assert (found.num_cached_tokens, found.num_external_cached_tokens) == (6, 2)
    assert made.events == [surface.EngineCoreEvent(surface.EngineCoreEventType.QUEUED, 1.0)]
    load = batch.scheduler_stats
    assert (load.num_running_reqs, load.num_waiting_reqs, load.kv_cache_usage) == (1, 2, 0.5)
