"""The live data plane: vLLM engines in Ray actors behind one OpenAI endpoint, with live migration.

Parts
-----
`FleetCore` (gateway/fleet_core.py) stands below vLLM's own `AsyncLLM` front end and above the engines. It
reaches an engine only through an `EngineLink` (engine_api/link.py), which has two implementations:

- `WorkerLink` (worker/link.py): a ZMQ DEALER to the ROUTER of a `Worker` (worker/actor.py), the Ray actor
  that holds a vLLM EngineCore. Frames are in engine_api/wire.py. Several gateways may link to one worker.
- `EmulatedEngine` (emulated/engine.py): the same semantics in process, step times from a Profile.

With several gateways, `FleetCore` stands in one process and vLLM's front ends in others, each above a
`RemoteCore` (gateways/remote_core.py) that speaks to `CoreServer` (gateways/core_server.py), which reads
FleetCore's outputs. When the core dies, the supervisor (control/supervisor.py) starts another, which
adopts workers (`Host.adopt`) and gateways, and takes requests over from these (`FleetCore.resume`).

Segments
--------
A *segment* is a request's stay on one worker. Its id is the `request_id` the engine sees and is unique in
the fleet's life: `rid` for the first stay, `rid#1`, `rid#2` … for later ones. Outputs carry segment ids;
FleetCore maps them back, and drops outputs of segments it no longer listens to. Ids that begin with
`LOADER_PREFIX` belong to moves: FleetCore hands their outputs to `Migrations.claim`.

Every segment is built by `segment.segment_request(request, output_token_ids, segment_id, transfer)`: the
first stay (no outputs yet), a continuation after a move (with a `Transfer`), and a replay after a worker
died.

FleetCore's duties in a move (`MovableFleet` in migration/move.py)
-------------------------------------------------------------------------
`running(request)` gives a request's present segment, worker and live token list, or None once it is over.
`cut_over(request, target, transfer)` switches the client's stream: stop listening to the old segment, send
the continuation to the target, then abort the old segment at the source. It does not wait for the source:
late tokens are dropped, and a hold keeps the old KV. It returns a future: True at the first token of the
new segment, False if that segment ended in an error or its worker was lost first. FleetCore must then
replay the request itself (`finish_reason=ERROR` of a segment is never the client's error while its tokens
can be replayed). A request that ends before its first token (client gone) also resolves the future: False.

A request waits, runs, or has ended; `Migrations.migrate` moves waiting ones without KV.

FleetCore's calls of the coordinator
------------------------------------
`Migrations(fleet, budget)` is made by FleetCore as its `migrations`; its `engines.claim(output)` takes
every output whose id begins with `LOADER_PREFIX`. `FleetCore.obstacle_to_replay(tracked)`
names what could not continue exactly on another worker by recomputing (a grammar that would restart in
mid-output), or None. A request with such an obstacle ends in an explicit error instead of a replay.
`await Migrations.migrate(request, target)` returns an outcome that says whether it moved and, if not, why;
drains and the control API call it.
"""
