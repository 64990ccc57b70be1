/* The form: filled from what the API says can be planned, read as a question, and set from one. */

import { byId, make } from "./dom.js";
import { bytes, clock, counted, duration, number } from "./format.js";
import { fieldOf } from "./plan_fields.js";
import { usageFields } from "./plan_usage.js";
import { slider } from "./slider.js";

const SLIDERS = {
  rate: {
    name: "Rate",
    suffix: "times the trace's",
    low: 0.1,
    high: 10,
    least: 0.001,
    most: 1000,
    spoken: (v) => `${number(v)} times the trace's rate`,
  },
  ttft: {
    name: "Time to first token (TTFT)",
    unit: 1000,
    suffix: "ms",
    low: 0.05,
    high: 20,
    least: 0.001,
    most: 3600,
    spoken: (v) => duration(v),
  },
  tpot: {
    name: "Time per output token (TPOT)",
    unit: 1000,
    suffix: "ms",
    low: 0.005,
    high: 0.5,
    least: 0.0005,
    most: 3600,
    spoken: (v) => duration(v),
  },
  attainment: {
    name: "Attainment: share of requests within both",
    unit: 100,
    suffix: "%",
    stops: [0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995],
    least: 0.01,
    most: 0.999999,
    spoken: (v) => `${number(v * 100, 5)} percent of requests`,
  },
  confidence: {
    name: "Confidence: probability that it is reached",
    unit: 100,
    suffix: "%",
    stops: [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99],
    least: 0.5,
    most: 0.999,
    spoken: (v) => `${number(v * 100, 4)} percent`,
  },
};

const LOOKING_BACK = { "1h": "the last hour", "1d": "the last day", "7d": "the last week" };

/** Options that have a place of their own on the page; every other gets a field under the settings. */
const PLACED = ["slo", "model", "gpu", "tp", "rate_scale", "attainment", "confidence"];

/** The form's fields over a catalogue. `changed()` is called after every change a person makes. */
export class PlanForm {
  #catalogue;
  #questions;
  #sliders = {};
  #fields = new Map(); // of the options without a place of their own, by name
  #usage; // the answers without a trace
  #upload = null; // the trace last sent, as the API has read it

