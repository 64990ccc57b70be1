"""The policy for Ray Serve: alone, and in the code of Ray's controller that resolves, wraps and calls it."""

from types import SimpleNamespace

import pytest
from counted_servers import CountedServer

from tokenfleet.advise.ray_serve import COUNTS, EVERY_S, AdvicePolicy, counts_of

ASKED = {"model": "llama-3.1-8b", "gpu": "h100", "slo": "ttft=1s,tpot=50ms", "cold_start": "10s"}


class Deployment:
    """A deployment whose first replica gets requests; it follows the policy at once."""

    def __init__(self, low=1, high=6, policy=None, context=SimpleNamespace):
        self.policy, self.context = policy or AdvicePolicy(**ASKED), context
        self.low, self.high, self.replicas, self.now_s = low, high, low, 1000.0
        self.servers = [CountedServer() for _ in range(high)]
        self.silent = ()

    def beat(self, requests):
        """Half a second of Ray's controller."""
        self.now_s += 0.5
        self.servers[0].end(self.servers[0].running)
        self.servers[0].arrive(requests)
        raw = {name: {} for name in COUNTS}
        for n in range(self.replicas):
            for name, value in counts_of(self.servers[n].text()).items():
                if n not in self.silent:
                    raw[name][n] = [SimpleNamespace(value=value)]
        context = self.context(
            current_time=self.now_s,
            raw_metrics=raw,
            running_replicas=range(self.replicas),
            target_num_replicas=self.replicas,
            capacity_adjusted_min_replicas=self.low,
            capacity_adjusted_max_replicas=self.high,
        )
        self.replicas, _ = self.policy(context)
        return self.replicas

    def seconds(self, seconds, rps):
        return [self.beat(rps // 2) for _ in range(2 * seconds)]


def test_the_policy_asks_for_what_the_traffic_needs_and_keeps_it_without_numbers():
    fleet = Deployment()
    rise = fleet.seconds(60, 60)
    assert rise[: int(2 * EVERY_S)] == [1] * int(2 * EVERY_S)
    assert rise[-1] == 3  # a replica carries 38.5 of these requests a second
    fleet.silent = (0,)
    assert set(fleet.seconds(30, 60)) == {3}
    fleet.silent = ()
    fleet.seconds(10, 60)
    assert fleet.seconds(240, 4)[-1] == 1


def test_the_policy_keeps_to_the_bounds_of_the_deployment():
    assert Deployment(low=4).seconds(40, 20)[-1] == 4
    assert Deployment(high=2).seconds(60, 200)[-1] == 2


def test_rays_own_code_takes_the_policy_from_a_config_and_gets_the_replicas():
    """No cluster: a config as a user writes it, its pickled policy, Ray's context and Ray's delays."""
    needs = "ray.serve needs it: pip install grpcio-reflection==1.80.0"
    pytest.importorskip("grpc_reflection", reason=needs)
    config = pytest.importorskip("ray.serve.config", reason="no Ray here")
    state = pytest.importorskip("ray.serve._private.autoscaling_state")
    delays = {"upscale_delay_s": 0, "downscale_delay_s": 0}
    asked = config.AutoscalingConfig(
        min_replicas=1,
        max_replicas=6,
        policy={"policy_function": AdvicePolicy, "policy_kwargs": ASKED},
        **delays,
    )
    sent = config.AutoscalingPolicy.from_serialized_policy_def(
        {"policy_kwargs": ASKED}, asked.policy.get_serialized_policy_def()
    )
    policy = state._apply_autoscaling_config(state._resolve_policy_callable(sent))

    def context(**known):
        return config.AutoscalingContext(
            deployment_id=None,
            deployment_name="engine",
            app_name="default",
            current_num_replicas=known["target_num_replicas"],
            total_num_requests=0,
            total_queued_requests=0,
            aggregated_metrics={},
            policy_state={},
            last_scale_up_time=None,
            last_scale_down_time=None,
            config=asked,
            **known,
        )

    fleet = Deployment(policy=policy, context=context)
    assert fleet.seconds(60, 60)[-1] == 3
    assert fleet.seconds(240, 4)[-1] == 1
