"""The control API: the fleet over HTTP on a port of its own, by the rules of dataplane.http."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Body, FastAPI, Header, Query, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from sse_starlette.sse import EventSourceResponse

from controlplane.errors import BadInput
from controlplane.snapshot import Fact, Note, Scale
from controlplane.types import Role, WorkerId
from dataplane.http.keys import KeyRing
from dataplane.http.rules import ErrorReply, application, error_reply
from dataplane.http.server import Extension
from dataplane.live.control.operations import Operations
from dataplane.live.control.views import fleet_words


def _whole(value: Any) -> Any:
    """5.0 as 5: to JSON they are one number, and some clients write nothing else."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Workers = Annotated[int, Field(ge=0, le=10_000), BeforeValidator(_whole)]


class _Order(BaseModel):
    """From outside: unknown fields are refused, and text is not taken for a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ScaleOrder(_Order):
    """A number of workers (of a `kind`, in a fleet of several), or `auto` to let the controller decide."""

    workers: Workers | None = Field(None, description="to keep from now on")
    kind: str | None = Field(None, min_length=1, max_length=64, description="such as h100 TP2")
    auto: bool = Field(False, description="let the controller decide")


class NeedOrder(_Order):
    """The number of workers that the traffic needs. The controller may ask for more."""

    workers: Workers = Field(description="of all worker types")


class ShareOrder(_Order):
    """The most workers of one model of several."""

    workers: dict[str, Workers] = Field(description="at most, of each kind")


class RoleOrder(_Order):
    """The role of a worker from now on."""

    role: Role = Field(description="from now on")


class MoveOrder(_Order):
    """A running request, and the worker to move it to; without one the fleet chooses."""

    request_id: str = Field(min_length=1, max_length=256, description="as `GET /v1/requests` has it")
    target: str | None = Field(None, min_length=1, max_length=64, description="a worker")


class EvacuationOrder(_Order):
    """The deadline by which a worker, or all workers of a node, must be empty."""

    deadline_s: float = Field(gt=0, le=86_400, allow_inf_nan=False, description="seconds from now")


class RestartOrder(_Order):
    """The time that requests which cannot be moved have to finish on their worker."""

    finish_s: float = Field(600.0, gt=0, le=86_400, allow_inf_nan=False, description="seconds from now")


class UpdateOrder(RestartOrder):
    """The model and the vLLM flags of all workers from now on; a field left out does not change."""

    model: str | None = Field(None, min_length=1, max_length=4096, description="as `serve --model`")
    flags: list[str] | None = Field(None, max_length=256, description="of vLLM, all of them")


class ScaleDecision(_Order):
    """The controller's decision on the number of workers, and on `kinds` if the fleet has several."""

    workers: Workers = Field(description="of all worker types together")
    kinds: dict[str, int] = Field(default_factory=dict, max_length=64, description="workers by kind")
    facts: dict[Fact, dict[str, float]] = Field(default_factory=dict, description="the figures behind it")
    reason: str = Field(min_length=1, max_length=500, description="a sentence")
    advisory: bool = Field(False, description="only record it")


class NoteDecision(_Order):
    """The controller's remark while the number of workers stays the same."""

    kind: Literal["correction", "limit"] = Field(description="of the note")
    facts: dict[Fact, dict[str, float]] = Field(default_factory=dict, description="the figures behind it")
    reason: str = Field(min_length=1, max_length=500, description="a sentence")


class MoveDecision(_Order):
    """The controller's decision to move a request to a worker."""

    request_id: str = Field(min_length=1, max_length=256, description="as `GET /v1/requests` has it")
    target: str = Field(min_length=1, max_length=64, description="a worker")
    reason: str = Field(min_length=1, max_length=500, description="a sentence")
    advisory: bool = Field(False, description="only record it")


