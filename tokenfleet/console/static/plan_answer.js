/* The answer: which fleet, what it costs, how sure that is, why, and what else was looked at. */

import { bar } from "./chart.js";
import { make, table } from "./dom.js";
import { count, counted, dollars, duration, fleetLabel, kind, number, share } from "./format.js";
import { planCharts } from "./plan_charts.js";

const BINDS = {
  ttft: "the TTFT target",
  tpot: "the TPOT target",
  kv: "KV memory",
  prefill: "prefill compute",
};
const RELIEF = {
  ttft: "TTFT target a quarter longer",
  tpot: "TPOT target a quarter longer",
  kv: "a quarter more KV memory",
  prefill: "prefill a fifth cheaper",
};
const TRAFFIC = {
  steady: () => "Rate and lengths are steady in the trace, and are taken to stay.",
  changes: (off) => `Traffic goes on changing: as the trace shows, its rate is taken to be some ${off} off by then.`,
  "too short to tell": (off) =>
    `The trace is too short to tell whether its traffic changes: its rate is taken to be some ${off} off, as is usual.`,
};

/** The plan in one sentence, for the heading and for whoever listens. */
export function sentence(plan) {
  if (!plan.feasible) return "No fleet meets these targets";
  return `${fleetLabel(plan.fleet)}: ${counted(plan.gpus, "GPU")}, ${dollars(plan.usd_per_hour)}`;
}

/** The whole answer as elements. `tryTargets(nearest)` is what the offered targets' button does. */
export function answer(plan, tryTargets) {
  return [
    make("h2", { id: "answer-title", tabindex: "-1", class: plan.feasible ? "" : "bad" }, sentence(plan)),
    make("p", { class: "soft" }, asked(plan)),
    plan.feasible ? tiles(plan) : nearest(plan, tryTargets),
    warnings(plan.inputs.warnings),
    plan.feasible ? make("section", { class: "why" }, sure(plan), why(plan), fewer(plan), reused(plan)) : null,
    classes(plan),
    planCharts(plan),
    alternatives(plan),
    passedOver(plan),
    madeFrom(plan),
  ].filter(Boolean);
}

function within({ ttft_s, tpot_s, deadline_s }) {
  if (deadline_s) return `all of an answer within ${duration(deadline_s)}`;
  return `TTFT ${duration(ttft_s)} and TPOT ${duration(tpot_s)}`;
}

function asked({ inputs, slo, attainment, policy, classes: named = [] }) {
  const each = named.map((one) => `${one.name} ${target(one.attainment.target)} within ${within(one)}`);
  const plain = `${target(attainment.target)} within ${within(slo)}`;
  return (
    `${count(inputs.requests)} requests, ${each.length > 0 ? each.join(", ") : plain}; ${inputs.trace}, ${duration(inputs.duration_s)}, ${number(inputs.rate_rps)} a second; ` +
    `placed by ${policy}.`
  );
}

/** What becomes of each class, and what it costs. */
function classes(plan) {
  const rows = (plan.classes ?? []).filter(({ requests }) => requests !== undefined);
  if (rows.length === 0) return null;
  const apart = rows.map(({ alone }) => alone?.usd_per_hour ?? null);
  const sum = apart.includes(null) ? null : apart.reduce((all, usd) => all + usd, 0);
  const says = "All classes have their targets at once in as many replicates as the confidence asks for.";
  return make(
    "section",
    {},
    make("h3", {}, "Classes"),
    make("p", {}, sum === null ? says : `${says} Separate fleets would cost ${dollars(sum)}.`),
    table(
      "Each class: its requests, its attainment, what it adds to the cost, and what its own fleet would cost",
      [
        { name: "class" },
        ...["requests", "asked", "expected", "at least", "adds", "alone"].map((name) => ({ name, number: true })),
        { name: "runs on" },
      ],
      rows.map(({ name, requests, attainment: a, marginal_usd_per_hour: adds, alone, binds, runs_on: [most] = [] }) => [
        binds ? `${name} (misses first)` : name,
        count(requests),
        target(a.target),
        share(a.expected),
        share(a.low),
        dollars(adds),
        alone ? dollars(alone.usd_per_hour) : "–",
        most ? `${most.worker} (${share(most.share)})` : "–",
      ]),
    ),
  );
}

