"""The contract with vLLM's private surface: what we rely on is there, and means what we think."""

import dataclasses
import inspect

import pytest
import quiet_vllm  # noqa: F401  # first

from dataplane.live.engine_api import vllm_surface as surface
from dataplane.live.engine_api.kv_messages import Control, KvLoad, Transfer, message_of
from dataplane.live.engine_api.segment import (
    control_request,
    obstacle_to_move,
    obstacle_to_replay,
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


def test_every_name_of_the_surface_exists():
    assert all(hasattr(surface, name) for name in surface.__all__)


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

    hooks = {n for n, _ in inspect.getmembers(surface.KVConnectorBase_V1, inspect.isfunction)}
    hooks.add("request_finished_all_groups")  # of SupportsHMA
    ours = {n for n in vars(MigrationConnector) if not n.startswith("_")}
    assert ours <= hooks
    assert not MigrationConnector.__abstractmethods__


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


CANNOT = {
    "structured": {"structured_outputs": "choice"},
    "several outputs": {"n": 2},
    "thinking": {"thinking_token_budget": 5},
}


@pytest.mark.parametrize("what", CANNOT)
def test_what_cannot_go_on_is_refused_once_a_token_was_sent(what):
    params = dict(CANNOT[what])
    if "structured_outputs" in params:
        from vllm.sampling_params import StructuredOutputsParams

        params["structured_outputs"] = StructuredOutputsParams(choice=["yes", "no"])
    asked = request(**params)
    assert obstacle_to_replay(asked, []) is None
    assert what in obstacle_to_replay(asked, [1])
    assert what in obstacle_to_move(asked, [1])


def test_seeds_are_an_obstacle_to_a_move_but_not_to_a_replay_nor_when_greedy():
    seeded = request(seed=3, temperature=0.7)
    assert "seeded" in obstacle_to_move(seeded, [1])
    assert obstacle_to_move(seeded, [1], seeds_are_stateless=True) is None
    assert obstacle_to_replay(seeded, [1]) is None
    assert obstacle_to_move(request(seed=3, temperature=0.0), [1]) is None


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
    made = engine_args({"model": "m", "max_num_seqs": 8}, door)
    assert (made.max_num_seqs, made.enable_prefix_caching) == (8, True)
    for asked in (
        {"kv_transfer_config": {"kv_connector": "Other"}},
        {"logits_processors": ["mine"]},
        {"enable_prefix_caching": False},
        {"no_such_flag": 1},
    ):
        with pytest.raises(BadInput, match=next(iter(asked))):
            engine_args({"model": "m"} | asked, door)


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
