/* The workers: state and why, KV in use, what runs and waits on them, and the buttons that drain them.

   Its words are the fleet's. A worker's row is made once and then only its texts change, so that focus stays. */

import { bar } from "./chart.js";
import { byId, make, say, words } from "./dom.js";

const COLUMNS = ["worker", "kind", "state", "kv", "running", "waiting", "tokens", "prefix_hits", "step"];
const NOTED = ["state", "kv"]; // with a note below
const MANY = 12; // beyond them rows are a line each, and scroll
const NUMBERS = new Set(["running", "waiting", "tokens", "prefix_hits", "step"]);

const side = (name) => (NUMBERS.has(name) ? "number" : null);

/** The table of workers. `onDrain(worker, isDraining)` is called by a worker's button. */
export class Workers {
  #rows = new Map();
  #head = make("tr");
  #body = make("tbody");
  #names = {};
  #onDrain;
  #table;

  constructor(onDrain) {
    this.#onDrain = onDrain;
    this.#table = make(
      "div",
      { class: "table", tabindex: "0", role: "group", "aria-labelledby": "workers-title" },
      make("table", { class: "cards" }, make("thead", {}, this.#head), this.#body),
    );
    byId("workers").replaceChildren(this.#table);
  }

  /** Show these workers, and no others, in the words that the fleet says of them. */
  show(workers, says) {
    if (!this.#head.children.length) {
      this.#names = { ...says.columns, action: words("words", "action") };
      const shown = [...COLUMNS, "action"];
      this.#head.append(...shown.map((name) => make("th", { scope: "col", class: side(name) }, this.#names[name])));
    }
    const present = new Set(workers.map((w) => w.worker));
    this.#table.classList.toggle("many", workers.length > MANY);
    for (const [name, row] of this.#rows) {
      if (present.has(name)) continue;
      row.element.remove();
      this.#rows.delete(name);
    }
    workers.forEach((worker, i) => {
      if (!this.#rows.has(worker.worker)) {
        const row = newRow(worker.worker, this.#names, this.#onDrain);
        this.#rows.set(worker.worker, row);
        this.#body.append(row.element);
      }
      update(this.#rows.get(worker.worker), worker, says.workers[i]);
    });
  }
}

function newRow(name, names, onDrain) {
  const cells = Object.fromEntries(
    [...COLUMNS.slice(1), "action"].map((column) => [
      column,
      make("td", { class: side(column), "data-name": names[column] }),
    ]),
  );
  const state = make("span", { class: "state" });
  const notes = Object.fromEntries(NOTED.map((column) => [column, make("span", { class: "soft" })]));
  const fill = make("span");
  const row = { cells, state, notes, fill, isDraining: false };
  row.button = make("button", { type: "button", onclick: () => onDrain(name, row.isDraining) });
  cells.state.append(state, make("br"), notes.state);
  cells.kv.classList.add("kv");
  for (const column of [...NOTED, "action"]) cells[column].classList.add("wide");
  cells.kv.append(make("span", {}, fill, notes.kv));
  cells.action.append(row.button);
  row.element = make("tr", { "data-worker": name }, make("th", { scope: "row" }, name), Object.values(cells));
  return row;
}

function update(row, worker, says) {
  const load = worker.telemetry ?? null;
  for (const column of COLUMNS.slice(1)) if (!NOTED.includes(column)) say(row.cells[column], says[column] ?? "–");
  for (const column of NOTED) say(row.notes[column], says[`${column}_note`]);
  row.cells.prefix_hits.title = says.prefix_hits_note ?? "";
  say(row.state, says.state);
  row.state.className = `state ${["serving", "starting", "draining"].includes(says.state) ? says.state : ""}`;
  row.cells.state.title = says.state_note;
  const used = load === null ? null : load.kv_used_blocks / Math.max(1, load.kv_total_blocks);
  row.fill.replaceChildren(bar(used, used > 0.95 ? "bad" : used > 0.8 ? "warn" : "good"));
  row.isDraining = worker.state === "draining";
  row.button.disabled = !["serving", "draining"].includes(worker.state);
  const verb = words("orders", row.isDraining ? "cancel-drain-button" : "drain-button");
  say(row.button, verb);
  row.button.setAttribute("aria-label", `${verb} ${worker.worker}`);
}
