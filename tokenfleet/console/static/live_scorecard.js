/* This fleet's plan compared with what it has served; behind a button, since it replays the traffic. */

import { Refused, Unreachable, ask, offers } from "./api.js";
import { byId, say, shownTable, words } from "./dom.js";

const PATH = "/v1/plans/{job}/scorecard";

/** Show the section where the API keeps plans. */
export async function offerScorecard() {
  byId("scorecard").hidden = !(await offers(PATH));
  byId("compare").addEventListener("click", () => void compare());
}

async function compare() {
  const button = byId("compare");
  button.disabled = true;
  say(byId("scorecard-says"), words("words", "comparing"));
  try {
    show(await ask("GET", PATH.replace("{job}", "last")));
  } catch (error) {
    if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
    say(byId("scorecard-says"), `${error.message}.`);
  }
  button.disabled = false;
}

function show(card) {
  say(byId("scorecard-says"), card.says.join(" "));
  byId("scorecard-table").replaceChildren(...card.tables.map(shownTable));
}
