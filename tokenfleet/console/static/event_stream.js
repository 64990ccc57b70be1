/* Server-sent events over fetch. EventSource cannot send a key, and does not say when it will try again. */

import { Refused, Unreachable, send } from "./api.js";

const QUIET_S = 45; // the server sends a comment every 15 s, so this long a silence is a dead connection
const WAITS_S = [0.5, 1, 2, 4];

/** The events in a stream's text, piece by piece. Lines end in LF, CR LF or CR. */
export class EventParser {
  #rest = "";
  #event = { id: null, name: "message", data: [] };

  /** The events that `text` completes. */
  *take(text) {
    this.#rest += text;
    const lines = this.#rest.split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      const event = this.#line(line);
      if (event !== null) yield event;
    }
  }

  #line(line) {
    if (line === "") {
      const { id, name, data } = this.#event;
      this.#event = { id: null, name: "message", data: [] };
      return data.length ? { id, name, data: data.join("\n") } : null;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "id") this.#event.id = value;
    else if (field === "event") this.#event.name = value;
    else if (field === "data") this.#event.data.push(value);
    return null;
  }
}

/** Follow `path` for ever, or until `onEvent` returns true or `signal` is aborted.
 *
 *  After a break it goes on behind the last event it saw. `onState` hears "open" and ("lost", seconds).
 */
export class EventStream {
  lastId = null;
  #connection = null;
  #wakeUp = () => {};

  constructor(path, { onEvent, onState = () => {}, signal = null }) {
    this.path = path;
    this.onEvent = onEvent;
    this.onState = onState;
    this.signal = signal;
  }

  /** Connect anew; from the beginning when the server has begun anew. */
  restart(fromTheBeginning) {
    if (fromTheBeginning) this.lastId = null;
    this.#connection?.abort();
    this.#wakeUp();
  }

  /** Runs until the stream is over. Raises Refused for what trying again cannot mend. */
  async run() {
    for (let tries = 0; !this.signal?.aborted; tries += 1) {
      try {
        if (await this.#once(() => (tries = 0))) return;
      } catch (error) {
        const isPassing =
          error instanceof Unreachable || error.name === "AbortError" || error instanceof TypeError;
        const isBusy = error instanceof Refused && (error.status === 429 || error.status >= 500);
        if (!isPassing && !isBusy) throw error;
      }
      if (this.signal?.aborted) return;
      const waitS = WAITS_S[Math.min(tries, WAITS_S.length - 1)];
      this.onState("lost", waitS);
      await new Promise((resolve) => {
        this.#wakeUp = resolve;
        setTimeout(resolve, waitS * 1e3);
      });
    }
  }

  /** One connection; true when `onEvent` wants no more. */
  async #once(onOpen) {
    const connection = (this.#connection = new AbortController());
    const end = () => connection.abort();
    this.signal?.addEventListener("abort", end);
    let watchdog = null;
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(end, QUIET_S * 1e3);
    };
    try {
      const headers = { accept: "text/event-stream" };
      if (this.lastId !== null) headers["last-event-id"] = this.lastId;
      alive();
      const reply = await send("GET", this.path, { headers, signal: connection.signal });
      this.onState("open");
      onOpen();
      const parser = new EventParser();
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return false;
        alive();
        for (const event of parser.take(value)) {
          if (event.id !== null) this.lastId = event.id;
          if (this.onEvent(event) === true) return true;
        }
      }
    } finally {
      clearTimeout(watchdog);
      this.signal?.removeEventListener("abort", end);
      connection.abort();
    }
  }
}
