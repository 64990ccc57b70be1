"""Workers, requests, moves and bounds as the control API shows them, and sentences on the fleet: JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from controlplane.figures import bytes_text, duration_text
from controlplane.migration.evacuation import MOVE, REPLAY, STAY, Order
from controlplane.scaler.bounds import Autoscale, ClockFloor
from controlplane.snapshot import Pace
from controlplane.types import Role
from dataplane.live.gateway.connections import Attached
from dataplane.live.gateway.metrics import PRIORITY_NAMES
from dataplane.live.ledger.request import Tracked
from dataplane.live.migration.move import MoveRecord
from dataplane.live.pool.member import Member

# The columns of the fleet's table of workers.
COLUMNS = {
    "worker": "worker",
    "kind": "type",
    "host": "host",
    "state": "state",
    "for_s": "for",
    "running": "running",
    "waiting": "waiting",
    "kv": "KV in use",
    "tokens": "tokens",
    "prefix_hits": "prefix hits",
    "step": "step",
    "preempted": "preempted",
}
NO_BOUNDS = "Autoscaling is not available. Start the fleet with --autoscale MIN..MAX to allow it."


def plan_view(plan: Sequence[Order]) -> dict[str, int]:
    """Of an evacuation's plan how many requests are to go in which way."""
    return {how: sum(order.how == how for order in plan) for how in (MOVE, REPLAY, STAY)}


def bounds_view(scale: Autoscale, unix_s: float, cold_start_s: float) -> dict[str, Any]:
    """The bounds within which the controller may decide."""
    return {
        "min_workers": scale.low,
        "floor": None if scale.floor is None else _floor_view(scale, scale.floor, unix_s, cold_start_s),
        "max_workers": scale.high,
        "max_gpus": scale.max_gpus,
        "budget_usd_per_h": scale.budget_usd_per_h,
    }


def _floor_view(scale: Autoscale, floor: ClockFloor, unix_s: float, cold_start_s: float) -> dict[str, Any]:
    """The fewest workers now and why, until when, and how many from then on; null where it never changes."""
    until_s, then = scale.next_fewest(unix_s, cold_start_s) or (None, None)
    return {
        "workers": scale.fewest(unix_s, cold_start_s),
        "why": f"the plan's schedule by {floor.clock} (UTC), each rise a cold start early",
        "until_unix_s": None if until_s is None else round(until_s, 3),
        "then_workers": then,
    }


def worker_view(member: Member, role: Role, at: Attached | None, here: list[Tracked]) -> dict[str, Any]:
    """A worker with its engine, where one is attached, and its load."""
    view: dict[str, Any] = {
        "worker": member.worker,
        "kind": member.kind,
        "role": role,
        "state": member.state,
        "reason": member.reason,
        "revision": member.revision,
        "for_s": round(time.monotonic() - member.since_s, 3),
        "requests": len(here),
        "tokens": sum(t.context_tokens for t in here),
    }
    if at is not None:
        info = at.link.info
        view |= {
            "pid": info.pid,
            "engine": info.engine,
            "host": urlsplit(info.endpoint).hostname,
            "silent": at.is_silent,
            "tp_degree": info.tp_degree,
            "max_seqs": info.max_seqs,
            "block_tokens": info.block_tokens,
            "kv_blocks": info.kv_blocks,
            "kv_bytes_per_token": info.kv_bytes_per_token,
            "fixed": info.why_fixed or None,
        }
        view["telemetry"] = None if at.telemetry is None else asdict(replace(at.telemetry, executed=()))
    return view


def request_view(tracked: Tracked, now_s: float) -> dict[str, Any]:
    """A request and how far it is."""
    params = tracked.request.sampling_params
    return {
        "request_id": tracked.id,
        "x_request_id": tracked.ticket.id,
        "key": tracked.ticket.key,
        "priority": PRIORITY_NAMES[tracked.ticket.priority],
        "state": tracked.state,
        "worker": tracked.worker,
        "prompt_tokens": tracked.prompt_tokens,
        "output_tokens": len(tracked.output_token_ids),
        "expected_tokens": tracked.predicted_tokens,
        "max_tokens": None if params is None else params.max_tokens,
        "age_s": round(now_s - tracked.arrival_s, 4),
        "ttft_s": tracked.ttft_s(),
        "tpot_s": tracked.tpot_s(),
        "slo": {"ttft_s": tracked.slo.ttft_s, "tpot_s": tracked.slo.tpot_s},
        "moves": tracked.moves,
        "replays": tracked.replays,
    }


def pace_view(pace: Pace) -> dict[str, Any]:
    """How fast KV moves."""
    return {
        "bytes_per_s": round(pace.bytes_per_s, 1),
        "pause_s": round(pace.pause_s, 6),
        "moves": pace.moves,
    }


def move_view(move: MoveRecord) -> dict[str, Any]:
    """A move, open or over."""
    return {
        "id": move.id,
        "request_id": move.request,
        "source": move.source,
        "target": move.target,
        "mode": move.mode,
        "outcome": move.outcome,
        "open": move.finished_s is None,
        "why": move.why,
        "reason": move.reason,
        "stages_tokens": list(move.stages),
        "cached_tokens": move.cached_tokens,
        "tail_tokens": move.tail_tokens,
        "bytes": move.bytes,
        "downtime_s": move.downtime_s,
        "started_s": move.started_s,
        "finished_s": move.finished_s,
    }