function tiles(plan) {
  const { attainment: a } = plan;
  const row = [
    [dollars(plan.usd_per_hour), "cost"],
    [count(plan.gpus), plan.gpus === 1 ? "GPU" : "GPUs"],
    [count(plan.workers), plan.workers === 1 ? "worker" : "workers"],
    [share(a.expected ?? a.on_trace), "of requests, expected"],
    [share(a.low), `at least, with probability ${number(a.confidence, 4)}`],
  ];
  return make(
    "ul",
    { class: "tiles" },
    row.map(([value, name]) =>
      make("li", {}, make("b", {}, value), " ", make("span", { class: "soft" }, name)),
    ),
  );
}

function sure({ agents, attainment: a, doubt, spares, ttft_s: ttft, tpot_s: tpot, utilisation }) {
  const judged = a.worlds
    ? `Judged on ${a.worlds} bootstrap replicates (other arrivals, workers a little faster or slower), ` +
      `${share(a.low)} to ${share(a.high)} of the requests stay within both targets, with probability ${number(a.confidence, 4)}; ` +
      `on the trace as it is, ${share(a.on_trace)}.`
    : `On the trace as it is, ${share(a.on_trace)} of the requests stay within both targets.`;
  const tails = (p) => `p50 ${duration(p.p50)}, p90 ${duration(p.p90)}, p99 ${duration(p.p99)}`;
  return make(
    "div",
    {},
    make("h3", {}, "How sure"),
    make("p", {}, judged, doubt ? ` The doubt comes mostly from the ${doubt.mostly}.` : ""),
    doubt?.traffic && !agents ? make("p", {}, TRAFFIC[doubt.traffic](`${number(100 * doubt.of_rate, 2)} %`)) : null,
    spares ? make("p", {}, spareText(spares)) : null,
    make(
      "p",
      {},
      `TTFT ${tails(ttft)}. TPOT ${tails(tpot)}. Workers are busy ${number(utilisation * 100)} % of the time.`,
    ),
  );
}

function spareText(spares) {
  return (
    `${counted(spares.workers, "worker")} of these ${spares.workers === 1 ? "is a spare" : "are spares"}: at ${number(spares.reclaims_per_h)} reclaims an hour ` +
    `and ${duration(spares.cold_start_s)} until another serves, enough are left ${share(spares.availability)} of the time (${spares.covers}).`
  );
}

function why({ binding, binding_window_s: window, binding_detail: detail, attainment }) {
  if (binding === null) return null;
  const reliefs = Object.entries(detail.relief).sort((a, b) => b[1] - a[1]);
  const most = Math.max(...reliefs.map(([, gain]) => gain), 1e-9);
  const faster = detail.rate_scale === 1 ? "" : ` at ${number(detail.rate_scale)} times the traffic`;
  return make(
    "div",
    {},
    make("h3", {}, `Why: ${BINDS[binding] ?? binding} binds`),
    make(
      "p",
      {},
      `With ${counted(detail.workers, "worker")}${faster}, ${share(detail.attainment)} would be reached ` +
        `(${target(attainment.target)} is asked), and only ${share(detail.window_attainment)} of what arrives ` +
        `between ${number(window[0], 5)} s and ${number(window[1], 5)} s. What would help there, in points of attainment:`,
    ),
    make(
      "ul",
      { class: "bars" },
      reliefs.map(([name, gain]) =>
        make(
          "li",
          {},
          make("span", {}, RELIEF[name] ?? name),
          bar(gain / most, name === binding ? "a" : "b"),
          make("span", { class: "number" }, `${gain >= 0 ? "+" : ""}${(gain * 100).toFixed(2)}`),
        ),
      ),
    ),
  );
}

function fewer({ one_fewer: one }) {
  if (one === null) return null;
  const why = make("h3", {}, "Why not one fewer");
  if (one.workers === 0) return make("div", {}, why, make("p", {}, "There is one worker: none would be left."));
  return make(
    "div",
    {},
    why,
    make(
      "p",
      {},
      `With ${counted(one.workers, "worker")}, ${share(one.attainment)} is expected` +
        (one.low === null || one.low === undefined ? "" : `, at least ${share(one.low)}`) +
        `: ${one.fails ?? "below the target"}.`,
    ),
  );
}

