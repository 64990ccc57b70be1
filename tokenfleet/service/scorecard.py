"""A plan's scorecard: its predictions, its fleet's measurements, and the bias of its profile.

The traffic a plan was made for is never quite the traffic that comes. So the plan's fleet is replayed on the
requests that it really got (`plan_replay.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.figures import duration_text
from dataplane.history.files import read_history
from dataplane.history.fleet_log import DAY_S, day_begin_s
from dataplane.http.rules import UnknownName
from tokenfleet.planning.inputs import Bias
from tokenfleet.planning.plan_file import PlanFile, Quantiles, to_figures
from tokenfleet.planning.result import latency
from tokenfleet.report.tables import asked_text, fleet_text, share_text
from tokenfleet.service.data_folder import Database, default_data_folder
from tokenfleet.service.gap import gaps
from tokenfleet.service.jobs import Jobs, Plans, Serving
from tokenfleet.service.plan_replay import PlanReplay, StepBias, classes_of, recorded_steps, replay

SCHEMA = "tokenfleet.scorecard/1"
FEWEST_REQUESTS = 100
CAPACITY_WINDOW_S = 60.0
CAPACITY_REQUESTS = 20  # fewer in a window say nothing about its attainment


def scorecard_of(data: Path, plan: str) -> dict[str, Any]:
    """The scorecard of a kept plan, by its name or `last` for the one a fleet ran under last.

    Raises UnknownName where there is no such plan, BadInput where history cannot be read.
    """
    if not (data / "tokenfleet.db").is_file():
        raise UnknownName(
            f"plan {plan}: {data} keeps no plans; `tokenfleet serve --plan FILE --data {data}` does"
        )
    database = Database(data / "tokenfleet.db")
    try:
        plans, jobs = Plans(database), Jobs(database)
        name = plans.last_served() if plan == "last" else plan
        content = None if name is None else plans.find(name)
        if name is None or content is None:
            raise UnknownName(f"plan {plan}: no such plan is kept")
        job = jobs.find(name)
        servings = plans.servings(name)
    finally:
        database.close()
    own = job["question"]["profiles"] if job else []
    rows = pl.concat(
        [
            read_history(data / "history", s.started_s, time.time() if s.ended_s is None else s.ended_s)
            for s in servings
        ]
        or [read_history(data / "history", 0.0, 0.0)]
    )
    return scorecard(name, content, servings, rows, recorded_steps(data, servings), own)


def whole_scorecard(data: Path, plan: str) -> dict[str, Any]:
    """`scorecard_of`, with what the fleet cost over the cheapest on the days that the plan was served."""
    card, now_s = scorecard_of(data, plan), time.time()
    served = [(s["started_s"], s["ended_s"] or now_s) for s in card["served"]]
    found = gaps(data, min(begin_s for begin_s, _ in served), now_s) if served else []

    def is_its(day: str) -> bool:
        start_s = day_begin_s(day)
        return any(begin_s < start_s + DAY_S and end_s > start_s for begin_s, end_s in served)

    return card | {"gap": [one for one in found if is_its(one["day"])]}


def scorecard(
    name: str,
    plan: PlanFile,
    servings: Sequence[Serving],
    rows: pl.DataFrame,
    steps: pl.DataFrame,
    own: list[str],
) -> dict[str, Any]:
    """The scorecard (`tokenfleet.scorecard/1`) from the requests and steps recorded while it was served.

    `planned` is the plan's own prediction for the traffic it was made for, `predicted` its fleet replayed on
    the traffic that came, `ratio` observed / predicted. Nothing is compared below FEWEST_REQUESTS.
    """
    over = rows.filter(pl.col("outcome") != "aborted")  # who leaves has not been failed
    finished = over.filter(pl.col("outcome") == "finished", pl.col("output_tokens") > 0)
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "plan": name,
        "fleet": plan.document["fleet"],
        "slo": plan.document["slo"],
        "served": [{"started_s": s.started_s, "ended_s": s.ended_s} for s in servings],
        "requests": len(finished),
        "not_served": len(over) - len(finished),
        "workers": {"planned": plan.workers, "seen": finished["worker"].drop_nulls().n_unique()},
        **dict.fromkeys(("rate_rps", "ttft_s", "tpot_s", "attainment", "classes", "capacity", "bias")),
        "says": ["this plan found no fleet"],
        "tables": [],
    }
    if plan.feasible and len(finished) < FEWEST_REQUESTS:
        facts["says"] = [
            f"requests finished under this plan: {len(finished)}; {FEWEST_REQUESTS} are needed to compare"
        ]
    elif plan.feasible:
        facts |= _compared(plan, finished.sort("arrival_s"), len(over), steps, own)
        facts["says"] = [*_sentences(facts), *facts["says"]]
        facts["tables"] = [_table(facts)]
    of = f"plan {name}: {fleet_text(plan.fleet) or 'no fleet'}; requests finished: {len(finished):,}"
    facts["says"] = [f"{said[0].upper()}{said[1:]}." for said in (facts["says"][0], of, *facts["says"][1:])]
    return facts


def _table(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The figures as terminal and live page show them."""
    ways = ("planned", "predicted", "observed")

    def row(name: str, of: Mapping[str, Any], text: Callable[[float], str]) -> list[str]:
        values = [None if of.get(way) is None else text(of[way]) for way in ways]
        ratio = None if of.get("ratio") is None else f"{of['ratio']:.3f}"
        return [name, *(value or "–" for value in (*values, ratio))]

    rows = [
        row(f"{what[:4].upper()} {quantile}", of, duration_text)
        for what in ("ttft_s", "tpot_s")
        for quantile, of in facts[what].items()
    ]
    rows.append(row("SLO attainment", facts["attainment"], share_text))
    rows += [row(f"SLO attainment, class {one['name']}", one, share_text) for one in facts["classes"]]
    rows.append(row("req/s", facts["rate_rps"], "{:.3g}".format))
    columns = ["", "planned", "predicted on this traffic", "observed", "observed / predicted"]
    return {"title": "Planned, predicted and observed", "columns": columns, "rows": rows}


