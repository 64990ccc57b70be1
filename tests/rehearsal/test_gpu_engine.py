"""A GPU engine as far as it goes without a GPU: what vLLM chooses, loads and lays out for our settings."""

import os
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkout import ROOT

from controlplane.errors import BadInput
from dataplane.live.engine_api.link import PRIOR_TOKENS
from dataplane.live.engine_api.penalties import SlotCarriedPenalties
from dataplane.live.kv.memory import StagedMemory, kv_memory
from dataplane.live.kv.transport import reserve_addresses
from dataplane.live.worker.engine import KvDoor, engine_args, engine_config

DEGREES = [1, 2, 4, 8]
NAME = "OMP_NUM_THREADS"


def asked_of(model, tp=1, **settings):
    addresses, _ = reserve_addresses("127.0.0.1", tp)
    asked = {"model": model, "tensor_parallel_size": tp, "skip_tokenizer_init": True} | settings
    return asked, KvDoor(addresses, "token")


def config_of(model, tp=1, **settings):
    return engine_config(engine_args(*asked_of(model, tp, **settings)))


@pytest.mark.parametrize("tp", DEGREES)
def test_ranks_run_under_the_executor_of_one_host_in_vllms_gpu_worker(model, tp):
    parallel = config_of(model, tp).parallel_config
    assert parallel.distributed_executor_backend == ("uni" if tp == 1 else "mp")
    assert parallel.worker_cls == "vllm.v1.worker.gpu_worker.Worker"


def test_a_ray_executor_is_refused_by_name(model):
    with pytest.raises(BadInput, match="distributed_executor_backend"):
        config_of(model, 2, distributed_executor_backend="ray")


def test_a_gpu_engine_without_a_plan_has_the_limits_of_vllms_own_server(model):
    scheduler = config_of(model).scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (8192, 1024)
    kept = config_of(model, max_num_batched_tokens=512, max_num_seqs=7).scheduler_config  # a plan's
    assert (kept.max_num_batched_tokens, kept.max_num_seqs) == (512, 7)


def test_a_gpu_engine_plans_a_step_ahead_and_replays_whole_graphs(model):
    config = config_of(model)
    assert config.scheduler_config.async_scheduling
    assert config.max_concurrent_batches == 2
    assert config.compilation_config.cudagraph_mode.name == "FULL_AND_PIECEWISE"


@pytest.mark.parametrize("tp", DEGREES)
def test_penalties_come_in_the_form_that_the_gpu_runner_loads(model, tp):
    from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_by_fqcns

    config = config_of(model, tp)
    assert config.use_v2_model_runner
    (loaded,) = _load_v2_logitsprocs_by_fqcns(config.model_config.logits_processors)
    assert loaded is SlotCarriedPenalties


def test_the_first_runner_is_given_its_own_form_where_it_is_in_force(model, monkeypatch):
    from vllm.v1.sample.logits_processor import _load_logitsprocs_by_fqcns

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    config = config_of(model)
    assert not config.use_v2_model_runner
    (loaded,) = _load_logitsprocs_by_fqcns(config.model_config.logits_processors)
    assert loaded.__name__ == "CarriedPenalties"


def test_the_connector_is_made_in_both_roles_for_a_gpu_engine(model):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    config = config_of(model)
    cache, _ = layers_of(config, "LBNHC", "full", torch.bfloat16)
    for role in KVConnectorRole:
        made = KVConnectorFactory.create_connector(config, role, cache)
        assert type(made).__name__ == "MigrationConnector"


def test_host_memory_below_kv_is_vllms_own_for_a_gpu_engine(model):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    config = config_of(model, kv_offloading_size=1.0)
    cache, _ = layers_of(config, "LBHNC", "full", torch.bfloat16)
    made = {role: KVConnectorFactory.create_connector(config, role, cache) for role in KVConnectorRole}
    assert {type(one).__name__ for one in made.values()} == {"TieredConnector"}
    assert type(made[KVConnectorRole.WORKER]._host.connector_worker.spec) is CPUOffloadingSpec
    assert type(made[KVConnectorRole.WORKER]).get_required_kvcache_layout(config) == "LBHNC"


def test_host_memory_counts_blocks_as_vllm_keeps_them(model, monkeypatch):
    """Those of a model that all ranks have alike (MLA) are kept once: dividing by ranks gave half of them."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector as offloading
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    config = config_of(model, 2, kv_offloading_size=0.25)
    cache, _ = layers_of(config, "LBHNC", "mla", torch.bfloat16)
    build = offloading.build_offloading_config
    for copies in (2, 1):
        alike = copies == 1
        monkeypatch.setattr(
            offloading,
            "build_offloading_config",
            lambda *a, on=alike: replace(build(*a), replicated_layout=on),
        )
        made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
        assert made._cache["host_blocks"] == (1 << 28) // (copies * made._cache["block_bytes"])


def test_host_memory_without_room_in_shared_memory_is_refused_before_a_model_loads(model, monkeypatch):
    from dataplane.live.worker import engine, host_checks

    free = SimpleNamespace(free=1 << 29)
    monkeypatch.setattr(host_checks.shutil, "disk_usage", lambda folder: free)
    host_checks.check_shared_room(1 << 29)
    host_checks.check_shared_room(0)
    with pytest.raises(BadInput, match=r"^--host-kv: a worker keeps 2.0 GiB in /dev/shm, 0.5 GiB are free"):
        engine.start_engine(engine.engine_args(*asked_of(model, kv_offloading_size=2.0)))


def test_weights_are_loaded_on_as_many_threads_as_vllm_chooses(model, monkeypatch):
    """Ray sets one thread for an actor without CPUs; an operator's own number stays."""
    from dataplane.live.worker import engine

    seen = []
    monkeypatch.setattr(
        engine.vllm.EngineCoreClient,
        "make_async_mp_client",
        lambda *_, **__: seen.append(os.environ.get(NAME)),
    )
    for given in ("1", "6"):
        monkeypatch.setenv(NAME, given)
        engine.start_engine(engine.engine_args(*asked_of(model)))
    assert seen == [None, "6"]