function reused({ reuse }) {
  if (!reuse) return null;
  const { cliff, sessions: cost } = reuse;
  const most = Math.max(...cliff.tried.map((one) => one.scale));
  const growth = (scale) => `+${((scale - 1) * 100).toFixed(0)} %`;
  const lost = [
    cliff.hits_lost === null ? null : `at ${growth(cliff.hits_lost)} sessions hits fall to less than half`,
    cliff.target_lost === null ? null : `at ${growth(cliff.target_lost)} attainment falls below the target`,
  ].filter(Boolean);
  return make(
    "div",
    {},
    make("h3", {}, "Prefix caches"),
    make(
      "p",
      {},
      `${share(reuse.hit_rate)} of the prompts' tokens are found cached (${share(reuse.low)} to ${share(reuse.high)} ` +
        `over replicates), ${share(reuse.ideal)} at best. Ten minutes bring ${count(reuse.working_set_tokens)} tokens; ` +
        `the fleet's KV holds ${count(reuse.kv_tokens)}. ` +
        (lost.length ? `${lost.join(", ")}.` : `No cliff up to ${number(most)} times the sessions.`),
    ),
    cost
      ? make(
          "p",
          {},
          `${count(cost.sessions)} sessions, at most ${count(cost.at_once)} at once, ${duration(cost.mean_s)} on average` +
            (cost.usd === null ? "." : `, $${number(cost.usd)} each.`),
        )
      : null,
  );
}

function nearest(plan, tryTargets) {
  const near = plan.nearest_feasible;
  const reason = plan.reason ? make("p", {}, `${plan.reason}.`) : null;
  if (near === null) return make("div", { class: "notice" }, reason);
  if (near.ttft_s === undefined) {
    return make(
      "div",
      { class: "notice" },
      reason,
      make("p", {}, `This trace can show at most ${share(near.attainment)}.`),
    );
  }
  return make(
    "div",
    { class: "notice" },
    reason,
    make("h3", {}, "The nearest that can be met"),
    make(
      "p",
      {},
      `TTFT ${duration(near.ttft_s)} and TPOT ${duration(near.tpot_s)}` +
        (near.session_s === null ? "" : `, sessions within ${duration(near.session_s)}`) +
        `, with ${fleetLabel(near.fleet)}: ` +
        `${counted(near.gpus, "GPU")}, ${dollars(near.usd_per_hour)}, ${share(near.attainment)} expected, at least ${share(near.low)}.`,
    ),
    make(
      "p",
      { class: "buttons" },
      make(
        "button",
        { type: "button", onclick: () => tryTargets(near) },
        "Ask for these targets",
      ),
    ),
  );
}

function alternatives({ alternatives: others }) {
  if (!others.length) return null;
  const columns = [
    { name: "fleet" },
    { name: "cost", number: true },
    { name: "GPUs", number: true },
    { name: "expected", number: true },
    { name: "at least", number: true },
    { name: "TTFT p99", number: true },
    { name: "TPOT p99", number: true },
    { name: "note" },
  ];
  const rows = others.map((o) => [
    fleetLabel(o.fleet),
    dollars(o.usd_per_hour),
    count(o.gpus),
    share(o.attainment.expected ?? o.attainment.on_trace),
    share(o.attainment.low),
    duration(o.ttft_s?.p99),
    duration(o.tpot_s?.p99),
    o.note ?? "",
  ]);
  return make(
    "section",
    {},
    make("h3", {}, "What else was looked at"),
    table("Other fleets", columns, rows, { class: "cards" }),
  );
}

function passedOver({ passed_over: passed, baselines }) {
  const lines = [
    ...passed.map((p) => `${kind(p)}: ${p.reason}`),
    ...baselines.map(
      (b) =>
        `Placed by ${b.policy}: ${b.workers === null ? `more than ${b.tried_up_to} workers` : counted(b.workers, "worker")} on the trace`,
    ),
  ];
  if (!lines.length) return null;
  return make(
    "details",
    {},
    make("summary", {}, "Passed over, and other policies"),
    make(
      "ul",
      {},
      lines.map((line) => make("li", {}, line)),
    ),
  );
}

function madeFrom({ inputs }) {
  const line = (p) =>
    `${p.model} on ${kind(p)}: ${p.kind}, ${p.engine}, ${p.date}; mean error ${share(p.mean_relative_error)}; ` +
    (p.usd_per_gpu_h === null ? p.price : `$${p.usd_per_gpu_h} a GPU-hour (${p.price})`);
  return make(
    "details",
    {},
    make("summary", {}, "Profiles and prices it rests on"),
    make(
      "ul",
      {},
      inputs.profiles.map((p) => make("li", {}, line(p))),
    ),
  );
}

function warnings(lines) {
  if (!lines.length) return null;
  return make(
    "details",
    { class: "notice" },
    make("summary", {}, counted(lines.length, "warning")),
    make(
      "ul",
      {},
      lines.map((w) => make("li", {}, w)),
    ),
  );
}

/** A target as it was asked: without digits that nobody typed. */
const target = (value) => `${number(value * 100, 6)} %`;
