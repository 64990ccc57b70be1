/* What a plan is asked: the trace, and every option that the API lists, by its name in an order. As an address (to
   share), as the API's order, and from a job. */

import { usageFrom, usageOf } from "./plan_usage.js";

const UNITS_S = { us: 1e-6, ms: 1e-3, s: 1, m: 60, min: 60, h: 3600, d: 86400 };
const LONGEST = 100; // characters of a word in an address
const MOST = 32; // values of a list there

/** The question of an empty address, where it is not the API's own default. */
const FIRST = { model: "llama-3.1-70b", slo: { ttft_s: 1.6, tpot_s: 0.075 } };

/** Seconds in `1.6s` or `75ms`; null for anything else. */
export function seconds(text) {
  const match = /^\s*(\d*\.?\d+(?:e[+-]?\d+)?)\s*([a-z]+)\s*$/i.exec(text ?? "");
  const value = match && Object.hasOwn(UNITS_S, match[2]) ? Number(match[1]) * UNITS_S[match[2]] : NaN;
  return Number.isFinite(value) && value >= 0 ? Number(value.toPrecision(9)) : null;
}

/** A duration as flags take it: `75ms`, `1.6s`. */
export const span = (s) => (s < 1 ? `${Number((s * 1e3).toPrecision(6))}ms` : `${Number(s.toPrecision(6))}s`);

/** Whether a number is one that the option can be. */
const isWithin = ({ kind, bounds: { gt, ge, lt, le } }, value) =>
  Number.isFinite(value) &&
  (kind !== "count" || Number.isInteger(value)) &&
  !(value <= gt || value < ge || value >= lt || value > le);

const isSame = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** Questions made of the options that an API lists (`GET /v1/catalogue`). */
export class Questions {
  constructor(options) {
    this.options = options;
    const values = options.map(({ name, default: value, is_list }) => [name, is_list ? [] : value]);
    this.defaults = Object.freeze({ trace: { kind: "sample" }, ...Object.fromEntries(values), ...FIRST });
  }

  /** Whether an option has its default in a question. */
  isDefault(option, question) {
    return isSame(question[option.name], this.defaults[option.name]);
  }

  /** The question in an address's query; what makes no sense there is left at its default. */
  fromQuery(search) {
    const query = new URLSearchParams(search);
    const question = { ...this.defaults, trace: traceFrom(query) };
    for (const option of this.options) {
      if (option.kind === "slo") {
        const target = (name) => seconds(query.get(name)) || this.defaults.slo[`${name}_s`];
        question.slo = { ttft_s: target("ttft"), tpot_s: target("tpot") };
      } else if (option.kind !== "file" && query.has(option.key)) {
        const read = query
          .getAll(option.key)
          .slice(0, MOST)
          .map((text) => fromText(option, text))
          .filter((value) => value !== null);
        if (option.is_list) question[option.name] = read;
        else if (read.length > 0) [question[option.name]] = read;
      }
    }
    return question;
  }

  /** The query of an address that asks the same again; only what differs from the defaults. */
  toQuery(question) {
    const query = new URLSearchParams();
    const { trace } = question;
    if (trace.kind === "upload") {
      query.append("trace", `upload:${trace.id}`);
      query.append("name", trace.name);
    } else if (trace.kind === "since") query.append("trace", `since:${trace.since}`);
    else if (trace.kind === "usage") {
      query.append("trace", "usage");
      for (const [key, value] of Object.entries(trace.usage)) query.append(key, value);
    }
    query.append("model", question.model ?? "");
    query.append("ttft", span(question.slo.ttft_s));
    query.append("tpot", span(question.slo.tpot_s));
    for (const option of this.options) {
      if (["slo", "file"].includes(option.kind) || option.name === "model") continue;
      if (this.isDefault(option, question)) continue;
      const value = question[option.name];
      for (const one of option.is_list ? value : [value]) query.append(option.key, toText(option, one));
    }
    return query;
  }

  /** The question that a job answers; an option that its order does not know has its default. */
  fromJob({ question: order, trace }) {
    const source = order.trace.since
      ? { kind: "since", since: order.trace.since }
      : order.trace.sample
        ? { kind: "sample" }
        : order.trace.shape
          ? { kind: "usage", usage: usageOf(order.trace) }
          : { kind: "upload", id: order.trace.upload ?? trace.id, name: trace.name };
    const known = this.options.filter(({ name }) => Object.hasOwn(order, name) && (name !== "slo" || order.slo));
    return {
      ...this.defaults,
      ...Object.fromEntries(known.map(({ name }) => [name, order[name]])),
      trace: source,
    };
  }
}

/** The body of `POST /v1/plans`. */
export function toOrder(question) {
  const { trace } = question;
  const sources = {
    sample: { sample: true },
    upload: { upload: trace.id },
    since: { since: trace.since },
    usage: trace.usage,
  };
  return { ...question, trace: sources[trace.kind] };
}

/** A value of an option in an address; null for what it cannot be. */
function fromText(option, text) {
  if (option.kind === "switch") return text === "1";
  if (option.kind === "word") return text === "" ? null : text.slice(0, LONGEST);
  if (option.kind === "choice") return option.choices.includes(text) ? text : null;
  const value = option.kind === "duration" ? seconds(text) : text.trim() === "" ? NaN : Number(text);
  return value !== null && isWithin(option, value) ? value : null;
}

const toText = ({ kind }, value) =>
  kind === "duration" ? span(value) : kind === "switch" ? "1" : String(value);

function traceFrom(query) {
  const [kind, value] = (query.get("trace") ?? "sample").split(/:(.*)/s);
  const name = query.get("name");
  if (kind === "upload" && value)
    return { kind, id: value.slice(0, 64), name: (name ?? "trace").slice(0, 200) };
  if (kind === "since" && value) return { kind, since: value.slice(0, 20) };
  return kind === "usage" ? { kind, usage: usageFrom(query) } : { kind: "sample" };
}