# Penalties of moved requests under the second runner.

VOCABULARY = 40


def penalised(row, prompt, outputs, params):
    """vLLM's definition: repetition for all tokens seen, frequency and presence for outputs."""
    row, repetition = row.clone(), params.repetition_penalty
    for token in {*prompt, *outputs}:
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token, count in Counter(outputs).items():
        row[token] -= params.frequency_penalty * count + params.presence_penalty
    return row


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("seed", range(25))
def test_carried_penalties_equal_those_of_a_request_that_never_moved(seed, drafts):
    from vllm.sampling_params import SamplingParams

    rng = np.random.default_rng(seed)
    prompt, prior, new = (rng.integers(VOCABULARY, size=n).tolist() for n in (8, 12, 5))
    drafted = rng.integers(VOCABULARY, size=drafts).tolist()
    params = SamplingParams(
        presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.2, extra_args={PRIOR_TOKENS: prior}
    )
    tokens = torch.zeros(4, 64, dtype=torch.int64)
    tokens[2, :25] = torch.tensor(prompt + prior + new)
    states = SimpleNamespace(
        device="cpu", all_token_ids=SimpleNamespace(gpu=tokens), prompt_len=SimpleNamespace(np=np.full(4, 20))
    )
    carried = SlotCarriedPenalties(None, states)
    assert not carried.add_request(1, SamplingParams(presence_penalty=1.0))
    assert carried.add_request(2, params)
    raw = torch.tensor(rng.normal(size=(2 + drafts, VOCABULARY)) * 3, dtype=torch.float32)
    rows = [raw[0].clone()]
    outputs = [new + drafted[:k] for k in range(drafts + 1)]
    rows += [penalised(raw[1 + k], prompt + prior, made, params) for k, made in enumerate(outputs)]
    context = SimpleNamespace(
        idx_mapping_np=np.array([1, 2]),
        expanded_idx_mapping=torch.tensor([1] + [2] * (drafts + 1)),
        seq_lens_upper_bound_np=np.array([9, 25 + drafts]),
        pos=torch.tensor([8] + [24 + k for k in range(drafts + 1)]),
        input_ids=torch.tensor([0, new[-1], *drafted]),
    )
    found = carried.apply(torch.stack(rows), context)
    assert torch.equal(found[0], raw[0])
    for k, made in enumerate(outputs):
        whole = penalised(raw[1 + k], prompt, prior + made, params)
        assert torch.allclose(found[1 + k], whole, atol=1e-5)


def test_a_slot_forgets_the_request_that_left_it():
    from vllm.sampling_params import SamplingParams

    carried = SlotCarriedPenalties(None, SimpleNamespace(device="cpu"))
    assert carried.add_request(0, SamplingParams(presence_penalty=1.0, extra_args={PRIOR_TOKENS: [1]}))
    assert not carried.add_request(0, SamplingParams(presence_penalty=1.0))
    row = torch.ones(1, 4)
    context = SimpleNamespace(idx_mapping_np=np.array([0]), expanded_idx_mapping=torch.tensor([0]))
    assert torch.equal(carried.apply(row.clone(), context), row)


# KV caches as vLLM lays them out for its attention backends.

LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


