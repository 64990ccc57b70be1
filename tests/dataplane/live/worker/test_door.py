"""The door of a worker: its gateways are heard, and no other caller sends or reads a word."""

import asyncio

import pytest

try:
    import zmq.asyncio

    from dataplane.live.engine_api.wire import Door, knock, new_key, public_key
except ModuleNotFoundError:
    pytest.skip("ZMQ is not installed (requirements/live-cpu.txt)", allow_module_level=True)

SAID = [b"add", b"a prompt's tokens", bytes(range(200))]
ANSWER = b"the secret of its KV"


def play(story):
    """Play a story while a door answers every caller that it hears."""

    async def scene():
        key = new_key()
        door, context, heard = Door("127.0.0.1", public_key(key)), zmq.asyncio.Context(), []

        async def answer():
            while True:
                name, *frames = await door.socket.recv_multipart()
                heard.append(frames)
                await door.socket.send_multipart([name, ANSWER])

        answering = asyncio.ensure_future(answer())
        try:
            await asyncio.wait_for(story(door, key, context, heard), 30)
        finally:
            answering.cancel()
            context.destroy(linger=0)
            door.close(linger_ms=0)

    asyncio.run(scene())


def dealer(context, port, *keys):
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    if keys:
        knock(socket, *keys)
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


def port_of(door):
    return int(door.endpoint.rsplit(":", 1)[1])


@pytest.mark.parametrize("who", ["without a key", "with a stranger's key", "who takes it for another door"])
def test_a_caller_is_not_heard(who):
    async def story(door, key, context, heard):
        given = {
            "without a key": (),
            "with a stranger's key": (new_key(), door.key),
            "who takes it for another door": (key, public_key(new_key())),
        }[who]
        with dealer(context, port_of(door), *given) as stranger:
            with stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
                await stranger.send_multipart(SAID)
                await monitor.recv_multipart()  # shown out
                stranger.disable_monitor()
            with dealer(context, port_of(door), key, door.key) as gateway:
                await gateway.send_multipart([b"mine"])
                assert await gateway.recv_multipart() == [ANSWER]
            assert heard == [[b"mine"]]
            assert not await stranger.poll(0)

    play(story)


def test_two_gateways_of_one_key_are_heard():
    async def story(door, key, context, heard):
        for _ in range(2):
            with dealer(context, port_of(door), key, door.key) as gateway:
                await gateway.send_multipart(SAID)
                assert await gateway.recv_multipart() == [ANSWER]
        assert heard == [SAID, SAID]

    play(story)


def test_who_listens_on_the_way_reads_nothing(recorded):
    async def story(door, key, context, heard):
        between, wire = recorded(port_of(door))
        with dealer(context, between, key, door.key) as gateway:
            await gateway.send_multipart(SAID)
            assert await gateway.recv_multipart() == [ANSWER]
        noise = b"".join(wire)
        assert b"CURVE" in noise  # it was this wire
        for said in (*SAID[1:], ANSWER, key.encode()):
            assert said not in noise

    play(story)
