"""`tokenfleet fleet`: operates a running fleet through its control API."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from controlplane.errors import BadInput
from controlplane.figures import counted, duration_text
from dataplane.http.tls import client_context, distrust
from tokenfleet.cli.flags import ControlKey, Format, OutputFormat, TlsCa, Verbose
from tokenfleet.cli.terminal import answer

fleet_app = typer.Typer(add_completion=False, rich_markup_mode=None, help="Operate a running fleet.")

TIMEOUT_S = 10.0
SHOWN_DECISIONS = 15  # lines
SHOWN_PAIRS = 3
LOADS = ("tokens", "prefix_hits", "step", "preempted")  # of a worker, with --verbose
NO_ADDRESS = ("Not Found", "HTTP 404")  # of servers that do not know what was asked


@fleet_app.callback()
def fleet(
    context: typer.Context,
    control: Annotated[str, typer.Option(help="address of the control API")] = "http://127.0.0.1:8001",
    control_key: ControlKey = None,
    tls_ca: TlsCa = None,
    model: Annotated[str | None, typer.Option(help="model whose fleet is meant, in a portfolio")] = None,
) -> None:
    """Remember where the fleet's control API is."""
    if not control.startswith(("http://", "https://")):
        raise BadInput(f"--control: expected an address such as http://127.0.0.1:8001, got {control!r}")
    trust = client_context(tls_ca) if control.startswith("https://") else None
    prefix = "" if model is None else f"/models/{model}"
    context.obj = ControlClient(control.rstrip("/") + prefix, control_key, trust)


@fleet_app.command()
def status(context: typer.Context, verbose: Verbose = False, format: Format = OutputFormat.TABLE) -> None:
    """Show the fleet's health, SLO attainment, cost and workers.

    `--verbose` adds step times, prefix hits, KV transfers, gateways and the last decisions.
    """
    view = context.obj.ask("GET", "/v1/fleet")
    _show(view, format, lambda shown: status_lines(shown, verbose))


@fleet_app.command()
def scale(
    context: typer.Context,
    workers: str,
    kind: Annotated[str | None, typer.Option(help="worker type, in a mixed fleet")] = None,
    format: Format = OutputFormat.TABLE,
) -> None:
    """Set the number of workers; with `auto` the controller decides."""
    if workers != "auto" and not workers.isdigit():
        raise BadInput(f"scale: expected a number of workers or auto, got {workers!r}")
    order: dict[str, Any] = {"auto": True} if workers == "auto" else {"workers": int(workers)}
    if kind is not None:
        order["kind"] = kind
    reply = context.obj.ask("POST", "/v1/fleet/scale", order)
    mode = "autoscaling" if reply.get("auto") else "manual scaling"
    _show(reply, format, lambda r: [f"Desired: {_wanted(r)} ({mode})"])


@fleet_app.command()
def drain(
    context: typer.Context,
    worker: str,
    cancel: Annotated[bool, typer.Option("--cancel", help="let a draining worker serve again")] = False,
    format: Format = OutputFormat.TABLE,
) -> None:
    """Move everything off a worker, then stop it."""
    reply = context.obj.ask("DELETE" if cancel else "POST", f"/v1/workers/{worker}/drain")
    _show(reply, format, lambda r: [f"{r['worker']} is {r['state']}"])


@fleet_app.command()
def role(context: typer.Context, worker: str, role: str, format: Format = OutputFormat.TABLE) -> None:
    """Let a worker prefill, decode, or do both (any) while it serves.

    tokenfleet fleet role w2 decode
    """
    reply = context.obj.ask("POST", f"/v1/workers/{worker}/role", {"role": role})
    _show(reply, format, lambda r: [f"{r['worker']} has the role {r['role']}"])


@fleet_app.command()
def migrate(
    context: typer.Context,
    request: str,
    worker: Annotated[str | None, typer.Argument(help="target worker (default: the fleet chooses)")] = None,
    format: Format = OutputFormat.TABLE,
) -> None:
    """Move a running request, with its KV cache, to another worker."""
    order = {"request_id": request} | ({"target": worker} if worker else {})
    reply = context.obj.ask("POST", "/v1/migrations", order)
    _show(reply, format, lambda r: [f"migration {r['id']}: {r['request_id']} {r['source']} → {r['target']}"])