def fleet_words(view: dict[str, Any]) -> dict[str, Any]:
    """Scaling, prefix hits, workers and moves in words; empty where there is none."""
    scale = view["autoscale"]
    floor = scale["floor"] if scale is not None and view["auto"] else None
    return {
        "scaling": _scaling(view, (scale or {}) if view["auto"] else {}),
        "bounds": NO_BOUNDS if scale is None else _bounds(scale, view["auto"]),
        "floor": "" if floor is None else _floor(floor),
        "prefix_hits": _prefix_hits(view["workers"]),
        "columns": COLUMNS,
        "workers": [_worker_words(worker) for worker in view["workers"]],
        "moving": [_move_words(move) for move in view["moving"]],
    }


def _worker_words(worker: dict[str, Any]) -> dict[str, str]:
    """The texts of a worker below COLUMNS, and `…_note`: more on one of them, where there is room."""
    load = worker.get("telemetry")
    words = {
        "worker": worker["worker"],
        "state": "unresponsive" if worker.get("silent") else worker["state"],
        "state_note": f"{duration_text(worker['for_s'])}: {worker['reason']}",
        "for_s": duration_text(worker["for_s"]),
        "running": f"{worker['requests'] if load is None else load['running']:,}",
        "tokens": f"{worker['tokens']:,}",
        "kv_note": "no step yet",
    } | {name: worker[name] for name in ("kind", "host") if worker.get(name)}
    if load is not None:
        used, blocks = load["kv_used_blocks"], max(1, load["kv_total_blocks"])
        words["kv"] = f"{100 * used / blocks:.0f} %"
        words["kv_note"] = f"{words['kv']} of {blocks * (worker.get('block_tokens') or 1):,} tokens"
        words["waiting"], words["preempted"] = f"{load['waiting']:,}", f"{load['preemptions']:,}"
        words["step"] = duration_text(load["step_s"])
    told = worker.get("prefix_tokens") or {}
    if queried := told.get("queried"):
        names = ("hit", "loaded", "expected", "ideal")
        hit, loaded, expected, ideal = (f"{100 * told[name] / queried:.0f} %" for name in names)
        host = f", {loaded} from host" if told["loaded"] else ""
        words["prefix_hits"] = hit + host + (f", predicted {expected}" if expected != hit else "")
        words["prefix_hits_note"] = (
            f"of {queried:,} prompt tokens; an unlimited cache shared by all workers would reach {ideal}"
        )
    return words


def _move_words(move: dict[str, Any]) -> str:
    """A move, how far it is and why it is made."""
    parts = [f"request {move['request_id']}", move["mode"], move["outcome"]]
    if copied := sum(move["stages_tokens"]):
        parts.append(f"{copied - move['cached_tokens']:,} tokens copied so far")
    if move["bytes"]:
        parts.append(bytes_text(move["bytes"]))
    why = f"; {move['why']}" if move["why"] else ""
    return f"{move['source'] or 'the queue'} → {move['target']}: {', '.join(parts)}{why}"


def _scaling(view: dict[str, Any], scale: dict[str, Any]) -> str:
    """Who decides the number of workers, within which limits."""
    parts = ["autoscaling" if view["auto"] else "manual scaling"]
    if view["advisory"]:
        parts.append("decisions are advice only")
    parts.append(_range(scale) if scale else f"max {view['max_workers']}")
    if (budget := scale.get("budget_usd_per_h")) is not None:
        parts.append(f"max ${budget:g}/h")
    return ", ".join(parts)


def _range(scale: dict[str, Any]) -> str:
    low, high = scale["min_workers"], scale["max_workers"]
    return f"{low} to {high}" if low != high else f"always {high}"


def _bounds(scale: dict[str, Any], is_on: bool) -> str:
    keeps = "Autoscaling keeps" if is_on else "Autoscaling is off. It would keep"
    return f"{keeps} {_range(scale)} worker{'' if scale['max_workers'] == 1 else 's'}."


def _floor(floor: dict[str, Any]) -> str:
    """The fewest workers that the autoscaler keeps now, why and until when."""
    until, workers = "", floor["workers"]
    if floor["until_unix_s"] is not None:
        at = datetime.fromtimestamp(floor["until_unix_s"], UTC)
        day = "" if at.date() == datetime.now(UTC).date() else f"{at:%A} "
        until = f" until {day}{at:%H:%M} UTC, then {floor['then_workers']}"
    return f"Floor: at least {workers} worker{'' if workers == 1 else 's'}{until} ({floor['why']})"


def _prefix_hits(workers: Sequence[dict[str, Any]]) -> str:
    """The prefix hit rate of the fleet's workers, and that of an unlimited cache shared by all of them."""
    told = [w["prefix_tokens"] for w in workers if w.get("prefix_tokens")]
    queried, hit, ideal = (sum(tokens[name] for tokens in told) for name in ("queried", "hit", "ideal"))
    if not queried:
        return ""
    return (
        f"Prefix hit rate: {100 * hit / queried:.1f} % of {queried:,} prompt tokens;"
        f" an unlimited cache shared by all workers would reach {100 * ideal / queried:.1f} %"
    )
