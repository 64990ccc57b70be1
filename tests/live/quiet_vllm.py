"""Imports vLLM once, without the deprecation warnings of its own imports, which are not ours to fail on.

Import this before anything that imports vLLM; without vLLM the importing module is skipped.
"""

import warnings
from importlib import import_module

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed (requirements/live-cpu.txt)")
    surface = import_module("dataplane.live.engine_api.vllm_surface")
