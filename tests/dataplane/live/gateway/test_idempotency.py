"""Idempotency keys: computed once, kept within bounds, and no request waits for a maker that is gone."""

import asyncio

import pytest

from dataplane.live.gateway import idempotency
from dataplane.live.gateway.idempotency import Answers, OtherBody, StoredAnswer, answer_once

DIGEST = b"d"


def kept(body=b"{}"):
    return StoredAnswer(200, [(b"content-type", b"application/json")], body)


async def breathe():
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_second_request_waits_for_the_first_and_gets_its_answer():
    async def story():
        answers = Answers()
        assert await answers.claim("k", DIGEST) is None
        second = asyncio.ensure_future(answers.claim("k", DIGEST))
        await breathe()
        assert not second.done()
        await answers.settle("k", kept())
        assert await second == kept()
        assert await answers.claim("k", DIGEST) == kept()

    asyncio.run(story())


def test_of_several_that_wait_for_one_that_failed_one_runs_and_the_others_wait_for_it():
    async def story():
        answers = Answers()
        await answers.claim("k", DIGEST)
        waiting = [asyncio.ensure_future(answers.claim("k", DIGEST)) for _ in range(3)]
        await breathe()
        await answers.settle("k", None)
        await breathe()
        assert [w.result() for w in waiting if w.done()] == [None]
        await answers.settle("k", kept(b"second"))
        assert [await w for w in waiting].count(kept(b"second")) == 2

    asyncio.run(story())


def test_what_a_gateway_that_died_was_making_is_made_by_the_next_in_line():
    async def story():
        answers = Answers()
        await answers.claim("mine", DIGEST, "g0")
        await answers.claim("theirs", DIGEST, "g1")
        mine = asyncio.ensure_future(answers.claim("mine", DIGEST, "g1"))
        theirs = asyncio.ensure_future(answers.claim("theirs", DIGEST, "g1"))
        await breathe()
        await answers.release("g0")
        await breathe()
        assert (mine.done(), theirs.done()) == (True, False)
        assert mine.result() is None
        theirs.cancel()

    asyncio.run(story())


def test_another_body_under_a_key_is_refused_while_it_runs_and_after():
    async def story():
        answers = Answers()
        await answers.claim("k", DIGEST)
        with pytest.raises(OtherBody):
            await answers.claim("k", b"other")
        await answers.settle("k", kept())
        with pytest.raises(OtherBody):
            await answers.claim("k", b"other")

    asyncio.run(story())


def test_answers_are_forgotten_by_age_and_the_oldest_first_where_memory_is_full(monkeypatch):
    monkeypatch.setattr(idempotency, "MOST_BYTES", 2 * kept(bytes(1000)).size)
    now_s = [0.0]

    async def story():
        answers = Answers(lambda: now_s[0])
        for name in "abc":
            await answers.claim(name, DIGEST)
            await answers.settle(name, kept(bytes(1000)))
        assert len(answers) == 2
        assert await answers.claim("a", DIGEST) is None
        assert await answers.claim("c", DIGEST) is not None
        now_s[0] = idempotency.KEPT_S
        assert await answers.claim("c", DIGEST) is None

    asyncio.run(story())


def test_an_answer_beyond_the_bound_is_given_and_not_kept(monkeypatch):
    monkeypatch.setattr(idempotency, "LARGEST_BYTES", 100)

    async def story():
        answers = Answers()
        await answers.claim("k", DIGEST)
        await answers.settle("k", kept(bytes(101)))
        assert await answers.claim("k", DIGEST) is None

    asyncio.run(story())


def ask(answers, reply, body=b"{}", has_left=lambda: False):
    """One request through `answer_once`; what the client got, and how often the application ran."""
    sent, runs = [], []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    async def run(receive, send):
        assert (await receive())["body"] == body
        runs.append(1)
        for message in reply:
            await send(message)

    async def story():
        await answer_once(answers, "k", receive, send, run, has_left)
        return sent, len(runs)

    return story()


def start(status=200, kind=b"application/json"):
    return {"type": "http.response.start", "status": status, "headers": [(b"Content-Type", kind)]}


def piece(body, more=False):
    return {"type": "http.response.body", "body": body, "more_body": more}


def test_a_whole_answer_is_given_again_and_says_so():
    async def story():
        answers = Answers()
        _, ran = await ask(answers, [start(), piece(b"a", True), piece(b"b")])
        again, ran_again = await ask(answers, [])
        assert (ran, ran_again) == (1, 0)
        assert b"".join(m.get("body", b"") for m in again) == b"ab"
        assert (b"idempotency-replayed", b"true") in again[0]["headers"]

    asyncio.run(story())


@pytest.mark.parametrize(
    "reply",
    [
        [start(429), piece(b"busy")],
        [start(500), piece(b"broken")],
        [start(kind=b"text/event-stream; charset=utf-8"), piece(b"data: [DONE]")],
        [start(), piece(b"half", True)],
    ],
)
def test_refusals_failures_streams_and_halves_are_not_kept(reply):
    async def story():
        answers = Answers()
        await ask(answers, reply)
        _, ran = await ask(answers, reply)
        assert ran == 1
        assert len(answers) == 0

    asyncio.run(story())


def test_a_client_that_left_while_it_waited_computes_nothing_and_blocks_nobody():
    async def story():
        answers = Answers()
        _, ran = await ask(answers, [start(), piece(b"a")], has_left=lambda: True)
        assert ran == 0
        assert await answers.claim("k", DIGEST) is None

    asyncio.run(story())


def test_an_application_that_breaks_lets_the_next_one_run():
    async def story():
        answers = Answers()

        async def broken(receive, send):
            raise RuntimeError

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        with pytest.raises(RuntimeError):
            await answer_once(answers, "k", receive, receive, broken, lambda: False)
        assert (await ask(answers, [start(), piece(b"a")]))[1] == 1

    asyncio.run(story())
