"""vLLM's CPU build told that it stands on eight GPUs, to rehearse its GPU-side choices and layouts.

The platform is vLLM's own CUDA platform; only what asks the driver is answered here, and modules that need
compiled kernels are empty. Nothing computes. It holds for the whole process, so these tests run by
themselves: `pytest tests/rehearsal`; any other run leaves them out.
"""

from __future__ import annotations

import sys
import types
import warnings
from importlib import import_module
from pathlib import Path

import pytest

HERE = Path(__file__).parent
GPUS = 8


def is_alone(arguments: list[str]) -> bool:
    """Whether these tests were asked for, and nothing else."""
    return bool(arguments) and all(
        Path(argument.split("::")[0]).resolve().is_relative_to(HERE) for argument in arguments
    )


def pytest_ignore_collect(collection_path: Path, config: object) -> bool | None:
    arguments: list[str] = config.args  # type: ignore[attr-defined]
    return None if is_alone(arguments) else True


def pytest_configure(config: object) -> None:
    if is_alone(config.args):  # type: ignore[attr-defined]
        stand_on_gpus()


class Kernels(types.ModuleType):
    """A module of compiled kernels that are never called."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *values, **named: None


def stand_on_gpus() -> None:
    """Put vLLM's CUDA platform in force, as of a host with eight H100s and Triton."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM's imports: not ours to fail on
        _stand_on_gpus()


def _stand_on_gpus() -> None:
    for name in ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn"):
        sys.modules[name] = Kernels(name)
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Gpus(CudaPlatformBase):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return f"GPU-{device_id}"

        @classmethod
        def device_count(cls) -> int:
            return GPUS

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

    # Loaded while the platform is the CPU's: on a GPU's it asks compiled kernels what they can do, and vLLM
    # imports it as it writes down what kind of model it found, the first time on a machine.
    import_module("vllm.model_executor.layers.quantization.utils.w8a8_utils")
    vllm.platforms._current_platform = Gpus()
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True
    import_module("dataplane.live.worker.actor")  # and with it all of vLLM that an engine's start imports


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Llama's configuration with eight KV heads; these tests read no weights."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
    LlamaConfig(
        **sizes, num_attention_heads=16, num_key_value_heads=8, architectures=["LlamaForCausalLM"]
    ).save_pretrained(folder)
    return str(folder)
