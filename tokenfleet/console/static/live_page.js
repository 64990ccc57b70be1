/* The live page: the fleet asked for every second and at every event, and the orders a person gives it. */

import { Refused, Unreachable, ask, offers } from "./api.js";
import { confirmed } from "./confirm_dialog.js";
import { byId, make, say } from "./dom.js";
import { count, counted, duration, share } from "./format.js";
import { EventStream } from "./event_stream.js";
import { connection } from "./job_page.js";
import { Decisions } from "./live_decisions.js";
import { forgetMoved, showMoved, showMoving } from "./live_moving.js";
import { offerScorecard } from "./live_scorecard.js";
import { TIMELINE, Timeline, ratioOf, tone } from "./live_timeline.js";
import { Workers } from "./live_workers.js";

const EVERY_MS = 1000;
const HIDDEN_EVERY_MS = 5000;
const AGAIN_MS = [500, 1000, 2000, 4000];

const workers = new Workers(drain);
const decisions = new Decisions();
const timeline = new Timeline();
const opened_s = Date.now() / 1e3;

let fleet = null;
let fails = 0;
let timer = null;
let asking = false;
let isAskedAgain = false;
let isStreamLost = false;

const stream = new EventStream("/v1/events", {
  onEvent: ({ data }) => {
    const event = JSON.parse(data);
    decisions.add(event, event.at_s > opened_s);
    if (event.kind === "migrate") showMoved(event);
    refresh();
  },
  onState: (state, waitS) => {
    isStreamLost = state !== "open";
    if (isStreamLost && !fails) connection(`The connection for decisions is lost; retrying in ${waitS} s`);
    else if (!fails) connection("");
  },
});
let isFollowing = false;

/** Ask for the fleet now; while an answer is on its way, once more after it. */
function refresh() {
  if (asking) {
    isAskedAgain = true;
    return;
  }
  clearTimeout(timer);
  asking = true;
  void look().finally(() => {
    asking = false;
    const waitMs = fails
      ? AGAIN_MS[Math.min(fails, AGAIN_MS.length) - 1]
      : document.hidden
        ? HIDDEN_EVERY_MS
        : EVERY_MS;
    timer = setTimeout(refresh, isAskedAgain && !fails ? 0 : waitMs);
    isAskedAgain = false;
  });
}

async function look() {
  try {
    if (fleet === null && !(await offers("/v1/fleet"))) {
      absent();
      return;
    }
    show(await ask("GET", "/v1/fleet"));
    if (!document.hidden) timeline.draw(await ask("GET", TIMELINE), fleet.slo);
    fails = 0;
    if (!isStreamLost) connection("");
  } catch (error) {
    fails += 1;
    if (error instanceof Refused && error.status === 404) fleet = null; // another API answers here now
    if (!(error instanceof Refused || error instanceof Unreachable)) {
      connection(`This page failed: ${error.message}`);
      throw error;
    }
    const waitS = AGAIN_MS[Math.min(fails, AGAIN_MS.length) - 1] / 1e3;
    const old = fleet === null ? "" : " The figures below are out of date.";
    connection(
      `${error instanceof Refused ? error.message : "The control API does not answer"}; retrying in ${waitS} s.${old}`,
    );
    byId("present").classList.toggle("stale", fleet !== null);
  }
}

function absent() {
  fails = AGAIN_MS.length; // a fleet may be started behind this address: look now and then
  connection("");
  byId("absent").hidden = false;
  byId("present").hidden = true;
  say(byId("facts"), "");
}

function show(now) {
  // Ids start at 1 with each fleet: an older one than we have seen is another fleet's.
  const newest = now.decisions.at(-1)?.id ?? 0;
  if (stream.lastId !== null && newest < Number(stream.lastId)) {
    decisions.clear();
    forgetMoved();
    stream.restart(true);
  }
  fleet = now;
  byId("absent").hidden = true;
  byId("present").hidden = false;
  byId("present").classList.remove("stale");
  say(byId("facts"), factsOf(now));
  showTiles(now);
  say(byId("gap"), `Excess cost: ${now.gap.line}.`);
  const { state, line } = now.proposal;
  say(byId("proposal"), state === "none" || state === "same" ? "" : `Proposed: ${line}.`);
  workers.show(now.workers);
  showMoving(now.moving);
  timeline.attainment(now);
  offerKinds(Object.keys(now.wanted_kinds));
  if (document.activeElement !== byId("scale-to") && byId("scale-to").dataset.typed === undefined)
    byId("scale-to").value = wantedOf(now);
  byId("scale-to").max = now.max_workers;
  byId("auto").disabled = now.auto || !now.autoscale;
  say(byId("auto-says"), rangeOf(now));
  if (!isFollowing) {
    isFollowing = true;
    offerScorecard().catch((error) => connection(error.message));
    stream.run().catch((error) => connection(`No stream of decisions: ${error.message}`));
  }
}

/** In a fleet of several worker types, the one to scale. */
function offerKinds(kinds) {
  const select = byId("scale-kind");
  byId("scale-which").hidden = kinds.length < 2;
  if (select.options.length === kinds.length) return;
  select.replaceChildren(...kinds.map((kind) => make("option", { value: kind }, kind)));
}

/** The desired workers of the chosen type. */
const wantedOf = (now) => now.wanted_kinds[byId("scale-kind").value];

