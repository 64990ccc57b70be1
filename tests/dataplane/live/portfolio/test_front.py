"""The front of a portfolio over two servers that stand in for fleets: routes, streams, breaks, and lists."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

web = pytest.importorskip("aiohttp.web")

import aiohttp  # noqa: E402

from dataplane.http.server import QuietServer  # noqa: E402
from dataplane.live.portfolio.front import control, endpoint, merged, session  # noqa: E402

KEY = {"authorization": "Bearer k"}


class Fleet:
    """A server for one model, which streams its name, and knows which requests were left."""

    def __init__(self, name):
        self.name, self.left, self.began = name, asyncio.Event(), asyncio.Event()

    async def answer(self, request):
        if request.headers.get("authorization") != KEY["authorization"]:
            return web.json_response({"error": {"message": "the API key is missing or wrong"}}, status=401)
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": self.name}]})
        if request.method == "GET":
            return web.json_response({"asked": self.name, "path": request.path_qs})
        body = await request.json()
        if body["model"] != self.name:
            error = {"message": f"Valid aliases: {self.name}.", "type": "NotFoundError", "code": 404}
            return web.json_response({"error": error}, status=404)
        if body.get("busy"):
            return web.json_response({"error": {"message": "full"}}, status=429, headers={"retry-after": "7"})
        reply = web.StreamResponse(headers={"content-type": body["media"]})
        await reply.prepare(request)
        await reply.write(f"data: {self.name}\n\n".encode())
        if body.get("breaks"):
            request.transport.abort()
        self.began.set()
        try:
            while body.get("lasts"):
                await asyncio.sleep(0.01)
                await reply.write(b"data: on\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.left.set()
            raise
        await reply.write_eof(b"data: [DONE]\n\n")
        return reply


@asynccontextmanager
async def served(make=endpoint, **named):
    """Two fleets, chat and code, and the front before them; gives its address and the fleets."""
    fleets, urls, runners = {}, {}, []
    for name in ("chat", "code"):
        fleets[name] = Fleet(name)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", fleets[name].answer)
        runners.append(web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        urls[name] = f"http://127.0.0.1:{runners[-1].addresses[0][1]}"
    async with session() as http, aiohttp.ClientSession(headers=KEY) as client:
        app = make(urls, http, **named)
        server = QuietServer(app, port=0, lifespan="off", log_level="error")
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}", fleets, client, runners
        finally:
            server.should_exit = True
            await serving
            for runner in runners:
                await runner.cleanup()


async def post(client, url, **body):
    async with client.post(f"{url}/v1/completions", json={"media": "text/event-stream"} | body) as reply:
        return reply.status, await reply.text(), reply.headers


def test_a_request_goes_to_the_fleet_of_its_model_and_its_answer_comes_whole():
    async def story():
        async with served() as (url, _, client, _):
            for name in ("chat", "code"):
                status, text, _ = await post(client, url, model=name)
                assert (status, text) == (200, f"data: {name}\n\ndata: [DONE]\n\n")
            status, text, headers = await post(client, url, model="code", busy=True)
            assert (status, json.loads(text)["error"]["message"]) == (429, "full")
            assert headers["retry-after"] == "7"

    asyncio.run(story())


def test_an_unknown_model_is_refused_by_a_fleet_with_the_names_of_all():
    async def story():
        async with served() as (url, _, client, _):
            status, text, _ = await post(client, url, model="mail")
            error = json.loads(text)["error"]
            assert (status, error["type"]) == (404, "NotFoundError")
            assert error["message"] == "The model `mail` does not exist. Valid aliases: chat, code."
            status, text, _ = await post(client, url)
            assert (status, "model: missing" in text) == (400, True)
            async with aiohttp.ClientSession() as stranger:
                assert (await post(stranger, url, model="mail"))[0] == 401
                async with stranger.get(f"{url}/v1/models") as reply:
                    assert reply.status == 401

    asyncio.run(story())


def test_models_are_listed_also_while_a_fleet_does_not_answer_and_its_requests_are_told_to_come_again():
    async def story():
        async with served() as (url, _, client, runners):

            async def names():
                async with client.get(f"{url}/v1/models") as reply:
                    return [one["id"] for one in (await reply.json())["data"]]

            assert await names() == ["chat", "code"]
            await runners[1].cleanup()
            assert await names() == ["chat", "code"]
            status, _, headers = await post(client, url, model="code")
            assert (status, headers["retry-after"]) == (503, "2")
            assert (await post(client, url, model="chat"))[0] == 200

    asyncio.run(story())


def test_a_stream_that_breaks_off_ends_in_an_error_and_another_answer_in_a_broken_connection():
    async def story():
        async with served() as (url, _, client, _):
            _, text, _ = await post(client, url, model="chat", breaks=True)
            assert "the answer broke off" in text
            assert "[DONE]" not in text
            with pytest.raises(aiohttp.ClientError):
                await post(client, url, model="chat", breaks=True, media="text/plain")

    asyncio.run(story())


def test_a_client_that_leaves_takes_its_request_with_it():
    async def story():
        async with served() as (url, fleets, client, _):
            asking = asyncio.create_task(post(client, url, model="code", lasts=True))
            await fleets["code"].began.wait()
            asking.cancel()
            await asyncio.wait_for(fleets["code"].left.wait(), 20)

    asyncio.run(story())


def test_each_models_control_api_is_below_its_name():
    async def story():
        async with served(control, shared={}) as (url, _, client, _):
            async with client.get(f"{url}/models/code/v1/requests/a%20b?since=2") as reply:
                assert await reply.json() == {"asked": "code", "path": "/v1/requests/a%20b?since=2"}
            for path in ("/models/mail/v1/fleet", "/v1/requests", "/"):
                async with client.get(url + path) as reply:
                    assert (reply.status, "/models/NAME/" in await reply.text()) == (404, True)
            async with aiohttp.ClientSession() as stranger, stranger.get(f"{url}/v1/fleet") as reply:
                assert reply.status == 401

    asyncio.run(story())


def test_metrics_of_all_fleets_are_one_text_whose_families_stand_together():
    text = '# HELP a_total what\n# TYPE a_total counter\na_total{x="1"} 2.0\n# TYPE b gauge\nb 3.0\n'
    assert merged({"chat": text, "code": text}).splitlines() == [
        "# HELP a_total what",
        "# TYPE a_total counter",
        'a_total{fleet="chat",x="1"} 2.0',
        'a_total{fleet="code",x="1"} 2.0',
        "# TYPE b gauge",
        'b{fleet="chat"} 3.0',
        'b{fleet="code"} 3.0',
    ]
