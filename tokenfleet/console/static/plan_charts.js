/* The plan's curves: cost against targets, attainment against workers, workers against the rate, latencies. */

import { chart } from "./chart.js";
import { make } from "./dom.js";
import { dollars, duration, fleetLabel, number, share } from "./format.js";

const whole = (value) => number(value, 4);

/** Every chart the plan has the numbers for. */
export function planCharts(plan) {
  const { curves } = plan;
  const isOne = (plan.classes ?? []).length < 2; // others have a target each
  const shown = [
    curves.cost_by_slo.length > 1 && costBySlo(plan),
    curves.attainment_by_workers.length > 0 && attainmentByWorkers(plan),
    curves.rate_rps.length > 1 && rate(plan),
    new Set(plan.schedule.map((s) => s.workers)).size > 1 && schedule(plan),
    isOne && curves.ttft_cdf.length > 1 && latencies(plan, "ttft", "Time to first token"),
    isOne && curves.tpot_cdf.length > 1 && latencies(plan, "tpot", "Time per output token"),
    plan.demand_line !== null && demandLine(plan),
  ];
  return make("div", { class: "charts" }, shown.filter(Boolean));
}

function costBySlo({ curves, slo }) {
  const rows = curves.cost_by_slo;
  const isPriced = rows.every((r) => r.workers === null || r.usd_per_hour !== null);
  const cost = (r) => (isPriced ? r.usd_per_hour : r.gpus);
  const none = rows.filter((r) => r.workers === null).length;
  return chart({
    title: "Cost by target",
    says:
      `Both targets tightened or loosened together; ×1 is ${duration(slo.ttft_s)} and ${duration(slo.tpot_s)}. ` +
      `Fleets of the same worker types, ${rows[0].on === "resampled traces" ? "judged like the recommended fleet" : "sized on the recorded trace alone"}.` +
      (none ? ` No fleet meets the ${none === 1 ? "tightest" : `${none} tightest`}.` : ""),
    x: {
      name: "targets, times what was asked",
      kind: "log",
      format: (v) => `×${number(v)}`,
      ticks: rows.map((r) => r.scale),
    },
    y: { name: "cost", kind: "linear", zero: true, format: isPriced ? (v) => `$${whole(v)}` : whole },
    series: [
      { name: "", kind: "line", tone: "a", points: rows.map((r) => [r.scale, cost(r)]) },
      { name: "", kind: "dots", tone: "a", points: rows.map((r) => [r.scale, cost(r)]) },
    ],
    marks: [{ axis: "x", at: 1, name: "asked" }],
    data: {
      columns: [
        { name: "targets" },
        { name: "TTFT", number: true },
        { name: "TPOT", number: true },
        { name: "workers", number: true },
        { name: "GPUs", number: true },
        { name: "cost", number: true },
      ],
      rows: rows.map((r) => [
        `×${number(r.scale)}`,
        duration(r.ttft_s),
        duration(r.tpot_s),
        ...(r.workers === null
          ? ["none", "–", "–"]
          : [whole(r.workers), whole(r.gpus), dollars(r.usd_per_hour)]),
      ]),
    },
  });
}

function attainmentByWorkers({ curves, attainment }) {
  const rows = curves.attainment_by_workers;
  const values = rows.flatMap((r) => [r.on_trace, r.expected, r.low]).filter((v) => v !== null);
  const lowest = Math.min(...values, attainment.target);
  const workers = rows.map((r) => r.workers);
  const says =
    attainment.confidence === null
      ? ""
      : ` The bounds hold at ${number(attainment.confidence * 100, 4)} % confidence.`;
  return chart({
    title: "SLO attainment by workers",
    says: `The answer is the smallest count whose lower bound reaches the target.${says}`,
    x: {
      name: "workers",
      kind: "whole",
      format: whole,
      domain: [Math.min(...workers) - 0.5, Math.max(...workers) + 0.5],
    },
    y: {
      name: "attainment",
      kind: "linear",
      format: (v) => `${number(v * 100, 5)} %`,
      domain: [lowest - (1 - lowest) * 0.08, 1],
    },
    series: [
      {
        name: "bounds",
        kind: "band",
        tone: "a",
        points: rows.filter((r) => r.low !== null).map((r) => [r.workers, r.low, r.high]),
      },
      { name: "expected", kind: "dots", tone: "a", points: rows.map((r) => [r.workers, r.expected]) },
      {
        name: "recorded trace",
        kind: "dots",
        tone: "b hollow",
        points: rows.map((r) => [r.workers, r.on_trace]),
      },
    ].filter((s) => s.points.some((p) => p[1] !== null)),
    marks: [{ axis: "y", at: attainment.target, name: `target ${number(attainment.target * 100, 6)} %` }],
    data: {
      columns: [
        { name: "workers" },
        { name: "expected", number: true },
        { name: "lower bound", number: true },
        { name: "upper bound", number: true },
        { name: "recorded trace", number: true },
      ],
      rows: rows.map((r) => [
        whole(r.workers),
        share(r.expected),
        share(r.low),
        share(r.high),
        share(r.on_trace),
      ]),
    },
  });
}

/** Minutes where the trace is longer than that. */
function timeAxis(end) {
  const [per, unit] = end > 7200 ? [3600, "hours"] : end > 180 ? [60, "minutes"] : [1, "seconds"];
  return { name: `${unit} into the trace`, kind: "linear", domain: [0, end], format: (v) => whole(v), per };
}

