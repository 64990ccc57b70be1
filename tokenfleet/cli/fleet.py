"""`tokenfleet fleet`: operates a running fleet through its control API."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from controlplane.errors import BadInput
from dataplane.http.tls import client_context, distrust
from tokenfleet.cli.flags import Format, OutputFormat, TlsCa
from tokenfleet.texts import duration_text

fleet_app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, help="Operate a running fleet."
)

TIMEOUT_S = 10.0
SHOWN_DECISIONS = 15  # lines
SHOWN_PAIRS = 3
NO_ADDRESS = ("Not Found", "HTTP 404")  # of servers that do not know what was asked


@fleet_app.callback()
def fleet(
    context: typer.Context,
    control: Annotated[str, typer.Option(help="address of the control API")] = "http://127.0.0.1:8001",
    control_key: Annotated[
        str | None, typer.Option(envvar="TOKENFLEET_CONTROL_KEY", help="key of the control API")
    ] = None,
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
def status(context: typer.Context, format: Format = OutputFormat.TABLE) -> None:
    """Show workers, their load, moves and the last decisions."""
    view = context.obj.ask("GET", "/v1/fleet")
    _show(view, format, _status_tables)


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
    mode = "decided by the controller" if reply.get("auto") else "fixed"
    _show(reply, format, lambda r: [f"workers wanted: {_wanted(r)} ({mode})"])


@fleet_app.command()
def drain(
    context: typer.Context,
    worker: str,
    cancel: Annotated[bool, typer.Option("--cancel", help="let a draining worker serve again")] = False,
    format: Format = OutputFormat.TABLE,
) -> None:
    """Move everything off a worker, then stop it."""
    reply = context.obj.ask("DELETE" if cancel else "POST", f"/v1/workers/{worker}/drain")
    _show(reply, format, lambda r: [f"{r['worker']}: {r['state']}"])


@fleet_app.command()
def role(context: typer.Context, worker: str, role: str, format: Format = OutputFormat.TABLE) -> None:
    """Let a worker prefill, decode, or do both (any) while it serves.

    tokenfleet fleet role w2 decode
    """
    reply = context.obj.ask("POST", f"/v1/workers/{worker}/role", {"role": role})
    _show(reply, format, lambda r: [f"{r['worker']}: {r['role']}"])


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
        reply = context.obj.ask("GET", "/v1/requests")
        reply["scaling"] = context.obj.ask("GET", "/v1/fleet")["scaling"]
        _show(reply, format, lambda r: [*_request_tables(r), *_scaling_tables(r["scaling"])])
    else:
        _show(context.obj.ask("GET", f"/v1/requests/{request}"), format, _explain_tables)


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
            raise BadInput(f"--control: {self.address} does not answer ({reason})") from None

    def _not_here(self) -> str:
        """What to say where a server answers that has no such address."""
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


def _show(reply: Any, format: OutputFormat, tables: Any) -> None:
    if format == OutputFormat.JSON:
        print(json.dumps(reply, indent=2))
        return
    console = Console()
    for part in tables(reply):
        console.print(part, highlight=False)


def _cached_line(workers: Sequence[dict[str, Any]]) -> list[str]:
    """What the fleet's workers had cached of their prompts, beside what one cache of all would have had."""
    told = [w["prefix_tokens"] for w in workers if w.get("prefix_tokens")]
    queried, hit, ideal = (sum(tokens[name] for tokens in told) for name in ("queried", "hit", "ideal"))
    if not queried:
        return []
    return [
        f"cached: {hit / queried:.1%} of {queried:,} prompt tokens,"
        f" {ideal / queried:.1%} if all workers had one cache with room for everything"
    ]


def _cached_text(tokens: dict[str, int] | None) -> str:
    """The share of prompt tokens that a worker had, from host memory, and the expected one if it differs."""
    if not tokens or not tokens["queried"]:
        return "–"
    shares = {name: f"{tokens[name] / tokens['queried']:.0%}" for name in ("hit", "loaded", "expected")}
    host = f", {shares['loaded']} host" if tokens["loaded"] else ""
    return shares["hit"] + host + (f" ({shares['expected']})" if shares["hit"] != shares["expected"] else "")


