/* The answer: the lines and tables that the plan brings along, its charts, and what it rests on. */

import { linesOf, make, saidLines, sentence, shownTable } from "./dom.js";
import { figures } from "./figures.js";
import { counted, kind, share } from "./format.js";

/** The whole answer as elements. `tryTargets(nearest)` is what the offered targets' button does. */
export function answer(plan, tryTargets) {
  const { warnings: all, ages = [] } = plan.inputs;
  const warnings = all.filter((line) => !ages.includes(line));
  return [
    make("h2", { id: "answer-title", tabindex: "-1", class: plan.feasible ? "" : "bad" }, sentence(plan)),
    saidLines(linesOf(plan).slice(1)),
    make("p", { class: "soft" }, "docs/read-your-plan.md explains every line and plot."),
    nearest(plan, tryTargets),
    folded(counted(warnings.length, "warning"), warnings, { class: "notice" }),
    figures(plan),
    ...(plan.tables ?? []).map(shownTable),
    folded("Profiles and prices it rests on", plan.inputs.profiles.map(basis)),
  ].filter(Boolean);
}

/** The button that asks for the nearest targets instead. */
function nearest({ nearest_feasible: near }, tryTargets) {
  if (near?.ttft_s === undefined) return null;
  const button = make("button", { type: "button", onclick: () => tryTargets(near) }, "Ask for these targets");
  return make("p", { class: "buttons" }, button);
}

function folded(title, lines, attributes = {}) {
  if (lines.length === 0) return null;
  const items = lines.map((line) => make("li", {}, line));
  return make("details", attributes, make("summary", {}, title), make("ul", {}, items));
}

function basis(p) {
  const price = p.usd_per_gpu_h === null ? p.price : `$${p.usd_per_gpu_h} a GPU-hour (${p.price})`;
  return `${p.model} on ${kind(p)}: ${p.kind}, ${p.engine}, ${p.date}; mean error ${share(p.mean_relative_error)}; ${price}`;
}
