/* The answers that stand in for a trace: users, requests a day or a rate, and a published shape of use. */

import { byId, make, say } from "./dom.js";
import { fieldOf } from "./plan_fields.js";

const LONGEST = 40; // characters of a shape in an address

/** The fields, by their names in an order; what is left empty is the API's own default. */
const ANSWERS = [
  { key: "users", kind: "count", label: "users a day", help: "Requests a user are assumed.", bounds: { le: 1e10 } },
  { key: "requests_per_day", kind: "number", label: "or requests a day", help: "In place of users." },
  { key: "request_rate", kind: "number", label: "or requests per second", help: "Of the busiest hour." },
  { key: "shape", kind: "choice", label: "shape of use", help: "Where its lengths and cache hits come from." },
  { key: "growth", kind: "number", label: "growth", help: "0.3 plans for 30 % more traffic." },
  { key: "peak", kind: "number", label: "busiest hour over the day’s mean", help: "1.8 if left empty." },
  { key: "prompt_tokens", kind: "number", label: "mean tokens of a prompt", help: "As billed; empty: the shape’s." },
  { key: "output_tokens", kind: "number", label: "mean tokens of an answer", help: "As billed; empty: the shape’s." },
];

/** Fields in `place`. `value` is what was answered. `refused(line)` puts a refusal beside the field that it names. */
export function usageFields(place, shapes, changed) {
  const about = Object.entries(shapes).map(([name, what]) => `${name}: ${what}`);
  const fields = ANSWERS.map((answer) => {
    const help = answer.key === "shape" ? `${about.join("; ")}.` : answer.help;
    const option = { bounds: {}, ...answer, help, is_list: false, choices: Object.keys(shapes) };
    option.default = answer.key === "shape" ? option.choices[0] : null;
    const field = fieldOf(option, changed);
    field.element.append(make("small", { id: `${answer.key}-refusal`, class: "bad" }));
    return { key: answer.key, field };
  });
  place.append(...fields.map(({ field }) => field.element));
  place.addEventListener("input", () => {
    for (const { key } of fields) say(byId(`${key}-refusal`), "");
  });
  return {
    get value() {
      return given((key) => fields.find((one) => one.key === key).field.value);
    },
    set value(usage) {
      for (const { key, field } of fields) field.value = usage[key] ?? null;
    },
    refused(line) {
      const named = fields.find(({ key }) => line.startsWith(`${key}: `));
      if (named === undefined) return;
      say(byId(`${named.key}-refusal`), line.slice(named.key.length + 2));
      byId(named.key).focus();
    },
  };
}

/** The answers that an address has; what makes no sense there is left out. */
export const usageFrom = (query) =>
  given((key) => {
    const text = query.get(key) ?? "";
    if (key === "shape") return text.slice(0, LONGEST) || null;
    return text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : null;
  });

/** The answers of an order, which names those that were not given as well. */
export const usageOf = (order) => given((key) => order[key]);

function given(read) {
  const answers = ANSWERS.map(({ key }) => [key, read(key) ?? null]);
  return Object.fromEntries(answers.filter(([, value]) => value !== null));
}
