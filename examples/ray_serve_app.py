"""An application of Ray Serve: vLLM in each replica, and as many replicas as the advice wants.

`ray_serve.yaml` has its arguments. A POST of {"prompt": [ids], "max_tokens": n} returns {"tokens": [ids]}.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import generate_latest
from pydantic import BaseModel
from ray import serve
from ray.serve import Application
from starlette.requests import Request

from tokenfleet.advise.ray_serve import AdvicePolicy, counts_of


class Asked(BaseModel):
    """The arguments."""

    weights: str
    model: str
    gpu: str
    slo: str
    tp: int
    max_replicas: int
    gpus: int
    engine: dict[str, Any]


class Engine:
    """One replica: an engine of vLLM, whose metrics are in this process."""

    def __init__(self, weights: str, settings: dict[str, Any]) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=weights, **settings))
        self._requests = 0

    async def __call__(self, request: Request) -> dict[str, list[int]]:
        from vllm import SamplingParams, TokensPrompt

        asked = await request.json()
        self._requests += 1
        prompt = TokensPrompt(prompt_token_ids=asked["prompt"])
        sampling = SamplingParams(max_tokens=asked["max_tokens"], temperature=0.0, ignore_eos=True)
        tokens: list[int] = []
        async for output in self._engine.generate(prompt, sampling, str(self._requests)):
            tokens = list(output.outputs[0].token_ids)
        return {"tokens": tokens}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the policy reads of this replica."""
        return counts_of(generate_latest().decode())


def app(arguments: dict[str, Any]) -> Application:
    """The application. Raises pydantic's ValidationError for an argument that is wrong or missing."""
    asked = Asked.model_validate(arguments)
    targets = {"model": asked.model, "gpu": asked.gpu, "tp": asked.tp, "slo": asked.slo}
    policy = {"policy_function": AdvicePolicy, "policy_kwargs": targets}
    bounds = {"min_replicas": 1, "max_replicas": asked.max_replicas}
    delays = {"upscale_delay_s": 0, "downscale_delay_s": 0}  # the advice has a window of its own
    engine = serve.deployment(
        autoscaling_config=bounds | delays | {"policy": policy},
        ray_actor_options={"num_gpus": asked.gpus},
        max_ongoing_requests=1024,
    )(Engine)
    return engine.bind(asked.weights, asked.engine)