function rate({ curves, inputs, binding_window_s: window }) {
  const { per, ...axis } = timeAxis(inputs.duration_s);
  const points = curves.rate_rps.map(([t, r]) => [t / per, r]);
  return chart({
    title: "Load",
    says: `Requests a second over the trace, ${number(inputs.rate_rps)} on average.`,
    x: { ...axis, domain: [0, inputs.duration_s / per] },
    y: { name: "requests a second", kind: "linear", zero: true, format: whole },
    series: [{ name: "", kind: "steps", tone: "a", points }],
    marks: [
      ...(inputs.phases ?? []).slice(1).map((p) => ({ axis: "x", at: p.start_s / per, name: "" })),
      ...(window ? [{ axis: "x", at: window[0] / per, name: "bottleneck worst here" }] : []),
    ],
    data: {
      columns: [{ name: axis.name }, { name: "requests a second", number: true }],
      rows: points.map(([t, r]) => [number(t, 4), number(r)]),
    },
  });
}

function schedule({ schedule: stretches, schedule_detail: detail, inputs }) {
  const { per, ...axis } = timeAxis(inputs.duration_s);
  const steps = (rows) => [
    ...rows.map((s) => [s.start_s / per, s.workers]),
    [rows.at(-1).end_s / per, rows.at(-1).workers],
  ];
  const paid = detail?.paid ?? null;
  const saved = (paid ?? detail)?.saved_share ?? 0;
  const saves = saved > 0 ? `saves ${share(saved)} of the worker-hours` : "saves nothing here";
  const ordered = (s) =>
    paid?.orders
      .filter((o) => o.ready_s >= s.start_s && o.ready_s < s.end_s)
      .map((o) => `${whole(o.workers)} at ${number(o.order_s / per, 4)}`)
      .join(", ") ?? "";
  return chart({
    title: "Scaling schedule",
    says:
      `Following the rate ${saves}. ` +
      (paid
        ? `Each worker is ordered and paid for ${duration(paid.cold_start_s)} before it serves.`
        : "Start-up and draining between intervals are left out."),
    x: { ...axis, domain: [0, inputs.duration_s / per] },
    y: { name: "workers", kind: "whole", zero: true, format: whole },
    series: [
      ...(paid?.stretches.length
        ? [{ name: "paid for", kind: "steps", tone: "c dashed", points: steps(paid.stretches) }]
        : []),
      { name: "serving", kind: "steps", tone: "b", points: steps(stretches) },
    ],
    data: {
      columns: [
        { name: `from, ${axis.name}` },
        { name: "to", number: true },
        { name: "workers", number: true },
        { name: "GPUs", number: true },
        { name: "fleet" },
        ...(paid ? [{ name: "ordered" }] : []),
      ],
      rows: stretches.map((s) => [
        number(s.start_s / per, 4),
        number(s.end_s / per, 4),
        whole(s.workers),
        whole(s.gpus),
        s.fleet ?? "",
        ...(paid ? [ordered(s)] : []),
      ]),
    },
  });
}

function latencies(plan, name, title) {
  const points = plan.curves[`${name}_cdf`].filter(([s]) => s > 0);
  const tail = points.filter(([, p]) => p >= 0.5);
  const missed = ([s]) => s > plan.slo[`${name}_s`];
  return chart({
    title,
    says: `Share of requests within this time on the recorded trace; the limit is ${duration(plan.slo[`${name}_s`])}.`,
    x: { name: title.toLowerCase(), kind: "log", format: (v) => duration(v) },
    y: { name: "share", kind: "linear", domain: [0, 1], format: (v) => `${number(v * 100)} %` },
    series: [{ name: "", kind: "line", tone: "a", points }],
    marks: [{ axis: "x", at: plan.slo[`${name}_s`], name: "target" }],
    data: {
      columns: [{ name: "share of requests" }, { name: "within", number: true }, { name: "target" }],
      rows: tail
        .filter((_, i) => i % 3 === 0)
        .map((p) => [share(p[1]), duration(p[0]), missed(p) ? "missed" : "met"]),
    },
  });
}

function demandLine({ demand_line: line, fleet }) {
  const ends = [0, Math.max(...line.points.map((p) => p[0]))];
  const at = (x) => line.workers_per_rps * x + line.intercept;
  return chart({
    title: "Workers by rate",
    says:
      `The scaling rule for this traffic mix on ${fleet.length === 1 ? fleetLabel(fleet).replace(/^\d+ × /, "") : "workers of one type"}:` +
      ` ${number(line.workers_per_rps)} workers for each request a second, and ${number(line.intercept)} (R² ${number(line.r2, 4)}).`,
    x: { name: "requests a second", kind: "linear", zero: true, format: whole },
    y: { name: "workers", kind: "linear", zero: true, format: whole },
    series: [
      { name: "line", kind: "line", tone: "b", points: ends.map((x) => [x, at(x)]) },
      { name: "simulated", kind: "dots", tone: "a", points: line.points },
    ],
    data: {
      columns: [{ name: "requests a second" }, { name: "workers needed", number: true }],
      rows: line.points.map(([x, y]) => [number(x), number(y)]),
    },
  });
}
