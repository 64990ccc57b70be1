"""A core and the fleet's own Ray: it joins the next one when that has ended, and asks none in between."""

import asyncio

import pytest
from front import until

from dataplane.live.engine_api.processes import replace_text

ray = pytest.importorskip("ray")

from dataplane.live.pool import own_ray  # noqa: E402


@pytest.fixture
def did(monkeypatch):
    """The order of what was asked of Ray."""
    done = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(own_ray, "REJOIN_S", 0.01)
    monkeypatch.setattr(ray, "init", lambda address, **_: done.append(address))
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("left"))
    return done


def test_a_core_leaves_a_ray_that_has_ended_before_it_joins_the_next(did, tmp_path):
    own = tmp_path / "own-ray"

    async def asks():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            did.append("a call ends")
            raise

    async def story():
        here = own_ray.JoinedRay(own, lambda: did.append("told"))
        replace_text(own, "first")
        await here.join()
        assert await here.call(asyncio.sleep(0, "answered")) == "answered"
        call = asyncio.create_task(here.call(asks()))
        await asyncio.sleep(0)
        own.unlink()
        with pytest.raises(own_ray.RayEnded):
            await call
        assert not here.is_there.is_set()
        replace_text(own, "\ndid not start in 3 attempts: busy")
        await until(lambda: "left" in did)
        replace_text(own, "second")
        await here.is_there.wait()
        assert did == ["first", "told", "a call ends", "left", "second"]
        replace_text(own, "third")  # it looked away in between
        await until(lambda: "third" in did)
        await here.close()
        assert did[5:] == ["told", "left", "third", "left"]

    asyncio.run(story())


def test_a_call_that_is_cancelled_is_so_and_does_not_say_that_ray_has_ended(did, tmp_path):
    async def story():
        call = asyncio.create_task(own_ray.JoinedRay(tmp_path, list).call(asyncio.Event().wait()))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(story())
