"""The errors that a server answers to a faulty body, or on a full disk."""

import asyncio
import errno
import sqlite3
from typing import Annotated

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from dataplane.http.keys import KeyRing
from dataplane.http.rules import application


class Upload(BaseModel):
    model_config = ConfigDict(extra="forbid")
    upload: str


class Inline(BaseModel):
    model_config = ConfigDict(extra="forbid")
    text: Annotated[str, Field(min_length=1)]


class Order(BaseModel):
    trace: Upload | Inline


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ({"text": ""}, "body.trace.Inline.text: String should have at least 1 character"),
        ({"upload": 5}, "body.trace.Upload.upload: Input should be a valid string"),
        ({}, "body.trace.Upload.upload: Field required"),
    ],
)
def test_of_two_forms_the_fault_of_the_one_that_was_sent_is_said(trace: object, said: str) -> None:
    app = application("made", KeyRing([]), [])

    @app.post("/orders")
    async def order(order: Order) -> None:
        raise AssertionError(order)

    reply = asyncio.run(answer(app, {"trace": trace}))
    assert (reply.status_code, reply.json()["error"]["message"]) == (422, said)


async def answer(app: FastAPI, body: object) -> httpx.Response:
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return await client.post("/orders", json=body)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "No space left on device"),
        (sqlite3.OperationalError("database or disk is full"), "database or disk is full"),
    ],
)
def test_a_full_disk_is_said_in_the_apis_own_form(error: Exception, why: str) -> None:
    app = application("made", KeyRing([]), [])

    @app.post("/orders")
    async def order() -> None:
        raise error

    reply = asyncio.run(answer(app, {}))
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        507,
        f"nothing can be kept here now: {why}",
    )
