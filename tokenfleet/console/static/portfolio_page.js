/* The portfolio page: its file, the job made of it, and the answer as tables and a chart. */

import { ask } from "./api.js";
import { byId, linesOf, make, saidLines, say, sentence, shownTable } from "./dom.js";
import { figures } from "./figures.js";
import { counted, dollars, percent } from "./format.js";
import { download, guarded, listRecent, onStream, settled, waiting } from "./job_page.js";
import { cancel, followed, sendTrace } from "./plan_job.js";

const OF = "portfolios";
const SAMPLE = "sample_trace.csv";

let following = ""; // the id of the job being waited for
let shown = null; // the answer

async function start() {
  byId("question").addEventListener("submit", async (event) => {
    event.preventDefault();
    byId("submit").disabled = true;
    await guarded(plan);
    byId("submit").disabled = false;
  });
  const read = async (file) => (byId("text").value = await file.text());
  byId("file").addEventListener("change", () => [...byId("file").files].forEach(read));
  byId("cancel").addEventListener("click", () => guarded(() => cancel(following, OF)));
  byId("download").addEventListener("click", () => download("portfolio.json", shown));
  window.addEventListener("popstate", () => location.reload());
  const id = new URLSearchParams(location.search).get("job");
  if (id === null) await showRecent();
  else await guarded(() => watch(id.slice(0, 64)));
  byId("submit").disabled = false;
}

/** List the last portfolios: by their models, or until these are planned by their traces. */
const showRecent = () =>
  listRecent(OF, ({ id, brief, question }) => ({
    query: `job=${id}`,
    name: (brief?.models ?? Object.keys(question.traces)).join(", "),
    answered: dollars(brief?.usd_per_hour),
  }));

async function plan() {
  const text = byId("text").value;
  const order = { portfolio: text, traces: {}, files: {} };
  for (const file of byId("files").files) {
    const name = namedIn(text, file.name) ?? file.name;
    waiting(`Sending ${name}`);
    if (/\.ya?ml$/i.test(name)) order.files[name] = await file.text();
    else order.traces[name] = { upload: (await sendTrace(file)).id };
  }
  const sample = namedIn(text, SAMPLE);
  if (sample) order.traces[sample] ??= { sample: true };
  const { id } = await ask("POST", `/v1/${OF}`, { json: order });
  history.pushState(null, "", `?job=${id}`);
  await watch(id);
}

/** A file's name as the portfolio has it, with the folders before it: a browser gives the last part alone. */
function namedIn(text, name) {
  const words = text.split(/[\s,[\]{}"']+/);
  return words.find((word) => word === name || word.endsWith(`/${name}`));
}

/** Wait for a job, and show what it says. */
async function watch(id) {
  following = id;
  say(byId("complaint"), "");
  const onChange = (job) => {
    byId("text").value = job.question.portfolio;
    const left = job.progress ? `, ${percent(job.progress)}` : "";
    waiting(`${job.state === "queued" ? "Queued" : "Planning"}: ${job.says}${left}`, job.progress, true);
  };
  await showRecent();
  const job = await followed(id, { onChange, onState: onStream }, OF);
  await showRecent();
  if (job.portfolio === null) {
    settled(job.state === "cancelled" ? "Cancelled." : "");
    say(byId("complaint"), job.error ?? "");
    return;
  }
  shown = job.portfolio;
  byId("answer").replaceChildren(...answer(shown));
  settled(`Planned: ${sentence(shown)}.`);
  byId("take").hidden = false;
  document.title = `${sentence(shown)} · Tokenfleet`;
  byId("answer-title").focus();
}

function answer(plan) {
  return [
    make("h2", { id: "answer-title", tabindex: "-1" }, sentence(plan)),
    saidLines(linesOf(plan).slice(1)),
    ...(plan.tables ?? []).map(shownTable),
    figures(plan),
    notes(plan.warnings),
  ].filter(Boolean);
}

/** What to know of prices and profiles; it changes no figure above. */
function notes(lines) {
  if (lines.length === 0) return null;
  return make(
    "details",
    { class: "notice" },
    make("summary", {}, counted(lines.length, "note")),
    make("ul", {}, lines.map((text) => make("li", {}, text))),
  );
}

void guarded(start);