def control_app(operations: Operations, keys: KeyRing, extensions: Sequence[Extension] = ()) -> FastAPI:
    """The application; without keys loopback callers are let in."""
    app = application("Tokenfleet control", keys, extensions)
    app.state.operations = operations
    added = {name: view for extension in extensions for name, view in extension.fleet.items()}

    _fleet_routes(app, operations, added)
    _worker_routes(app, operations)
    _request_routes(app, operations)
    _open_controllers_door(app, operations)

    @app.get("/v1/events", response_class=EventSourceResponse)
    async def events(
        last_event_id: Annotated[int, Header(ge=0)] = 0,
    ) -> EventSourceResponse:
        """Server-sent events: every decision, with its reason. Resumes after `Last-Event-ID`."""
        return EventSourceResponse(_event_lines(operations, last_event_id))

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus' text format: `tokenfleet_` families, and vLLM's own by worker."""
        return Response(operations.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/ready", responses={503: {"model": ErrorReply}})
    async def ready() -> Any:
        """Whether a worker serves."""
        if operations.is_ready:
            return {"status": "ready"}
        return error_reply(503, "no worker is serving", "service_unavailable")

    _add_changes(app, operations)
    for extension in extensions:
        for router in extension.routers:
            app.include_router(router)
    return app


def _fleet_routes(app: FastAPI, operations: Operations, added: Mapping[str, Callable[[], Any]]) -> None:
    """The fleet as a whole, and its size; `added`: what extensions tell of it, by name."""

    @app.get("/v1/fleet", response_model=dict[str, Any])
    async def fleet() -> Any:
        """Workers, their load, what is moving, the last decisions with their reasons, and the last finished
        day's cost over the cheapest (`gap`). `says`: the words of `fleet status` and the live page."""
        shown = operations.fleet()
        shown["says"] = fleet_words(shown)
        return _json(shown | {name: view() for name, view in added.items()})

    @app.get("/v1/fleet/timeline")
    async def timeline(minutes: Annotated[float, Query(gt=0, le=60)] = 30.0) -> dict[str, Any]:
        """Throughput, TTFT, TPOT, attainment and errors of the last minutes, in buckets of `bucket_s`."""
        return operations.timeline(minutes)

    @app.post("/v1/fleet/scale", status_code=202)
    async def scale(order: Annotated[ScaleOrder, Body()]) -> dict[str, Any]:
        """Fix the number of workers, or hand the decision back to the controller."""
        if (order.workers is None) == (not order.auto) or (order.auto and order.kind is not None):
            raise BadInput('scale: give either {"workers": N}, with a "kind" or not, or {"auto": true}')
        if order.workers is None:
            operations.scale_automatically()
        else:
            operations.scale(order.workers, order.kind, "an operator asked")
        cluster = operations.cluster
        return {
            "wanted_workers": cluster.wanted,
            "wanted_kinds": cluster.wanted_kinds,
            "auto": operations.auto,
        }

    @app.get("/v1/fleet/share")
    async def share() -> dict[str, Any]:
        """The share of a fleet of a portfolio, and the workers that are asked for, needed and held."""
        return operations.share()

    @app.put("/v1/fleet/share", responses={409: {"model": ErrorReply, "description": "Of no portfolio"}})
    async def allow(order: Annotated[ShareOrder, Body()]) -> dict[str, Any]:
        """Bound the workers of a fleet of a portfolio, whatever is asked for."""
        return operations.allow(order.workers)


def _request_routes(app: FastAPI, operations: Operations) -> None:
    """Requests, and moves of them."""

    @app.get("/v1/requests", response_model=dict[str, Any])
    async def requests() -> Any:
        """Running and waiting requests, with worker and progress."""
        return _json({"requests": operations.requests()})

    @app.get("/v1/requests/{request_id:path}")  # a client may have / in its x-request-id
    async def explain(request_id: str) -> dict[str, Any]:
        """One request and every decision about it."""
        return operations.explain(request_id)

    @app.post("/v1/migrations", status_code=202)
    async def migrate(order: Annotated[MoveOrder, Body()]) -> dict[str, Any]:
        """Begin to move a running request."""
        return await operations.migrate(order.request_id, order.target, "an operator asked")

    @app.get("/v1/migrations/{migration_id}")
    async def migration(migration_id: str) -> dict[str, Any]:
        """One move: stage, bytes, downtime, outcome."""
        return operations.migration(migration_id)


def _add_changes(app: FastAPI, operations: Operations) -> None:
    """The orders that replace workers while the fleet serves."""

    @app.post("/v1/workers/{worker}/restart", status_code=202)
    async def restart(worker: str, order: Annotated[RestartOrder, Body()]) -> dict[str, Any]:
        """Replace a worker by a new one, its requests moved or finished."""
        return operations.updates.restart(WorkerId(worker), order.finish_s)

    @app.post("/v1/gateways/restart", status_code=202)
    async def restart_gateways(order: Annotated[RestartOrder, Body()]) -> dict[str, Any]:
        """Replace all gateways, one after another, by new processes; streams finish where they are."""
        return operations.restart_gateways(order.finish_s)

    @app.post("/v1/fleet/update", status_code=202)
    async def update(order: Annotated[UpdateOrder, Body()]) -> dict[str, Any]:
        """Replace all workers, one after another, by ones of another model or with other flags."""
        return await operations.updates.begin(order.model, order.flags, order.finish_s)

    @app.delete("/v1/fleet/update")
    async def cancel_update() -> dict[str, Any]:
        """Roll back the update that is under way."""
        return operations.updates.cancel()