def _compared(
    plan: PlanFile, finished: pl.DataFrame, over: int, steps: pl.DataFrame, own: list[str]
) -> dict[str, Any]:
    """The planned, predicted and observed figures, and the bias with a sentence on it."""
    replayed = None
    try:
        replayed = replay(plan, own, finished, steps)
        bias = replayed.bias
    except BadInput as error:
        bias = str(error)
    met = _met(finished, plan)
    span_s = float(finished["arrival_s"][-1] - finished["arrival_s"][0])
    facts: dict[str, Any] = {
        "rate_rps": {"planned": plan.inputs.rate_rps, "observed": to_figures((over - 1) / span_s)},
        "ttft_s": _latency(plan.ttft_s, replayed.ttft_s if replayed else None, finished["ttft_s"]),
        "tpot_s": _latency(plan.tpot_s, replayed.tpot_s if replayed else None, finished["tpot_s"]),
        "attainment": {
            "target": plan.attainment.target,
            "planned": plan.attainment.expected,
            "predicted": round(replayed.attainment, 6) if replayed else None,
            "observed": round(float(met.sum()) / over, 6),
        },
        "classes": _by_class(plan, finished, met, replayed),
        "capacity": _capacity(plan, finished, met),
        "says": [f"step times are not compared: {bias}"],
    }
    if isinstance(bias, StepBias):
        facts["bias"] = {
            "decode": to_figures(bias.decode),
            "prefill": to_figures(bias.prefill),
            "left": {"tpot": to_figures(bias.remaining[0]), "ttft": to_figures(bias.remaining[1])},
        }
        facts["says"] = bias.sentences
    return facts


def kept_bias(data: Path | None, plan: str) -> Bias:
    """The bias found under a kept plan of a folder (by default the user's). Raises BadInput."""
    return bias_of(scorecard_of(data or default_data_folder(), plan))


def bias_of(card: Mapping[str, Any]) -> Bias:
    """The bias that a scorecard found, for the next plan. Raises BadInput where it found none."""
    if card["bias"] is None:
        raise BadInput(f"--bias-from: plan {card['plan']}: {' '.join(card['says'])}")
    source = f"seen over {card['requests']:,} requests under plan {card['plan']}"
    return Bias(card["bias"]["decode"], card["bias"]["prefill"], source)


