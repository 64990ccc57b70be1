/* What is moving now, where to, how far it is, and why; and what moved last, since a move is over in a blink. */

import { byId, make, words } from "./dom.js";
import { clock, stamp } from "./format.js";

const REMEMBERED = 3;

/** Show the open moves, a line of the fleet's words each. */
export function showMoving(lines) {
  const shown = lines.map((line) => make("li", {}, line));
  byId("moving").replaceChildren(
    ...(shown.length ? shown : [make("li", { class: "soft" }, words("words", "still"))]),
  );
}

/** Show a move that is over, from its event. */
export function showMoved({ at_s, reason, says }) {
  const time = make("time", { class: "soft", datetime: stamp(at_s) }, ` ${clock(at_s)}`);
  byId("moved-title").hidden = false;
  byId("moved").prepend(make("li", {}, make("b", {}, says[0]), `: ${[reason, ...says.slice(1)].join("; ")}`, time));
  while (byId("moved").children.length > REMEMBERED) byId("moved").lastElementChild.remove();
}

/** Forget what moved: it was in another fleet. */
export function forgetMoved() {
  byId("moved-title").hidden = true;
  byId("moved").replaceChildren();
}
