/* What is moving now, where to, how far it is, and why. */

import { byId, make } from "./dom.js";
import { bytes, count } from "./format.js";

/** Show the open moves. */
export function showMoving(moves) {
  const list = byId("moving");
  if (!moves.length) {
    list.replaceChildren(make("li", { class: "soft" }, "Nothing is moving."));
    return;
  }
  list.replaceChildren(...moves.map((move) => make("li", {}, make("b", {}, `${move.source ?? "the queue"} → ${move.target}`), ` ${says(move)}`)));
}

function says(move) {
  const copied = move.stages_tokens.reduce((sum, tokens) => sum + tokens, 0);
  const parts = [`request ${move.request}`, `by ${move.mode}`, move.outcome];
  if (copied) parts.push(`${count(copied)} tokens copied in ${move.stages_tokens.length} rounds`);
  if (move.bytes) parts.push(bytes(move.bytes));
  const why = move.why || move.reason;
  return parts.join(", ") + (why ? `. Why: ${why}` : "");
}