  constructor(catalogue, questions, changed) {
    this.#catalogue = catalogue;
    this.#questions = questions;
    const { slo, ...first } = questions.defaults;
    const start = { rate: first.rate_scale, ttft: slo.ttft_s, tpot: slo.tpot_s, ...first };
    for (const place of document.querySelectorAll("[data-slider]")) {
      const id = place.dataset.slider;
      this.#sliders[id] = slider(place, { id, value: start[id], ...SLIDERS[id] });
    }
    options(
      byId("model"),
      catalogue.models.map((m) => [m.name, m.name]),
    );
    for (const option of questions.options.filter(({ name }) => !PLACED.includes(name))) {
      const field = fieldOf(option, changed);
      this.#fields.set(option.name, { option, ...place(option, field), field });
    }
    this.#usage = usageFields(byId("usage"), catalogue.shapes, changed);
    this.#showTraces();
    byId("model").addEventListener("change", () => this.#showKinds([], []));
    byId("trace").addEventListener("change", () => this.#showTraceFacts());
    byId("file").addEventListener("change", () => this.#showTraceFacts());
    byId("more").addEventListener("change", () => this.#showNeeded());
    for (const event of ["change", "change-value"]) byId("question").addEventListener(event, changed);
  }

  /** The question asked; its trace is {kind: "file"} while a file is chosen that has not been sent. */
  get question() {
    const ticked = (id) => [...byId(id).querySelectorAll("input:checked")].map((box) => box.value);
    const { ttft, tpot, rate, attainment, confidence } = this.#sliders;
    const others = [...this.#fields].map(([name, { option, field }]) => [
      name,
      this.#isNeeded(option) ? field.value : option.default,
    ]);
    return {
      ...this.#questions.defaults,
      ...Object.fromEntries(others),
      trace: this.#trace,
      model: byId("model").value,
      slo: { ttft_s: ttft.value, tpot_s: tpot.value },
      rate_scale: rate.value,
      attainment: attainment.value,
      confidence: confidence.value,
      gpu: ticked("gpus"),
      tp: ticked("tps").map(Number),
    };
  }

  /** Show a question; names that are not known here are left out. */
  set question(question) {
    const { trace, slo } = question;
    if (trace.kind === "upload" && this.#upload?.id !== trace.id)
      this.uploaded({ id: trace.id, name: trace.name });
    choose(byId("trace"), { since: `since:${trace.since}` }[trace.kind] ?? trace.kind);
    if (trace.kind === "usage") this.#usage.value = trace.usage;
    choose(byId("model"), question.model ?? "");
    for (const [id, value] of [
      ["ttft", slo.ttft_s],
      ["tpot", slo.tpot_s],
      ["attainment", question.attainment],
      ["confidence", question.confidence],
      ["rate", question.rate_scale],
    ]) {
      this.#sliders[id].value = value;
    }
    this.#showKinds(question.gpu, question.tp);
    for (const [name, { field }] of this.#fields) field.value = question[name];
    this.#showNeeded();
    const isSet = ({ option }) => !this.#questions.isDefault(option, question);
    if ([...this.#fields.values()].some(isSet)) byId("more").open = true;
    this.#showTraceFacts();
  }

  #isNeeded(option) {
    return !option.needs || this.#fields.get(option.needs).field.value === true;
  }

  #showNeeded() {
    for (const { option, element } of this.#fields.values()) element.hidden = !this.#isNeeded(option);
  }

  /** Remember a trace the API has taken, and choose it. */
  uploaded(summary) {
    this.#upload = summary;
    this.#showTraces();
    byId("trace").value = "upload";
    this.#showTraceFacts();
  }

  /** The file to send before planning, if one is chosen. */
  get file() {
    return byId("trace").value === "file" ? (byId("file").files[0] ?? null) : null;
  }

  /** What stops the form from being sent, in one line; the field it is about has the focus. */
  complaint() {
    for (const one of Object.values(this.#sliders)) {
      if (one.complaint) {
        one.focus();
        return one.complaint;
      }
    }
    const checked = byId("question").querySelectorAll("#more input, #usage:not([hidden]) input");
    const bad = [...checked].find((field) => !field.checkValidity());
    if (bad) {
      if (byId("more").contains(bad)) byId("more").open = true;
      bad.focus();
      return `${bad.labels[0].textContent.trim()}: ${bad.validationMessage}`;
    }
    if (byId("trace").value === "file") {
      const most = this.#catalogue.limits.upload_bytes;
      const { file } = this;
      if (file === null || file.size > most) {
        byId("file").focus();
        return file === null
          ? "Trace: choose a file"
          : `Trace: ${bytes(file.size)} is more than this API takes, ${bytes(most)}; cut it, or plan on a terminal`;
      }
    }
    return "";
  }

  /** Put the API's refusal beside the answer that it names. */
  refused(line) {
    if (byId("trace").value === "usage") this.#usage.refused(line);
  }

  get #trace() {
    const [kind, since] = byId("trace").value.split(":");
    if (kind === "usage") return { kind, usage: this.#usage.value };
    if (kind === "upload") return { kind, id: this.#upload.id, name: this.#upload.name };
    return kind === "since" ? { kind, since } : { kind };
  }

  #showTraces() {
    const { sample, history } = this.#catalogue;
    const chosen = byId("trace").value;
    const listed = [];
    if (sample) listed.push(["sample", `The sample: ${sample.name}`]);
    if (history.requests > 0) {
      for (const [since, says] of Object.entries(LOOKING_BACK))
        listed.push([`since:${since}`, `What this fleet served in ${says}`]);
    }
    if (this.#upload) listed.push(["upload", this.#upload.name]);
    listed.push(["file", "A file of mine…"], ["usage", "I have no trace…"]);
    options(byId("trace"), listed);
    choose(byId("trace"), chosen);
  }

  #showTraceFacts() {
    const { value } = byId("trace");
    byId("upload-field").hidden = value !== "file";
    byId("usage").hidden = value !== "usage";
    const known = { sample: this.#catalogue.sample, upload: this.#upload }[value];
    const facts = (t) =>
      `${counted(t.requests, "request")} in ${duration(t.duration_s)}, ${number(t.rate_rps)} req/s.`;
    const { history } = this.#catalogue;
    const kept =
      `${counted(history.requests, "request")} are kept` +
      (history.last_s ? `, the last of ${clock(history.last_s)}.` : ".");
    byId("trace-facts").textContent = known?.requests ? facts(known) : value.startsWith("since") ? kept : "";
  }

  #showKinds(gpus, tps) {
    const model = this.#catalogue.models.find((m) => m.name === byId("model").value);
    const kinds = model?.kinds ?? [];
    const price = (gpu) => this.#catalogue.gpus.find((g) => g.name === gpu)?.on_demand;
    const names = [...new Set(kinds.map((k) => k.gpu))];
    const degrees = [...new Set(kinds.map((k) => k.tp_degree))].sort((a, b) => a - b);
    const says = (gpu) =>
      price(gpu)
        ? `${gpu}, $${price(gpu).usd_per_gpu_h}/h${price(gpu).is_own ? ", your price" : ""}`
        : `${gpu}, no price known`;
    const dates = names.flatMap((gpu) => price(gpu)?.date ?? []).sort();
    byId("price-hint").textContent = dates.length ? `Prices date from ${dates[0]} to ${dates.at(-1)}.` : "";
    // An address may have the short names that the command line takes: h100 for h100-sxm.
    const isAsked = (gpu) => gpus.some((asked) => gpu === asked || gpu.startsWith(`${asked}-`));
    const box = (value, label, checked) =>
      make("label", { class: "choice" }, make("input", { type: "checkbox", value, checked }), ` ${label}`);
    byId("gpus").replaceChildren(...names.map((gpu) => box(gpu, says(gpu), isAsked(gpu))));
    byId("tps").replaceChildren(...degrees.map((tp) => box(tp, `TP${tp}`, tps.includes(tp))));
  }
}

/** Put an option's field on the page: switches below one another, all others in pairs above them. */
function place(option, { element }) {
  byId(option.kind === "switch" ? "switches" : "settings").append(element);
  return { element };
}

function options(select, listed) {
  select.replaceChildren(...listed.map(([value, text]) => make("option", { value }, text)));
}

/** Choose an option if there is such a one. */
function choose(select, value) {
  if ([...select.options].some((option) => option.value === value)) select.value = value;
}