def _met(rows: pl.DataFrame, plan: PlanFile) -> NDArray[np.bool_]:
    """Whether each finished request was within the plan's targets; without a TPOT by TTFT alone."""
    classes, of = classes_of(rows, plan)
    ttft_s, tpot_s = (
        rows["ttft_s"].fill_null(float("inf")).to_numpy(),
        rows["tpot_s"].fill_null(0.0).to_numpy(),
    )
    in_time = ttft_s <= np.array([one.slo.ttft_s for one in classes])[of]
    return np.asarray(in_time & (tpot_s <= np.array([one.slo.tpot_s for one in classes])[of]))


def _by_class(
    plan: PlanFile, rows: pl.DataFrame, met: NDArray[np.bool_], replayed: PlanReplay | None
) -> list[dict[str, Any]]:
    """Attainment of each class as planned, predicted for what came, and observed; of those that finished."""
    if not plan.classes:
        return []
    classes, of = classes_of(rows, plan)
    planned = {one.name: one.attainment.expected for one in plan.classes}
    return [
        {
            "name": one.name,
            "requests": int((of == c).sum()),
            "target": one.attainment,
            "planned": planned.get(one.name),
            "predicted": round(replayed.by_class[c], 6) if replayed else None,
            "observed": round(float(met[of == c].mean()), 6),
        }
        for c, one in enumerate(classes)
        if (of == c).any()
    ]


def _latency(
    planned: Quantiles | None, predicted: NDArray[np.float64] | None, observed: pl.Series
) -> dict[str, Any]:
    """Quantiles and mean, three ways and the ratio."""
    now = latency(observed.cast(pl.Float64).to_numpy()).quantiles
    then = None if predicted is None else latency(predicted).quantiles
    table = {}
    for name in Quantiles.model_fields:
        of = {"planned": planned, "predicted": then, "observed": now}
        row = {way: getattr(one, name, None) for way, one in of.items()}
        seen, told = row["observed"], row["predicted"]
        table[name] = row | {"ratio": to_figures(seen / told) if seen is not None and told else None}
    return table


def _capacity(plan: PlanFile, rows: pl.DataFrame, met: NDArray[np.bool_]) -> dict[str, Any]:
    """The busiest minute that still met the target, and the least busy one that did not.

    A fleet shows its capacity only where it is pressed; one that never was has carried at least so much.
    The last minute's rate is that of the seconds it has, half a minute at least.
    """
    after_s = rows["arrival_s"] - rows["arrival_s"][0]
    covers_s = pl.lit(after_s.max()) - CAPACITY_WINDOW_S * pl.col("minute")
    table = (
        pl.DataFrame({"minute": (after_s / CAPACITY_WINDOW_S).floor(), "met": met})
        .group_by("minute")
        .agg(n=pl.len(), share=pl.col("met").mean())
        .filter(pl.col("n") >= CAPACITY_REQUESTS)
        .with_columns(rps=pl.col("n") / covers_s.clip(CAPACITY_WINDOW_S / 2, CAPACITY_WINDOW_S))
    )
    carried = table.filter(pl.col("share") >= plan.attainment.target)["rps"].max()
    failed = table.filter(pl.col("share") < plan.attainment.target)["rps"].min()
    rates = [None if rps is None else to_figures(float(rps)) for rps in (carried, failed)]  # type: ignore[arg-type]
    return {"planned_rps": plan.inputs.rate_rps, "carried_rps": rates[0], "failed_rps": rates[1]}


def _sentences(facts: Mapping[str, Any]) -> list[str]:
    attained, workers = facts["attainment"], facts["workers"]
    verdict = "met" if attained["observed"] >= attained["target"] else "missed"
    sentences = [
        f"target {verdict}: {share_text(attained['observed'])} of requests in SLO"
        f" (target {asked_text(attained['target'])})"
    ]
    sentences += [
        f"class {one['name']}: {share_text(one['observed'])} of requests in SLO"
        f" (target {asked_text(one['target'])})"
        for one in facts.get("classes") or ()
    ]
    if facts["not_served"]:
        sentences.append(f"requests rejected or failed: {facts['not_served']}; they count as missed")
    if workers["seen"] > workers["planned"]:
        sentences.append(f"{workers['seen']} workers served; the plan has {workers['planned']}")
    minutes = [
        "none" if facts["capacity"][of] is None else f"{facts['capacity'][of]:.3g} req/s"
        for of in ("carried_rps", "failed_rps")
    ]
    sentences.append("busiest minute that met the target: {}; quietest that missed it: {}".format(*minutes))
    return sentences
