/* Decisions as a stream, newest first, each with its reason and its facts. */

import { byId, make, say } from "./dom.js";
import { bytes, clock, counted, duration, stamp } from "./format.js";

const SHOWN = 300;
const GATHER_MS = 200;
const SPEAK_EVERY_MS = 4000;
// What stands before and after a fact, where its name in the API is no word.
const WORDS = {
  source: ["from ", ""],
  worker_kind: ["type ", ""],
  migration: ["as ", ""],
  cost: ["", ""],
  bytes: ["copied ", ""],
  downtime_s: ["paused ", ""],
};
const HEAD = new Set(["id", "at_s", "kind", "reason"]);

/** The list of decisions; bounded, filtered by kind, and paused on wish. */
export class Decisions {
  #kinds = new Set();
  #held = []; // what came while paused
  #isPaused = false;
  #lastId = null;
  #unspoken = [];
  #speaking = null;

  constructor() {
    byId("kind").addEventListener("change", () => this.#filter());
    byId("pause").addEventListener("click", () => this.#pause());
  }

  /** Forget everything: the fleet behind the address is another one. */
  clear() {
    byId("decisions").replaceChildren();
    this.#held = [];
    this.#lastId = null;
    say(byId("decisions-note"), "");
  }

  /** Show an event; `isNews` when it happened while this page was open. */
  add(event, isNews) {
    if (this.#lastId !== null && event.id > this.#lastId + 1) {
      this.#put({
        kind: "",
        reason: `${counted(event.id - this.#lastId - 1, "decision")} left out: they came too fast for this page.`,
        gap: true,
      });
    }
    this.#lastId = event.id;
    this.#put(event, isNews);
    if (isNews) this.#speak(event);
  }

  #put(event, isNews = false) {
    if (this.#isPaused) {
      this.#held.push(event);
      if (this.#held.length > SHOWN) this.#held.shift();
      say(byId("decisions-note"), `Paused; ${this.#held.length} more.`);
      return;
    }
    this.#learnKind(event.kind);
    const list = byId("decisions");
    const line = lineOf(event, isNews);
    line.hidden = !this.#isWanted(event.kind);
    const isReading = list.scrollTop > 0;
    const before = list.scrollHeight;
    list.prepend(line);
    while (list.children.length > SHOWN) list.lastElementChild.remove();
    // Who has scrolled down keeps their place.
    if (isReading) list.scrollTop += list.scrollHeight - before;
  }

  #isWanted(kind) {
    const wanted = byId("kind").value;
    return wanted === "" || kind === wanted;
  }

  #learnKind(kind) {
    if (kind === "" || this.#kinds.has(kind)) return;
    this.#kinds.add(kind);
    byId("kind").append(make("option", { value: kind }, kind));
  }

  #filter() {
    for (const line of byId("decisions").children) line.hidden = !this.#isWanted(line.dataset.kind);
  }

  #pause() {
    this.#isPaused = !this.#isPaused;
    const button = byId("pause");
    button.setAttribute("aria-pressed", String(this.#isPaused));
    say(button, this.#isPaused ? "Resume" : "Pause");
    say(byId("decisions-note"), this.#isPaused ? "Paused." : "");
    if (!this.#isPaused) this.#held.splice(0).forEach((event) => this.#put(event));
  }

  /** A screen reader hears the last of a burst and how many there were, not each. */
  #speak(event) {
    this.#unspoken.push(event);
    this.#speaking ??= setTimeout(() => this.#speakNow(), GATHER_MS);
  }

  #speakNow() {
    const last = this.#unspoken.at(-1);
    const many = this.#unspoken.length > 1 ? `${counted(this.#unspoken.length, "decision")}, the last: ` : "";
    say(byId("spoken"), `${many}${last.kind} ${last.worker ?? ""}: ${last.reason}`);
    this.#unspoken = [];
    this.#speaking = setTimeout(() => {
      this.#speaking = null;
      if (this.#unspoken.length) this.#speakNow();
    }, SPEAK_EVERY_MS);
  }
}

function lineOf(event, isNews) {
  const facts = Object.entries(event).filter(([name, value]) => !HEAD.has(name) && value !== null);
  const time =
    event.at_s === undefined
      ? ""
      : make("time", { datetime: stamp(event.at_s), class: "soft" }, clock(event.at_s));
  return make(
    "li",
    { class: isNews ? "new" : null, "data-kind": event.kind, "data-id": event.id },
    time,
    make("span", { class: "kind" }, event.kind),
    make(
      "span",
      { class: "says" },
      event.reason,
      event.gap
        ? null
        : make(
            "span",
            { class: "soft" },
            ` ${facts.map(said).join(", ")}`,
          ),
    ),
  );
}

/** A fact with its name, in our words where the API's name is no word. */
function said([name, value]) {
  const [before, after] = WORDS[name] ?? [`${name} `, ""];
  return `${before}${plain(name, value)}${after}`;
}

/** A fact's value; its name says the unit. */
function plain(name, value) {
  if (value === null) return "–";
  if (typeof value === "object")
    return Object.entries(value).map(said).join(", ");
  if (typeof value === "number" && name.endsWith("_s")) return duration(value, 2);
  return name === "bytes" ? bytes(value) : String(value);
}