function factsOf(now) {
  const { min_workers: least, max_workers: most } = now.autoscale ?? {};
  const scaling = now.auto ? `Autoscaling from ${least} to ${counted(most, "worker")}` : "Manual scaling";
  const mode = now.advisory ? " Advisory mode: decisions are recorded, not carried out." : "";
  return `${now.name} on ${now.engine} engines at ${now.gateway}. ${scaling}.${mode}`;
}

/** The bounds of autoscaling, or how to allow it. */
function rangeOf({ auto, autoscale }) {
  if (!autoscale) return "Autoscaling is not available. Start the fleet with --autoscale MIN..MAX to allow it.";
  const { min_workers: least, max_workers: most } = autoscale;
  const range = `${auto ? "Autoscaling keeps" : "Autoscaling is off. It would keep"} ${least} to ${counted(most, "worker")}.`;
  return autoscale.floor ? `${range} Floor now: ${autoscale.floor.workers}, ${autoscale.floor.why}.` : range;
}

/** The prefix hit rate of all workers, and that of an unlimited cache shared by them. */
function cachedOf(workers) {
  const told = workers.map((w) => w.prefix_tokens).filter(Boolean);
  const [queried, hit, ideal] = ["queried", "hit", "ideal"].map((name) => told.reduce((sum, t) => sum + t[name], 0));
  if (!queried) return "";
  const had = ` Prefix hit rate: ${share(hit / queried)} of prompt tokens.`;
  return `${had} An unlimited cache shared by all workers would reach ${share(ideal / queried)}.`;
}

function showTiles(now) {
  const serving = now.workers.filter((w) => w.state === "serving").length;
  const { lately } = now;
  const over = `Throughput, latency, attainment and failures over the last ${duration(lately.over_s, 2)}.`;
  say(byId("window"), over + cachedOf(now.workers));
  const within = ratioOf(lately.attainment.both);
  const tiles = [
    [`${count(serving)} of ${count(now.wanted_workers)}`, "workers serving", ""],
    [count(now.requests.running), "requests running", ""],
    [count(now.requests.waiting), "requests waiting", ""],
    [count(lately.tokens_per_s), "tokens/s", ""],
    [duration(lately.ttft_s?.p90), "TTFT p90", ""],
    [duration(lately.tpot_s?.p90), "TPOT p90", ""],
    [
      share(within),
      "SLO attainment",
      within === null ? "" : tone(within, now.attainment_target),
    ],
    [count(lately.failed), "failed", lately.failed ? "bad" : ""],
  ];
  const list = byId("tiles");
  if (list.children.length !== tiles.length) {
    list.replaceChildren(
      ...tiles.map(() => make("li", {}, make("b"), " ", make("span", { class: "soft" }))),
    );
  }
  tiles.forEach(([value, name, mark], i) => {
    const [figure, label] = list.children[i].children;
    say(figure, value);
    figure.className = `tone ${mark}`;
    say(label, name);
  });
}

async function drain(worker, isDraining) {
  const title = isDraining ? `Cancel the drain of ${worker}?` : `Drain ${worker}?`;
  const says = isDraining
    ? "It takes new requests again."
    : "It takes no new requests. Its running requests move to other workers with their KV. Then it stops.";
  if (!(await confirmed(title, says, isDraining ? "Cancel drain" : "Drain"))) return;
  await give(() => ask(isDraining ? "DELETE" : "POST", `/v1/workers/${encodeURIComponent(worker)}/drain`));
}

async function scale() {
  const wanted = Number(byId("scale-to").value);
  if (
    byId("scale-to").value.trim() === "" ||
    !Number.isInteger(wanted) ||
    wanted < 0 ||
    wanted > fleet.max_workers
  ) {
    say(byId("complaint"), `Desired workers: expected a whole number from 0 to ${fleet.max_workers}.`);
    byId("scale-to").focus();
    return;
  }
  const before = wantedOf(fleet);
  const change = wanted - before;
  const happens =
    change > 0
      ? `${counted(change, "worker")} will start.`
      : change < 0
        ? `${counted(-change, "worker")} will drain and stop; running requests move.`
        : "No worker starts or stops.";
  const hands = fleet.auto ? " Autoscaling stops." : "";
  const kind = byId("scale-kind").value;
  const which = byId("scale-which").hidden ? "" : `${kind} `;
  if (!(await confirmed(`Scale ${which}from ${before} to ${wanted}?`, happens + hands, "Scale"))) return;
  await give(() => ask("POST", "/v1/fleet/scale", { json: { workers: wanted, kind } }));
  delete byId("scale-to").dataset.typed;
}

async function automatic() {
  if (
    !(await confirmed(
      "Enable autoscaling?",
      "The controller starts and drains workers to follow the traffic.",
      "Enable",
    ))
  )
    return;
  await give(() => ask("POST", "/v1/fleet/scale", { json: { auto: true } }));
}

/** Give an order; a refusal is said in the API's own words. */
async function give(order) {
  say(byId("complaint"), "");
  try {
    await order();
  } catch (error) {
    if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
    say(byId("complaint"), `${error.message}.`);
  }
  refresh();
}

byId("scale").addEventListener("submit", (event) => {
  event.preventDefault();
  void scale();
});
byId("scale-to").addEventListener("input", () => (byId("scale-to").dataset.typed = "yes"));
byId("scale-kind").addEventListener("change", () => {
  delete byId("scale-to").dataset.typed;
  byId("scale-to").value = wantedOf(fleet);
});
byId("auto").addEventListener("click", () => void automatic());
document.addEventListener("visibilitychange", () => document.hidden || refresh());
refresh();