@fleet_app.command()
def explain(
    context: typer.Context,
    request: Annotated[
        str | None, typer.Argument(help="id of a request (default: all running requests)")
    ] = None,
    format: Format = OutputFormat.TABLE,
) -> None:
    """Explain where requests run and why the fleet has its size."""
    if request == "":
        raise BadInput("explain: expected a request's id, got none; `fleet explain` lists them")
    if request is None:
        reply, view = context.obj.ask("GET", "/v1/requests"), context.obj.ask("GET", "/v1/fleet")
        reply |= {"scaling": view["scaling"], "losses": view.get("losses", [])}
        size = f"Desired: {_wanted(view)} ({view['says']['scaling']})"
        _show(
            reply,
            format,
            lambda r: [
                size,
                *_change_line(r["scaling"]),
                *([_decisions_table(r["losses"], "Lost workers")] if r["losses"] else ()),
                *_scaling_tables(r["scaling"]),
                *_request_tables(r),
            ],
        )
    else:
        _show(context.obj.ask("GET", f"/v1/requests/{request}"), format, _explain_lines)


class ControlClient:
    """The control API as a function; every failure is one line."""

    def __init__(self, address: str, key: str | None, trust: ssl.SSLContext | None = None) -> None:
        self.address, self._key, self._trust = address, key, trust

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = TIMEOUT_S
    ) -> Any:
        """The reply's JSON. Raises BadInput with the API's own message, or why it could not be reached."""
        headers = {"content-type": "application/json"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        url = self.address + urllib.parse.quote(path)
        try:
            request = urllib.request.Request(url, data, headers, method=method)
            with urllib.request.urlopen(request, timeout=timeout_s, context=self._trust) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            message = _message(error)
            if message in NO_ADDRESS:
                raise BadInput(self._not_here()) from None
            raise BadInput(f"{self.address}: {message}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:  # or what answers is no control API
            reason = getattr(error, "reason", error)
            if (why := distrust(reason)) is not None:
                raise BadInput(f"--control: {self.address}: {why}") from None
            raise BadInput(
                f"--control: {self.address} does not answer ({reason});"
                " start a fleet with `tokenfleet serve`, or give its address"
            ) from None

    def _not_here(self) -> str:
        """The error for a server that answers but has no such address."""
        fleet, _, model = self.address.partition("/models/")
        if model:
            return f"--model: {fleet} is the control API of one fleet and no portfolio's; leave out --model"
        where = "`tokenfleet serve` prints its address as `control`"
        return f"--control: {self.address} is no control API of a fleet; {where}"


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"


def _show(reply: Any, format: OutputFormat, tables: Callable[[Any], Iterable[RenderableType]]) -> None:
    answer(format, json.dumps(reply, indent=2), lambda: tables(reply))


def _bare_table(named: Sequence[str], counted: Sequence[str]) -> Table:
    """A table without a box, which would not fit into 80 columns; counts are flush right."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (*named, *counted):
        table.add_column(name, no_wrap=True, justify="right" if name in counted else "left")
    return table


def _portfolio_lines(view: dict[str, Any], verbose: bool) -> Iterator[RenderableType]:
    """The models of a portfolio: the verdict, what each may have and has, and how its requests fare."""
    models = {one["name"]: one for one in view["models"]}
    names = dict.fromkeys(share["name"] for share in view["shares"])
    down = [name for name in names if name not in models]
    missing = [name for name, one in models.items() if _misses(one)]
    taken = ", ".join(
        f"{one['held']:g} of {one['most']:g} {one['name'].removeprefix('gpus.')}" for one in view["limits"]
    )
    health = ", ".join(
        [f"{name} does not answer" for name in down] + [f"{name} is missing its SLO" for name in missing]
    )
    yield " · ".join(filter(None, (counted(len(names), "model"), health or "healthy", taken)))
    yield _allocations(view, models)
    for name, one in models.items():
        yield f"{name}: {_lately(one['lately'], one['attainment_target'])}"
        if verbose:
            yield f"{name}: {_cost(one)}"
    for change in view["changes"][-SHOWN_DECISIONS:] if verbose else ():
        at = datetime.fromtimestamp(change["at_s"]).astimezone()
        yield f"{at:%H:%M:%S}  {change['model']}: allocation {change['before']} → {change['share']}"


def _allocations(view: dict[str, Any], models: dict[str, Any]) -> Table:
    """The workers that each model may have and has; what runs and waits, of those that answer."""
    columns = ("workers", "allocation", "quota", "desired", "needed", "running", "waiting")
    table = _bare_table(("model", "GPU"), columns)
    for share in view["shares"]:
        counts = [share[name] for name in ("held", "share", "right", "asked", "needed")]
        gpu = ", ".join(filter(None, (f"{share['gpus_per_worker']} {share['gpu']}", share.get("zone"))))
        load = models[share["name"]]["requests"] if share["name"] in models else {}
        table.add_row(share["name"], gpu, *map(str, counts), *(str(load.get(k, "–")) for k in columns[-2:]))
    return table


def _workers_table(view: dict[str, Any], verbose: bool) -> Table:
    """The fleet's own table; its types and hosts where they differ."""
    names, rows = view["says"]["columns"], view["says"]["workers"]
    hosts = {row["host"] for row in rows if "host" in row}
    differ = [("kind", len(view["wanted_kinds"]) > 1), ("host", len(hosts) > 1)]
    left = ["worker", *(name for name, differs in differ if differs), "state"]
    right = ["for_s", "running", "waiting", "kv", *(LOADS if verbose else ())]
    table = _bare_table([names[name] for name in left], [names[name] for name in right])
    for row in rows:
        table.add_row(*(row.get(name, "–") for name in (*left, *right)))
    return table


def status_lines(view: dict[str, Any], verbose: bool) -> Iterator[RenderableType]:
    """The fleet for a terminal: health and size, the last minutes, the last day's cost, then its workers.

    `verbose`: step times, KV transfers, gateways and decisions too.
    """
    if "models" in view:
        yield from _portfolio_lines(view, verbose)
        return
    counts, serving = view["requests"], _serving(view)
    yield (
        f"{view['name']} · {_health(view)} · {len(serving)} of {_wanted(view)} ({view['says']['scaling']})"
        f" · {counts['running']} running, {counts['waiting']} waiting"
    )
    if floor := view["says"]["floor"]:
        yield floor
    yield _lately(view["lately"], view["attainment_target"])
    yield _cost(view)
    yield from _proposed(view, verbose)
    yield from _class_lines(view)
    if view["workers"]:
        yield _workers_table(view, verbose)
    update = view.get("update")
    if update is not None and (verbose or update["state"] != "done"):
        cause = f": {update['cause']}" if update["cause"] else ""
        replaced = counted(update["replaced"], "worker")
        yield f"{update['what'].capitalize()}: {update['state']}, {replaced} replaced{cause}"
    for kind, why in view["placement"]["unmeasured"].items():
        yield f"No step times of {kind}: {why}"
    if verbose:
        yield from _details(view)


def _serving(view: dict[str, Any]) -> list[dict[str, Any]]:
    return [w for w in view["workers"] if w["state"] == "serving" and not w.get("silent")]


def _health(view: dict[str, Any]) -> str:
    """The fleet's state in a word or two: of its workers first, then of its SLO."""
    serving, states = len(_serving(view)), [w["state"] for w in view["workers"]]
    if any(w.get("silent") for w in view["workers"]):
        return "degraded" if serving else "down"
    if not serving:
        return "starting" if "starting" in states else "down" if view["wanted_workers"] else "no workers"
    if serving < view["wanted_workers"]:
        return "scaling up" if "starting" in states else "degraded"
    return "missing its SLO" if _misses(view) else "healthy"


def _misses(view: dict[str, Any]) -> bool:
    """Whether the last minutes' SLO attainment is below the target."""
    both = view["lately"]["attainment"]["both"]
    return bool(both["of"] and both["met"] < view["attainment_target"] * both["of"])


def _lately(lately: dict[str, Any], target: float) -> str:
    """The outcome of the last minutes' requests."""
    both, told = lately["attainment"]["both"], []
    if both["of"]:
        told.append(f"{_percent(both['met'] / both['of'])} in SLO (target {_percent(target)})")
    told += [f"{lately['finished']:,} done", f"{lately['failed']:,} failed"]
    if lately["rejected"]:
        told.append(f"{lately['rejected']:,} rejected")
    told.append(f"{lately['tokens_per_s']:,.0f} tok/s")
    for name in ("TTFT", "TPOT"):
        if times := lately[f"{name.lower()}_s"]:
            told.append(f"{name} p90 {duration_text(times['p90'])}")
    return f"Last {duration_text(round(lately['over_s']))}: {', '.join(told)}"


def _cost(view: dict[str, Any]) -> str:
    """The last finished day's cost over the hindsight optimum, or why it is not known."""
    line, day = str(view["gap"]["line"]), view["gap"]["day"]
    if day is None:
        return f"Cost over the hindsight optimum: {line}"
    yesterday = (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%d")
    return line.replace(f"{yesterday} (UTC", "Yesterday (UTC", 1)


def _proposed(view: dict[str, Any], verbose: bool) -> Iterator[str]:
    """The changes of the fleet's last re-plan; a plan that changes nothing is a detail."""
    proposal = view.get("proposal")
    if proposal is not None and (verbose or proposal["state"] not in ("none", "same")):
        yield f"Proposed: {proposal['line']}"


def _class_lines(view: dict[str, Any]) -> Iterator[str]:
    for one in view.get("classes", ()):
        within = "no requests yet"
        if one["of"]:
            within = f"{_percent(one['met'] / one['of'])} of {one['of']:,} requests in SLO"
        limits = f"TTFT {duration_text(one['ttft_s'])}, TPOT {duration_text(one['tpot_s'])}"
        yield f"Class {one['name']}: {within} (target {_percent(one['target'])} within {limits})"


def _percent(share: float) -> str:
    """A share with two digits, fewer where they are zeros: 99.48 %, 99 %."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + " %"


def _details(view: dict[str, Any]) -> Iterator[RenderableType]:
    """The details: placement, step times, prefix hits, gateways, KV transfers, decisions."""
    placed, slo = view["placement"], view["slo"]
    targets = f"TTFT {duration_text(slo['ttft_s'])}, TPOT {duration_text(slo['tpot_s'])}"
    if placed["by"] == "targets":
        yield f"Placement: {placed['policy']}, for {targets}"
    else:
        why = "" if placed["step_times_known"] else ", since the workers' step times are not known"
        yield f"Placement: {placed['policy']}, by load alone{why}; {targets} are measured only"
    for times in view["step_times"]:
        since = f"{datetime.fromtimestamp(times['since_s']).astimezone():%H:%M:%S}"
        off = f"recent error {_percent(times['refit_error'])}" if times["steps"] else "no step served yet"
        source = times["source"].partition(";")[0].partition(": ")[0]
        yield f"Step times of {times['variant']}: in use since {since}, {off}; source: {source}"
    if hits := view["says"]["prefix_hits"]:
        yield hits
    yield from _transfers(view)
    for move in view["says"]["moving"]:
        yield f"Moving: {move}"
    if gateways := view.get("gateways"):
        loads = (f"{g['gateway']} {g['state']}, {counted(g['requests'], 'request')}" for g in gateways)
        yield f"Gateways: {'; '.join(loads)}"
    if view["decisions"]:
        yield _decisions_table(view["decisions"])


def _transfers(view: dict[str, Any]) -> Iterator[str]:
    """The paths and speed of KV transfers, and the requests that cannot be migrated."""
    shown = view["transport"]
    if shown["moves"]:
        ways = ", ".join(f"{way} ({size / 1e6:.0f} MB)" for way, size in shown["ways"].items())
        pairs = [
            f"{p['source']} → {p['target']} {_pace(p['bytes_per_s'])}"
            for p in sorted(shown["pairs"], key=lambda pair: pair["bytes_per_s"])[:SHOWN_PAIRS]
        ]
        slowest = f"; slowest: {', '.join(pairs)}" if len(shown["pairs"]) > 1 else ""
        yield (
            f"KV transfers: by {ways or 'emulation'}, {_pace(shown['bytes_per_s'])}, pause"
            f" {duration_text(shown['pause_s'])} in {counted(shown['moves'], 'migration')}{slowest}"
        )
    for why, requests in view["fixed"].items():
        yield f"Not migrated: {counted(requests, 'request')}, {why}"
    for why in {w["fixed"] for w in view["workers"] if w.get("fixed")}:
        yield f"No request is migrated here: {why}"


def _pace(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.2g} MB/s"


def _wanted(view: dict[str, Any]) -> str:
    """The number of workers desired, by type where there are several."""
    kinds, workers = view.get("wanted_kinds") or {}, counted(view["wanted_workers"], "worker")
    parts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{workers}: {parts}" if len(kinds) > 1 else workers


def _decisions_table(decisions: list[dict[str, Any]], title: str = "Last decisions") -> Table:
    """Decisions, the latest last; like ones of several requests in a row share a line."""
    table = Table(title=title, title_justify="left")
    table.add_column("time", no_wrap=True)
    for name in ("decision", "request, worker", "reason"):
        table.add_column(name, overflow="fold")
    runs = groupby(decisions, lambda d: (d["kind"], d.get("worker") or "", d["reason"]))
    alike = [(what, list(members)) for what, members in runs]
    for (kind, worker, reason), members in alike[-SHOWN_DECISIONS:]:
        requests = [d["request_id"] for d in members if d.get("request_id")]
        whom = requests[0] if len(requests) == 1 else f"{len(requests)} requests" if requests else ""
        if "workers" in (last := members[-1]):
            whom = f"{members[0]['before']} → {last['workers']}" if "before" in last else f"{last['workers']}"
        at = datetime.fromtimestamp(members[0]["at_s"]).astimezone()
        table.add_row(f"{at:%H:%M:%S}", kind, f"{whom} {worker}".strip(), reason)
    return table


def _change_line(decisions: list[dict[str, Any]]) -> Iterator[str]:
    """The last change point of the request rate that changed the fleet's size, and what it did."""
    for decision in reversed(decisions):
        seen = decision.get("seen") or {}
        if "before_rps" not in seen or "before" not in decision:
            continue
        rates = f"{seen['before_rps']:.3g} to {seen['rate_rps']:.3g} req/s"
        workers = f"{decision['before']} → {counted(decision['workers'], 'worker')}"
        yield f"Last change point: {rates}; {duration_text(seen['changed_s_ago'])} later {workers}"
        return


def _scaling_tables(decisions: list[dict[str, Any]]) -> list[Any]:
    """The last changes of the fleet's size: what was seen, compared and chosen, and what it costs."""
    if not decisions:
        return ["The desired number of workers has not changed."]
    table = Table(title="Scaling decisions", title_justify="left")
    for name in ("decision", "reason", "figures"):
        table.add_column(name, overflow="fold")
    for decision in decisions:
        table.add_row(decision["kind"], decision["reason"], "\n".join(decision["says"]))
    return [table]


def _request_tables(reply: dict[str, Any]) -> list[Any]:
    if not reply["requests"]:
        return ["No request is running."]
    # Without a box, and the names whole: they are what `migrate` and `explain` take.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("request", overflow="fold")
    for name in ("state", "worker", "prompt", "output", "age", "TTFT", "TPOT", "moves"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("state", "worker") else "right")
    for r in reply["requests"]:
        table.add_row(
            r["request_id"],
            r["state"] if r["priority"] == "normal" else f"{r['state']}, {r['priority']}",
            r["worker"] or "–",
            str(r["prompt_tokens"]),
            str(r["output_tokens"]),
            duration_text(r["age_s"]),
            "–" if r["ttft_s"] is None else duration_text(r["ttft_s"]),
            "–" if r["tpot_s"] is None else duration_text(r["tpot_s"]),
            str(r["moves"]),
        )
    return [table]


def _explain_lines(reply: dict[str, Any]) -> list[RenderableType]:
    running, told = reply["request"], reply["decisions"]
    decisions = [_decisions_table(told)] if told else ["No decision about it is recorded."]
    if not running:
        return ["The request is no longer running.", *decisions]
    at = f"on {running['worker']}" if running["worker"] else "on no worker yet"
    head = f"{running['request_id']} is {running['state']} {at}"
    return [head, *_request_tables({"requests": [running]}), *decisions]