def _bare_table(named: Sequence[str], counted: Sequence[str], title: str | None = None) -> Table:
    """A table without a box, which would not fit into 80 columns; counts are flush right."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for name in (*named, *counted):
        table.add_column(name, no_wrap=True, justify="right" if name in counted else "left")
    return table


def _portfolio_tables(view: dict[str, Any]) -> list[Any]:
    """The models of a portfolio: what each may have, asks for and has, and how its requests fare."""
    counted = ("workers", "share", "right", "asks for", "needs", "running", "waiting")
    table = _bare_table(("model", "GPU"), counted)
    models = {one["name"]: one for one in view["models"]}
    lines: list[Any] = []
    for share in view["shares"]:
        counts = [share[name] for name in ("held", "share", "right", "asked", "needed")]
        gpu = ", ".join(filter(None, (f"{share['gpus_per_worker']} {share['gpu']}", share.get("zone"))))
        if (one := models.get(share["name"])) is None:
            table.add_row(share["name"], gpu, *map(str, counts), "–", "–")
            lines.append(f"{share['name']}: its fleet does not answer")
            continue
        requests = [one["requests"][name] for name in ("running", "waiting")]
        table.add_row(share["name"], gpu, *map(str, counts + requests))
        lines.append(f"{share['name']}: {_lately(one['lately'], one['attainment_target'])}")
        lines.append(f"{share['name']}: {_gap(one)}")
    limits = ", ".join(f"{one['name']} {one['held']:g} of {one['most']:g}" for one in view["limits"])
    told = [f"taken: {limits}"] if limits else []
    for change in view["changes"][-SHOWN_DECISIONS:]:
        at = datetime.fromtimestamp(change["at_s"]).astimezone()
        told.append(f"{at:%H:%M:%S}  {change['model']}: share {change['before']} → {change['share']}")
    return [table, *lines, *told]


def _workers_table(view: dict[str, Any]) -> Table:
    hosts = {w["host"] for w in view["workers"] if w.get("host")}
    named = [("kind", len(view["wanted_kinds"]) > 1), ("host", len(hosts) > 1)]
    told = [name for name, differs in named if differs]
    counted = ("for", "requests", "tokens", "KV used", "cached", "step", "preempted")
    workers = _bare_table(("worker", *told, "state"), counted, f"{view['model']} ({view['engine']})")
    for w in view["workers"]:
        load = w.get("telemetry") or {}
        kv = f"{load['kv_used_blocks'] / max(1, load['kv_total_blocks']):.0%}" if load else "–"
        workers.add_row(
            w["worker"],
            *(w.get(name) or "–" for name in told),
            "silent" if w.get("silent") else w["state"],
            duration_text(w["for_s"]),
            str(w["requests"]),
            str(w["tokens"]),
            kv,
            _cached_text(w.get("prefix_tokens")),
            duration_text(load["step_s"]) if load else "–",
            str(load.get("preemptions", "–")),
        )
    return workers


def _status_tables(view: dict[str, Any]) -> list[Any]:
    if "models" in view:
        return _portfolio_tables(view)
    mode = f"auto{_budget(view)}" if view["auto"] else "fixed"
    advice = ", advisory: decisions are only said" if view["advisory"] else ""
    counts = view["requests"]
    parts: list[Any] = [
        _workers_table(view),
        *_placement_lines(view),
        *_cached_line(view["workers"]),
        f"wanted {_wanted(view)} of at most {view['max_workers']} ({mode}{advice}); "
        f"{counts['running']} running, {counts['waiting']} waiting, {len(view['moving'])} moving",
    ]
    if gateways := view.get("gateways"):
        loads = (f"{g['gateway']} {g['requests']} requests ({g['state']})" for g in gateways)
        parts.append(f"gateways: {', '.join(loads)}")
    parts += [_lately(view["lately"], view["attainment_target"]), _gap(view)]
    parts += _transport(view["transport"])
    parts += [f"not moved, {requests}: {why}" for why, requests in view["fixed"].items()]
    for why in {w["fixed"] for w in view["workers"] if w.get("fixed")}:
        parts.append(f"no request is moved here: {why}")
    parts += _update(view)
    if view["decisions"]:
        parts.append(_decisions_table(view["decisions"]))
    return parts


def _lately(lately: dict[str, Any], target: float) -> str:
    """What has come of the requests of the last minutes, in two lines."""
    ttft, tpot, both = (lately["ttft_s"] or {}, lately["tpot_s"] or {}, lately["attainment"]["both"])
    within = ""
    if both["of"]:
        within = f" {both['met'] / both['of']:.2%} within both targets ({target:.2%} is asked),"
    latencies = "; ".join(
        f"{name} p50 {duration_text(times['p50'])}, p90 {duration_text(times['p90'])}"
        for name, times in (("TTFT", ttft), ("TPOT", tpot))
        if times
    )
    return (
        f"last {duration_text(lately['over_s'])}: {lately['finished']} finished,{within}"
        f" {lately['failed']} failed, {lately['rejected']} rejected, "
        f"{lately['tokens_per_s']:.0f} tokens/s" + (f"; {latencies}" if latencies else "")
    )


def _gap(view: dict[str, Any]) -> str:
    """The last finished day's cost over the cheapest that serves the same, or why it is not known."""
    return escape(f"cost over the cheapest: {view['gap']['line']}")


