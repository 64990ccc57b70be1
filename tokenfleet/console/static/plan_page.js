/* The plan page: form, address, job and answer brought together. */

import { ask, offers } from "./api.js";
import { byId, say, sentence } from "./dom.js";
import { dollars, duration, fleetLabel, percent } from "./format.js";
import { connection, download, guarded, isRefusal, listRecent, onStream, settled, waiting } from "./job_page.js";
import { answer } from "./plan_answer.js";
import { PlanForm } from "./plan_form.js";
import { cancel, followed, job as jobOf, order, sendTrace } from "./plan_job.js";
import { Questions } from "./plan_question.js";

const AGAIN_S = [1, 2, 4];

let form = null;
let questions = null;
let shown = null; // the job whose answer stands on the page
let following = null; // {id, abort} of the job being waited for

async function start() {
  const known = await catalogue();
  if (known === null) {
    byId("question").hidden = true;
    byId("before").textContent =
      "This control API runs a fleet and does not plan. Start one that does with “tokenfleet api”; the fleet is on the Live page.";
    return;
  }
  questions = new Questions(known.options);
  form = new PlanForm(known, questions, onChange);
  byId("question").addEventListener("submit", (event) => {
    event.preventDefault();
    void plan();
  });
  byId("cancel").addEventListener("click", () => following?.id && guarded(() => cancel(following.id)));
  byId("copy-command").addEventListener("click", () => copy("Command", byId("command").textContent));
  byId("copy-link").addEventListener("click", () => copy("Link", location.href));
  byId("download").addEventListener("click", async () => {
    const { plan: found, id } = shown.plan ? shown : await jobOf(shown.id);
    download(`plan-${id}.json`, found);
  });
  window.addEventListener("popstate", open);
  byId("submit").disabled = false;
  await open();
}

/** What can be planned, null if this API does not plan; tried again until somebody answers. */
async function catalogue() {
  for (let tries = 0; ; tries += 1) {
    try {
      const known = (await offers("/v1/catalogue")) ? await ask("GET", "/v1/catalogue") : null;
      connection("");
      return known;
    } catch (error) {
      if (!isRefusal(error)) throw error;
      const waitS = AGAIN_S[Math.min(tries, AGAIN_S.length - 1)];
      connection(`${error.message}; trying again in ${waitS} s`);
      await new Promise((resolve) => setTimeout(resolve, waitS * 1e3));
    }
  }
}

/** Show what the address says: a question, or a job with its answer. */
async function open() {
  const query = new URLSearchParams(location.search);
  const id = query.get("job");
  if (id === null) {
    form.question = questions.fromQuery(location.search);
    onChange();
  } else if (shown?.id !== id) await guarded(() => watch(id.slice(0, 64)));
  await showRecent();
}

function onChange() {
  const { question } = form;
  say(byId("complaint"), "");
  if (question.trace.kind === "file") return;
  history.replaceState(null, "", `?${questions.toQuery(question)}`);
}

async function plan() {
  const complaint = form.complaint();
  say(byId("complaint"), complaint);
  if (complaint) return;
  following?.abort.abort();
  byId("submit").disabled = true;
  byId("result").scrollIntoView({ block: "start" });
  await guarded(async () => {
    if (form.file) {
      waiting("Sending the trace");
      form.uploaded(await sendTrace(form.file));
    }
    waiting("Asking");
    const { id } = await order(form.question).catch((refusal) => {
      form.refused(refusal.message);
      throw refusal;
    });
    history.pushState(null, "", `?${questions.toQuery(form.question)}&job=${id}`);
    await watch(id);
  });
  byId("submit").disabled = false;
}

/** Wait for a job, and show what it says. */
async function watch(id) {
  const abort = new AbortController();
  following = { id, abort };
  let isAsked = false;
  const onJob = (job) => {
    if (!isAsked) form.question = questions.fromJob(job);
    isAsked = true;
    const left = job.state === "running" ? `, ${percent(job.progress)}` : "";
    waiting(`${job.state === "queued" ? "Queued" : "Planning"}: ${job.says}${left}`, job.progress, true);
  };
  try {
    const job = await followed(id, { onChange: onJob, onState: onStream, signal: abort.signal });
    if (!abort.signal.aborted) show(job);
  } finally {
    if (following?.abort === abort) following = null;
  }
}

function show(job) {
  const { plan: found } = job;
  shown = job;
  if (found === null) {
    settled(job.state === "cancelled" ? "Cancelled." : "");
    say(byId("complaint"), job.error ?? "");
    void showRecent();
    return;
  }
  const tryTargets = ({ ttft_s, tpot_s, session_s }) => {
    form.question = { ...form.question, slo: { ttft_s, tpot_s }, ...(session_s === null ? {} : { session_s }) };
    onChange();
    void plan();
  };
  const before =
    byId("answer").contains(document.activeElement) || byId("question").contains(document.activeElement);
  byId("answer").replaceChildren(...answer(found, tryTargets));
  settled(
    `Planned in ${duration(job.finished_s - job.started_s)} (${job.simulations.toLocaleString("en-US")} simulations): ${sentence(found)}.`,
  );
  byId("command").textContent = job.command ?? "This version cannot read the order of this plan.";
  byId("own").hidden = !job.question.profiles?.length && !job.question.prices;
  byId("take").hidden = false;
  document.title = `${sentence(found)} · Tokenfleet`;
  if (before || document.activeElement === document.body) byId("answer-title").focus();
  void showRecent();
}

const showRecent = () => listRecent("plans", recentLine);

function recentLine(job) {
  const query = questions.toQuery(questions.fromJob(job));
  query.append("job", job.id);
  const { brief } = job;
  const answered = brief?.feasible ? `${fleetLabel(brief.fleet)}, ${dollars(brief.usd_per_hour)}` : "no fleet meets it";
  const { model, slo, classes = [] } = job.question;
  const targets = slo ? `TTFT ${duration(slo.ttft_s)}, TPOT ${duration(slo.tpot_s)}` : classes.join(" ");
  const onclick = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    history.pushState(null, "", `?${query}`);
    following?.abort.abort();
    void guarded(() => watch(job.id));
  };
  return { query, name: `${model ?? "own profile"}, ${targets}`, answered, onclick };
}

async function copy(what, text) {
  try {
    await navigator.clipboard.writeText(text);
    say(byId("copied"), `${what} copied.`);
  } catch {
    // Not allowed, or no secure context.
    say(byId("copied"), `This browser does not let the page copy. ${what}: ${text}`);
  }
}

void start();
