/* What is moving now, where to, how far it is, and why; and what moved last, since a move is over in a blink. */

import { byId, make } from "./dom.js";
import { bytes, clock, count, duration, stamp } from "./format.js";

const REMEMBERED = 3;

/** Show the open moves. */
export function showMoving(moves) {
  const lines = moves.map((move) => line(move.source, move.target, progress(move)));
  byId("moving").replaceChildren(
    ...(lines.length ? lines : [make("li", { class: "soft" }, "No request is moving.")]),
  );
}

/** Show a move that is over, from its event. */
export function showMoved({ at_s, source, worker, reason, cost }) {
  const parts = [`: ${reason}`];
  if (cost?.bytes) parts.push(`copied ${bytes(cost.bytes)}`);
  if (typeof cost?.downtime_s === "number") parts.push(`paused ${duration(cost.downtime_s, 2)}`);
  byId("moved-title").hidden = false;
  byId("moved").prepend(
    line(
      source,
      worker,
      parts.join(", "),
      make("time", { class: "soft", datetime: stamp(at_s) }, ` ${clock(at_s)}`),
    ),
  );
  while (byId("moved").children.length > REMEMBERED) byId("moved").lastElementChild.remove();
}

/** Forget what moved: it was in another fleet. */
export function forgetMoved() {
  byId("moved-title").hidden = true;
  byId("moved").replaceChildren();
}

const line = (source, target, ...says) =>
  make("li", {}, make("b", {}, `${source ?? "the queue"} → ${target}`), ...says);

function progress(move) {
  const copied = move.stages_tokens.reduce((sum, tokens) => sum + tokens, 0);
  const parts = [`: request ${move.request_id}`, move.mode, move.outcome];
  if (copied) parts.push(`${count(copied - move.cached_tokens)} tokens copied so far`);
  if (move.bytes) parts.push(bytes(move.bytes));
  return parts.join(", ") + (move.why ? `; ${move.why}` : "");
}