def _open_controllers_door(app: FastAPI, operations: Operations) -> None:
    """The routes that the controller's process looks and decides through."""

    @app.get("/v1/state", response_class=Response)
    async def state() -> Response:
        """The fleet at this instant with its ledger's records, in MessagePack."""
        return Response(msgspec.msgpack.encode(operations.state()), media_type="application/msgpack")

    @app.post("/v1/decisions/scale", status_code=202)
    async def decide_scale(decision: Annotated[ScaleDecision, Body()]) -> dict[str, int]:
        """Scale, or where it is only advice record it."""
        change = Scale(decision.workers, decision.reason, decision.facts, decision.kinds)
        operations.decide_scale(change, decision.advisory)
        return {"workers": decision.workers}

    @app.post("/v1/decisions/need", status_code=202)
    async def decide_need(order: Annotated[NeedOrder, Body()]) -> dict[str, int]:
        """Record how many workers are needed of those that are asked for."""
        operations.needed = order.workers
        return {"workers": order.workers}

    @app.post("/v1/decisions/note", status_code=202)
    async def decide_note(note: Annotated[NoteDecision, Body()]) -> dict[str, str]:
        """Record why the fleet's size is what it is."""
        operations.note(Note(note.kind, note.reason, note.facts))
        return {"kind": note.kind}

    @app.post("/v1/decisions/migrate", status_code=202)
    async def decide_migrate(decision: Annotated[MoveDecision, Body()]) -> dict[str, str]:
        """Begin to move a request, or where it is only advice record it."""
        await operations.decide_migrate(
            decision.request_id, decision.target, decision.reason, decision.advisory
        )
        return {"request_id": decision.request_id}


def _json(view: object) -> Response:
    """A reply, encoded here: FastAPI's own way, by pydantic, takes the gateway's loop many times as long."""
    return Response(msgspec.json.encode(view), media_type="application/json")


def _worker_routes(app: FastAPI, operations: Operations) -> None:
    """What one worker may be told."""

    @app.post("/v1/workers/{worker}/drain", status_code=202)
    async def drain(worker: str) -> dict[str, Any]:
        """Move everything off a worker, then stop it."""
        operations.cluster.drain(WorkerId(worker), "an operator asked")
        return {"worker": worker, "state": "draining"}

    @app.delete("/v1/workers/{worker}/drain")
    async def cancel_drain(worker: str) -> dict[str, Any]:
        """Let a draining worker serve again."""
        operations.cluster.cancel_drain(WorkerId(worker), "an operator cancelled the drain")
        return {"worker": worker, "state": "serving"}

    @app.post("/v1/workers/{worker}/evacuate", status_code=202)
    async def evacuate(worker: str, order: Annotated[EvacuationOrder, Body()]) -> dict[str, Any]:
        """Empty a worker by a deadline, by moves and replays, then stop it and launch another."""
        return operations.evacuate(worker, order.deadline_s, "an operator asked")

    @app.post("/v1/nodes/{address}/evacuate", status_code=202)
    async def evacuate_node(address: str, order: Annotated[EvacuationOrder, Body()]) -> dict[str, Any]:
        """Empty all workers of the node at an address by a deadline, and launch others elsewhere."""
        return await operations.evacuate_node(address, order.deadline_s, "its node goes away")

    @app.post("/v1/workers/{worker}/role", status_code=202)
    async def role(worker: str, order: Annotated[RoleOrder, Body()]) -> dict[str, Any]:
        """Give a worker another role while it serves: prefill, decode, or any."""
        operations.cluster.set_role(WorkerId(worker), order.role, "an operator asked")
        return {"worker": worker, "role": order.role}


async def _event_lines(operations: Operations, after_id: int) -> AsyncIterator[dict[str, str]]:
    async for event in operations.events.follow(after_id):
        yield {"id": str(event.id), "event": event.kind, "data": json.dumps(event.as_json())}
