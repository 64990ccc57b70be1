/* The live page: the fleet asked for every second and at every event, and the orders a person gives it. */

import { Refused, Unreachable, ask, offers } from "./api.js";
import { confirmed } from "./confirm_dialog.js";
import { byId, make, say, words } from "./dom.js";
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
  say(byId("gap"), words("words", "gap", now.gap));
  const { state, line } = now.proposal;
  say(byId("proposal"), state === "none" || state === "same" ? "" : words("words", "proposal", { line }));
  workers.show(now.workers, now.says);
  showMoving(now.says.moving);
  timeline.attainment(now);
  offerKinds(Object.keys(now.wanted_kinds));
  if (document.activeElement !== byId("scale-to") && byId("scale-to").dataset.typed === undefined)
    byId("scale-to").value = wantedOf(now);
  byId("scale-to").max = now.max_workers;
  byId("auto").disabled = now.auto || !now.autoscale;
  say(byId("auto-says"), [now.says.bounds, now.says.floor].filter(Boolean).join(" "));
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

const factsOf = ({ name, engine, gateway, says }) =>
  words("words", "facts", { name, engine, gateway, scaling: says.scaling });

function showTiles(now) {
  const serving = now.workers.filter((w) => w.state === "serving").length;
  const { lately } = now;
  say(byId("window"), words("words", "window", { over: duration(lately.over_s, 2) }));
  say(byId("prefix-hits"), now.says.prefix_hits);
  const within = ratioOf(lately.attainment.both);
  const tiles = {
    workers: [`${count(serving)} of ${count(now.wanted_workers)}`],
    running: [count(now.requests.running)],
    waiting: [count(now.requests.waiting)],
    tokens: [count(lately.tokens_per_s)],
    ttft: [duration(lately.ttft_s?.p90)],
    tpot: [duration(lately.tpot_s?.p90)],
    attainment: [share(within), within === null ? "" : tone(within, now.attainment_target)],
    failed: [count(lately.failed), lately.failed ? "bad" : ""],
  };
  for (const [name, [value, mark = ""]] of Object.entries(tiles)) {
    const figure = byId("tiles").querySelector(`[data-of="${name}"] b`);
    say(figure, value);
    figure.className = `tone ${mark}`;
  }
}

async function drain(worker, isDraining) {
  const order = isDraining ? "cancel-drain" : "drain";
  if (!(await allowed(order, { worker }))) return;
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
    say(byId("complaint"), words("words", "expected", { most: fleet.max_workers }));
    byId("scale-to").focus();
    return;
  }
  const before = wantedOf(fleet);
  const change = wanted - before;
  const workers = counted(Math.abs(change), "worker");
  const happens = words("words", change > 0 ? "starts" : change < 0 ? "stops" : "keeps", { workers });
  const hands = fleet.auto ? words("words", "hands") : "";
  const kind = byId("scale-kind").value;
  const which = byId("scale-which").hidden ? "" : `${kind} `;
  if (!(await allowed("scale", { which, before, wanted, happens, hands }))) return;
  await give(() => ask("POST", "/v1/fleet/scale", { json: { workers: wanted, kind } }));
  delete byId("scale-to").dataset.typed;
}

async function automatic() {
  if (!(await allowed("auto"))) return;
  await give(() => ask("POST", "/v1/fleet/scale", { json: { auto: true } }));
}

/** Whether a person confirms an order: the question, what happens, and the button are the page's. */
function allowed(order, values = {}) {
  const says = (part) => words("orders", `${order}-${part}`, values);
  return confirmed(says("question"), says("happens"), says("button"));
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
