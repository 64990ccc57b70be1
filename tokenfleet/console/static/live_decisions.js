/* Decisions as a stream, newest first, each with its reason and its facts. */

import { byId, make, say, words } from "./dom.js";
import { clock, count, stamp } from "./format.js";

const SHOWN = 300;
const GATHER_MS = 200;
const SPEAK_EVERY_MS = 4000;

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
        reason: words("words", "missed", { count: count(event.id - this.#lastId - 1) }),
        says: [],
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
      say(byId("decisions-note"), words("words", "held", { count: count(this.#held.length) }));
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
    say(button, words("words", this.#isPaused ? "resume" : "pause"));
    say(byId("decisions-note"), this.#isPaused ? words("words", "paused") : "");
    if (!this.#isPaused) this.#held.splice(0).forEach((event) => this.#put(event));
  }

  /** A screen reader hears the last of a burst and how many there were, not each. */
  #speak(event) {
    this.#unspoken.push(event);
    this.#speaking ??= setTimeout(() => this.#speakNow(), GATHER_MS);
  }

  #speakNow() {
    const last = this.#unspoken.at(-1);
    const many = this.#unspoken.length;
    const burst = many > 1 ? words("words", "burst", { count: count(many) }) : "";
    say(byId("spoken"), `${burst}${last.kind} ${last.worker ?? ""}: ${last.reason}`);
    this.#unspoken = [];
    this.#speaking = setTimeout(() => {
      this.#speaking = null;
      if (this.#unspoken.length) this.#speakNow();
    }, SPEAK_EVERY_MS);
  }
}

function lineOf(event, isNews) {
  const time =
    event.at_s === undefined
      ? ""
      : make("time", { datetime: stamp(event.at_s), class: "soft" }, clock(event.at_s));
  return make(
    "li",
    { class: isNews ? "new" : null, "data-kind": event.kind, "data-id": event.id },
    time,
    make("span", { class: "kind" }, event.kind),
    make("span", { class: "says" }, event.reason, make("span", { class: "soft" }, event.says.join("; "))),
  );
}