def _transport(shown: dict[str, Any]) -> list[str]:
    """The ways that KV has taken, and the pace that moves have shown: of all, and of each pair of workers."""
    if not shown["moves"]:
        return []
    ways = ", ".join(f"{way} ({size / 1e6:.0f} MB)" for way, size in shown["ways"].items())
    pairs = [
        f"{p['source']} → {p['target']} {_pace(p['bytes_per_s'])}"
        for p in sorted(shown["pairs"], key=lambda pair: pair["bytes_per_s"])[:SHOWN_PAIRS]
    ]
    slowest = f"; slowest: {', '.join(pairs)}" if len(shown["pairs"]) > 1 else ""
    return [
        f"KV by {ways or 'no engine (emulated)'}: {_pace(shown['bytes_per_s'])}, pause"
        f" {duration_text(shown['pause_s'])} in {_counted(shown['moves'], 'move')}{slowest}"
    ]


def _pace(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.2g} MB/s"


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _placement_lines(view: dict[str, Any]) -> list[str]:
    """By what requests are placed, and for each kind: which step times, since when, and how far off."""
    placed, slo = view["placement"], view["slo"]
    targets = f"TTFT {duration_text(slo['ttft_s'])}, TPOT {duration_text(slo['tpot_s'])}"
    if placed["by"] == "targets":
        lines = [f"placed by {placed['policy']} within {targets}"]
    else:
        why = "" if placed["step_times_known"] else ": step times of its workers are not known"
        lines = [f"placed by load ({placed['policy']}){why}; {targets} are only judged"]
    for one in view.get("classes", ()):
        within = f"{one['met'] / one['of']:.2%} of {one['of']:,}" if one["of"] else "none yet"
        targets = f"TTFT {duration_text(one['ttft_s'])}, TPOT {duration_text(one['tpot_s'])}"
        lines.append(f"class {one['name']}: {within} within {targets}, asked {one['target']:.2%}")
    for times in view["step_times"]:
        since = f"{datetime.fromtimestamp(times['since_s']).astimezone():%H:%M:%S}"
        off = f"off by {times['refit_error']:.1%} of late" if times["steps"] else "no step served yet"
        lines.append(f"step times of {times['variant']} since {since}, {off}; {times['source']}")
    lines += [f"{kind} could not be measured: {why}" for kind, why in placed["unmeasured"].items()]
    return lines


def _budget(view: dict[str, Any]) -> str:
    """What the controller may spend an hour, where that is bounded."""
    budget = (view.get("autoscale") or {}).get("budget_usd_per_h")
    return "" if budget is None else f", at most ${budget:g}/h"


def _update(view: dict[str, Any]) -> list[str]:
    """The last update or restart, and where it stands."""
    update = view.get("update")
    if update is None:
        return []
    cause = f": {update['cause']}" if update["cause"] else ""
    return [f"{update['what']}: {update['state']}, {_counted(update['replaced'], 'worker')} replaced{cause}"]


def _wanted(view: dict[str, Any]) -> str:
    """The number of workers wanted, by kind where there are several."""
    kinds = view.get("wanted_kinds") or {}
    parts = ", ".join(f"{workers} {kind}" for kind, workers in kinds.items())
    return f"{view['wanted_workers']} ({parts})" if len(kinds) > 1 else str(view["wanted_workers"])


def _decisions_table(decisions: list[dict[str, Any]]) -> Table:
    """Decisions, the latest last; like ones of several requests in a row share a line."""
    table = Table(title="last decisions", title_justify="left")
    table.add_column("at", no_wrap=True)
    for name in ("what", "whom", "why"):
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


def _scaling_tables(decisions: list[dict[str, Any]]) -> list[Any]:
    """The last changes of the fleet's size: what was seen, compared and chosen, and what it costs."""
    if not decisions:
        return ["the number of workers has not changed"]
    table = Table(title="number of workers", title_justify="left")
    for name in ("what", "workers", "why", "seen, compared, cost"):
        table.add_column(name, overflow="fold")
    for decision in decisions:
        before = f"{decision['before']} → " if "before" in decision else ""
        workers = f"{before}{decision['workers']}" if "workers" in decision else "as before"
        table.add_row(
            decision["kind"],
            "\n".join([workers, *_named(decision.get("kinds") or {})]),
            decision["reason"],
            "\n".join(
                f"{part}: {', '.join(_named(figures))}"
                for part in ("seen", "compared", "cost")
                if (figures := decision.get(part))
            ),
        )
    return [table]


def _named(values: dict[str, float]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in values.items()]


def _request_tables(reply: dict[str, Any]) -> list[Any]:
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


def _explain_tables(reply: dict[str, Any]) -> list[Any]:
    running = reply["request"]
    parts = _request_tables({"requests": [running]}) if running else ["it is not running any more"]
    return [*parts, _decisions_table(reply["decisions"])]
