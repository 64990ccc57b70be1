"""The door: from when on a request's time to first token counts."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from controlplane.types import Slo
from dataplane.http.keys import KeyRing

SLO = Slo(1.0, 0.1)


@pytest.fixture
def through_the_door():
    pytest.importorskip("vllm")
    from dataplane.live.gateway.middleware import DoorPolicy, FrontDoor
    from dataplane.live.ledger.request import tracked_from

    async def posted(parts):
        """The parts of a posted request, as the core tracks them 20 s after they came."""
        tracked = []

        async def app(scope, receive, send):
            for _ in range(parts):
                request = SimpleNamespace(prompt_token_ids=[1], sampling_params=None)
                tracked.append(tracked_from(request, SLO, lambda *_: 1, time.monotonic() + 20.0))
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": True}

        async def send(message):
            pass

        async def allow(key):
            return 0.0

        async def abandon(ticket):
            pass

        policy = DoorPolicy(KeyRing([]), SLO, allow, abandon, None, "/live")
        state = SimpleNamespace(engine_client=SimpleNamespace(door=policy), server=None)
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": [],
            "client": ("127.0.0.1", 1), "app": SimpleNamespace(state=state),
        }  # fmt: skip
        before_s = time.monotonic()
        await FrontDoor(app)(scope, receive, send)
        return before_s, time.monotonic(), tracked

    return lambda parts: asyncio.run(posted(parts))


def test_a_request_arrives_when_it_comes_to_the_door_not_when_it_is_tracked(through_the_door):
    before_s, after_s, (first, second) = through_the_door(parts=2)
    assert before_s <= first.arrival_s <= after_s
    assert second.arrival_s >= before_s + 20.0, "a later part begins when it is sent"
