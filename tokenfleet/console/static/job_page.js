/* What the pages of jobs share: what stands beside the form while a job runs, and when something goes wrong. */

import { Refused, Unreachable } from "./api.js";
import { byId, make, say } from "./dom.js";
import { clock, stamp } from "./format.js";
import { recent } from "./plan_job.js";

const RECENT = 8;

/** Whether an error is the API's refusal, or its silence. */
export const isRefusal = (error) => error instanceof Refused || error instanceof Unreachable;

/** Show a banner while the API does not answer; hide it with no text. */
export function connection(text) {
  byId("connection").hidden = text === "";
  say(byId("connection"), text);
}

/** Say whether the stream of a job's events goes on, as EventStream tells it. */
export const onStream = (state, waitS) =>
  connection(state === "open" ? "" : `The control API does not answer; the plan continues there. Retrying in ${waitS} s`);

/** Say how far the job is; an answer from before is faded. */
export function waiting(text, progress = null, isCancellable = false) {
  const bar = byId("progress");
  bar.hidden = false;
  if (progress) bar.value = progress;
  else bar.removeAttribute("value");
  byId("cancel").hidden = !isCancellable;
  byId("answer").classList.toggle("old", document.getElementById("answer-title") !== null);
  say(byId("status"), text);
}

/** The job is over. */
export function settled(text) {
  byId("progress").hidden = true;
  byId("cancel").hidden = true;
  byId("answer").classList.remove("old");
  say(byId("status"), text);
}

/** Do it; what goes wrong is said beside the button, in the API's own words. */
export async function guarded(action) {
  try {
    await action();
  } catch (error) {
    if (error.name === "AbortError") return;
    settled("");
    const soon = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : "";
    say(byId("complaint"), `${error.message}.${soon}`);
    if (!isRefusal(error)) throw error;
  }
}

/** List the last jobs `of` plans or portfolios. `line(job)` gives each its address (`query`), its `name`, what it
 *  `answered` if it is done, and what is done instead of going there (`onclick`), if anything is. */
export async function listRecent(of, line) {
  let jobs = [];
  try {
    jobs = await recent(RECENT, of);
  } catch (error) {
    if (!isRefusal(error)) throw error;
  }
  byId("recent").hidden = jobs.length === 0;
  const list = byId("recent-list");
  const lines = jobs.map((job) => {
    const { query, name, answered, onclick = null } = line(job);
    return make(
      "li",
      {},
      make("a", { href: `?${query}`, onclick }, name),
      ` ${job.brief === null ? job.state : answered} `,
      make("time", { class: "soft", datetime: stamp(job.created_s) }, clock(job.created_s)),
    );
  });
  // Lines that say the same stay: replacing them would take the keyboard's focus from them.
  if (list.innerHTML !== lines.map((one) => one.outerHTML).join("")) list.replaceChildren(...lines);
}

/** Let the browser keep JSON as a file. */
export function download(name, content) {
  const text = `${JSON.stringify(content, null, 1)}\n`;
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}