def layers_of(config, layout, kind, dtype, kernel_block_tokens=64):
    """vLLM's own cache configuration and views of three layers, in one layout, on the host."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    sizes = {"block_size": 64, "dtype": dtype}
    if kind == "mla":
        spec = MLAAttentionSpec(num_kv_heads=1, head_size=576, **sizes)
    else:
        spec = FullAttentionSpec(num_kv_heads=4, head_size=32, **sizes)
    config.cache_config.kv_cache_layout = layout
    names = [f"model.layers.{i}.attn" for i in range(3)]
    cache = get_kv_cache_configs(config, [dict.fromkeys(names, spec)], [8 << 20])[0]
    raw = torch.zeros(cache.kv_cache_tensors[0].size, dtype=torch.int8)
    raw.copy_(torch.randint(-128, 127, raw.shape, generator=torch.Generator().manual_seed(1)))
    views = {}
    for tensor in cache.kv_cache_tensors:
        made = create_kv_cache_views(
            raw,
            spec,
            cache.num_blocks_of(tensor),
            KVCacheLayout[layout],
            tensor,
            kernel_block_size=kernel_block_tokens,
        )
        views |= dict(zip(tensor.layers, made, strict=True))
    return cache, views


def test_a_rank_tells_the_gpu_s_own_times_of_a_step_that_has_ended(model):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from dataplane.live.kv.connector import MigrationConnector, StepMarks, StepMetadata, StepStats

    made = []

    class Event:
        has_come = True

        def record(self):
            made.append(self)

        def query(self):
            return self.has_come

        def elapsed_time(self, end):
            return 10.0 * (made.index(end) - made.index(self))

    config = config_of(model)
    cache, _ = layers_of(config, "LBNHC", "full", torch.bfloat16)
    rank = MigrationConnector(config, KVConnectorRole.WORKER, cache)
    assert rank.get_kv_connector_stats() is None
    rank._marks = StepMarks(Event)
    for has_come in (True, False):
        Event.has_come = has_come
        rank.bind_connector_metadata(StepMetadata())
        told = rank.get_kv_connector_stats().aggregate(StepStats(data={"answers": {}})).to_dict()
        times = {"since_last_s": 0.02, "gpu_s": 0.01} if has_come else {}
        assert told == {"answers": {}, "fetched": {}} | times
        rank.clear_connector_metadata()


def registered(config, cache, views):
    """The memory that a rank's connector makes of these caches."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from dataplane.live.kv.connector import MigrationConnector

    connector = MigrationConnector(config, KVConnectorRole.WORKER, cache)
    connector.register_kv_caches(views)
    memory = connector._loads._memory
    connector.shutdown()
    return memory


def moved(config, cache, source, target, blocks, into):
    """Read blocks of one rank's caches and write them into another's."""
    read, wait = registered(config, cache, source).read(blocks)
    views, commit = registered(config, cache, target).write(into)
    for number, (to, came) in enumerate(zip(views, read, strict=True)):
        wait(number)
        to[:] = came
    commit()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("kind", "split"), [("full", 1), ("full", 4), ("mla", 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_move_between_caches_of_every_layout_byte_for_byte(model, layout, kind, split, dtype):
    """`split`: kernel blocks in a block of the scheduler's, where the layout lets vLLM split it."""
    if split > 1 and not layout.startswith("LB"):
        pytest.skip("vLLM splits no blocks of this layout")
    config = config_of(model)
    cache, source = layers_of(config, layout, kind, dtype, 64 // split)
    _, target = layers_of(config, layout, kind, dtype, 64 // split)
    for view in target.values():
        view.view(torch.uint8).zero_()
    blocks, into = [0, 3, 1], [2, 5, 7]
    moved(config, cache, source, target, blocks, into)
    for name, view in target.items():
        rows = view.view(torch.uint8).unflatten(0, (cache.num_blocks, split))
        assert torch.equal(rows[into], source[name].view(torch.uint8).unflatten(0, (-1, split))[blocks])
        assert not rows[[b for b in range(cache.num_blocks) if b not in into]].any()


def test_layers_that_share_a_cache_are_moved_once(model):
    config = config_of(model)
    cache, views = layers_of(config, "LBNHC", "full", torch.bfloat16)
    alone = registered(config, cache, views).block_bytes
    shared = views | {"model.layers.9.attn": views["model.layers.0.attn"]}
    assert registered(config, cache, shared).block_bytes == alone


def test_caches_of_a_gpu_are_staged_through_the_host():
    meta = [torch.empty(4, 2, 16, 32, device="meta")]
    assert isinstance(kv_memory(meta), StagedMemory)


# Devices: what Ray reserves for a worker, and what vLLM makes of it there.


@pytest.fixture
def ray_with_gpus(tmp_path_factory):
    import ray

    paths = ":".join(map(str, (ROOT, ROOT / "tests" / "builders", ROOT / "tests" / "rehearsal")))
    ray.init(
        address="local",
        num_gpus=8,
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"worker_niceness": 0},  # else a task waits for the other tests of the machine
        _temp_dir=str(tmp_path_factory.mktemp("r")),
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield ray
    ray.shutdown()


def test_a_worker_has_its_gpus_and_vllm_accepts_their_reservation(model, ray_with_gpus):
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from dataplane.live.worker.launch import WorkerResources

    def inside(folder, degree):
        import os

        from conftest import stand_on_gpus

        stand_on_gpus()
        from test_gpu_engine import config_of
        from vllm.v1.executor.ray_utils import ray

        assert ray.util.get_current_placement_group() is not None
        parallel = config_of(folder, degree).parallel_config
        return os.environ["CUDA_VISIBLE_DEVICES"].split(","), parallel.distributed_executor_backend

    group = placement_group([WorkerResources(gpus=4).bundle], strategy="STRICT_PACK")
    strategy = PlacementGroupSchedulingStrategy(group)
    task = ray_with_gpus.remote(inside).options(num_cpus=0, num_gpus=4, scheduling_strategy=strategy)
    devices, executor = ray_with_gpus.get(task.remote(model, 4), timeout=300)
    assert (len(set(devices)), executor) == (4, "mp")
