/* The workers: state and why, KV in use, what runs and waits on them, and the buttons that drain them.

   A worker's row is made once and then only its texts change, so that focus stays where it is. */

import { bar } from "./chart.js";
import { byId, make, say } from "./dom.js";
import { count, duration, percent } from "./format.js";

const COLUMNS = ["worker", "type", "state", "KV in use", "running", "waiting", "tokens", "prefix hits", "step", "action"];
const MANY = 12; // beyond them rows are a line each, and scroll
const NUMBERS = new Set(["running", "waiting", "tokens", "prefix hits", "step"]);

/** The table of workers. `onDrain(worker, isDraining)` is called by a worker's button. */
export class Workers {
  #rows = new Map();
  #body = make("tbody");
  #onDrain;
  #table;

  constructor(onDrain) {
    this.#onDrain = onDrain;
    const head = COLUMNS.map((name) =>
      make("th", { scope: "col", class: NUMBERS.has(name) ? "number" : null }, name),
    );
    this.#table = make(
      "div",
      { class: "table", tabindex: "0", role: "region", "aria-label": "Workers, one a row" },
      make("table", { class: "cards" }, make("thead", {}, make("tr", {}, head)), this.#body),
    );
    byId("workers").replaceChildren(this.#table);
  }

  /** Show these workers, and no others. */
  show(workers) {
    const names = new Set(workers.map((w) => w.worker));
    this.#table.classList.toggle("many", workers.length > MANY);
    for (const [name, row] of this.#rows) {
      if (names.has(name)) continue;
      row.element.remove();
      this.#rows.delete(name);
    }
    for (const worker of workers) {
      if (!this.#rows.has(worker.worker)) {
        const row = newRow(worker.worker, this.#onDrain);
        this.#rows.set(worker.worker, row);
        this.#body.append(row.element);
      }
      update(this.#rows.get(worker.worker), worker);
    }
  }
}

function newRow(name, onDrain) {
  const cells = Object.fromEntries(
    COLUMNS.slice(1).map((column) => [
      column,
      make("td", { class: NUMBERS.has(column) ? "number" : null, "data-name": column }),
    ]),
  );
  const state = make("span", { class: "state" });
  const reason = make("span", { class: "soft" });
  const full = make("span", { class: "soft" });
  const fill = make("span");
  const row = { cells, state, reason, full, fill, isDraining: false };
  row.button = make("button", { type: "button", onclick: () => onDrain(name, row.isDraining) });
  cells.state.append(state, make("br"), reason);
  cells["KV in use"].classList.add("kv");
  for (const column of ["state", "KV in use", "action"]) cells[column].classList.add("wide");
  cells["KV in use"].append(make("span", {}, fill, full));
  cells.action.append(row.button);
  row.element = make("tr", { "data-worker": name }, make("th", { scope: "row" }, name), Object.values(cells));
  return row;
}

function update(row, worker) {
  const load = worker.telemetry ?? null;
  say(row.cells.type, worker.kind);
  say(row.state, worker.state);
  row.state.className = `state ${["serving", "starting", "draining"].includes(worker.state) ? worker.state : ""}`;
  say(row.reason, `${duration(worker.for_s, 2)}: ${worker.reason}`);
  row.cells.state.title = row.reason.textContent;
  const used = load === null ? null : load.kv_used_blocks / Math.max(1, load.kv_total_blocks);
  row.fill.replaceChildren(bar(used, used > 0.95 ? "bad" : used > 0.8 ? "warn" : "good"));
  say(
    row.full,
    used === null
      ? "no step yet"
      : `${percent(used)} of ${count(load.kv_total_blocks * (worker.block_tokens ?? 1))} tokens`,
  );
  // What the fleet has put on it; its engine may not have begun all of them.
  say(row.cells.running, count(load?.running ?? worker.requests));
  say(row.cells.waiting, count(load?.waiting ?? null));
  say(row.cells.tokens, count(worker.tokens));
  const told = worker.prefix_tokens;
  say(row.cells["prefix hits"], told?.queried ? percent(told.hit / told.queried) : "–");
  row.cells["prefix hits"].title = told?.queried
    ? `of ${count(told.queried)} prompt tokens; predicted ${percent(told.expected / told.queried)}, ` +
      `with an unlimited cache shared by all workers ${percent(told.ideal / told.queried)}`
    : "";
  say(row.cells.step, load === null ? "–" : duration(load.step_s, 2));
  row.isDraining = worker.state === "draining";
  row.button.disabled = !["serving", "draining"].includes(worker.state);
  const verb = row.isDraining ? "Cancel drain" : "Drain";
  say(row.button, verb);
  row.button.setAttribute("aria-label", `${verb} ${worker.worker}`);
}
