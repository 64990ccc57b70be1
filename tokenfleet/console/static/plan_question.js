/* What a plan is asked: as the form has it, as an address (to share), as the API's order, and as a command line. */

const UNITS_S = { us: 1e-6, ms: 1e-3, s: 1, m: 60, min: 60, h: 3600, d: 86400 };

/** The question of an empty address. */
export const DEFAULTS = Object.freeze({
  trace: { kind: "sample" }, // or {kind: "upload", id, name} or {kind: "since", since}
  model: "llama-3.1-70b",
  ttft_s: 1.6,
  tpot_s: 0.075,
  attainment: 0.99,
  confidence: 0.95,
  rate: 1,
  prompts: 1,
  outputs: 1,
  prices: 1,
  gpu: [],
  tp: [],
  window: "",
  max_gpus: null,
  budget: null,
  policy: "spread",
  engine: "",
  spot: false,
  reclaims_per_h: null,
  cold_start_s: null,
  drop_too_long: false,
  seed: 0,
});

/** Seconds in `1.6s` or `75ms`; null for anything else. */
export function seconds(text) {
  const match = /^\s*(\d*\.?\d+(?:e[+-]?\d+)?)\s*([a-z]+)\s*$/i.exec(text ?? "");
  const value = match && Object.hasOwn(UNITS_S, match[2]) ? Number(match[1]) * UNITS_S[match[2]] : NaN;
  return Number.isFinite(value) && value > 0 ? Number(value.toPrecision(9)) : null;
}

/** A duration as flags take it: `75ms`, `1.6s`. */
export const span = (s) => (s < 1 ? `${Number((s * 1e3).toPrecision(6))}ms` : `${Number(s.toPrecision(6))}s`);

/** The question in an address's query; what makes no sense there is left at its default. */
export function fromQuery(search) {
  const query = new URLSearchParams(search);
  const between = (name, low, high, otherwise) => {
    const value = query.has(name) && query.get(name).trim() !== "" ? Number(query.get(name)) : NaN;
    return value >= low && value <= high ? value : otherwise;
  };
  return {
    trace: traceFrom(query.get("trace"), query.get("name")),
    model: (query.get("model") ?? DEFAULTS.model).slice(0, 100),
    ttft_s: seconds(query.get("ttft")) ?? DEFAULTS.ttft_s,
    tpot_s: seconds(query.get("tpot")) ?? DEFAULTS.tpot_s,
    attainment: between("attainment", 0.01, 0.999999, DEFAULTS.attainment),
    confidence: between("confidence", 0.5, 0.999999, DEFAULTS.confidence),
    rate: between("rate", 0.001, 1000, 1),
    prompts: between("prompts", 0.001, 1000, 1),
    outputs: between("outputs", 0.001, 1000, 1),
    prices: between("prices", 0.001, 1000, 1),
    gpu: query
      .getAll("gpu")
      .slice(0, 32)
      .map((name) => name.slice(0, 100)),
    tp: query
      .getAll("tp")
      .slice(0, 32)
      .map(Number)
      .filter((n) => Number.isInteger(n) && n >= 1 && n <= 1024),
    window: (query.get("window") ?? "").slice(0, 40),
    max_gpus: between("max-gpus", 1, 1e6, null),
    budget: between("budget", 1e-6, 1e9, null),
    policy: (query.get("policy") ?? DEFAULTS.policy).slice(0, 100),
    engine: (query.get("engine") ?? "").slice(0, 20),
    spot: query.get("spot") === "1",
    reclaims_per_h: between("reclaims", 1e-6, 60, null),
    cold_start_s: seconds(query.get("cold-start")),
    drop_too_long: query.get("drop-too-long") === "1",
    seed: Math.floor(between("seed", 0, 2 ** 31 - 1, 0)),
  };
}

function traceFrom(text, name) {
  const [kind, value] = (text ?? "sample").split(/:(.*)/s);
  if (kind === "upload" && value)
    return { kind, id: value.slice(0, 64), name: (name ?? "trace").slice(0, 200) };
  if (kind === "since" && value) return { kind, since: value.slice(0, 20) };
  return { kind: "sample" };
}

/** The query of an address that asks the same again; only what differs from the defaults. */
export function toQuery(question) {
  const query = new URLSearchParams();
  const put = (name, value, otherwise) => {
    if (value !== otherwise && value !== null && value !== "") query.append(name, value);
  };
  const { trace } = question;
  if (trace.kind === "upload") {
    query.append("trace", `upload:${trace.id}`);
    query.append("name", trace.name);
  } else if (trace.kind === "since") query.append("trace", `since:${trace.since}`);
  put("model", question.model, "");
  query.append("ttft", span(question.ttft_s));
  query.append("tpot", span(question.tpot_s));
  put("attainment", question.attainment, DEFAULTS.attainment);
  put("confidence", question.confidence, DEFAULTS.confidence);
  for (const name of ["rate", "prompts", "outputs", "prices"]) put(name, question[name], 1);
  question.gpu.forEach((name) => query.append("gpu", name));
  question.tp.forEach((degree) => query.append("tp", degree));
  put("window", question.window, "");
  put("max-gpus", question.max_gpus, null);
  put("budget", question.budget, null);
  put("policy", question.policy, DEFAULTS.policy);
  put("engine", question.engine, "");
  if (question.spot) query.append("spot", "1");
  put("reclaims", question.reclaims_per_h, null);
  if (question.cold_start_s !== null) query.append("cold-start", span(question.cold_start_s));
  if (question.drop_too_long) query.append("drop-too-long", "1");
  put("seed", question.seed, 0);
  return query;
}

/** The body of `POST /v1/plans`. */
export function toOrder(question) {
  const { trace } = question;
  const sources = {
    sample: { sample: true },
    upload: { upload: trace.id },
    since: { since: trace.since },
  };
  return {
    trace: sources[trace.kind],
    model: question.model,
    slo: { ttft_s: question.ttft_s, tpot_s: question.tpot_s },
    attainment: question.attainment,
    confidence: question.confidence,
    rate_scale: question.rate,
    prompt_scale: question.prompts,
    output_scale: question.outputs,
    price_scale: question.prices,
    gpu: question.gpu,
    tp: question.tp,
    window: question.window || null,
    max_gpus: question.max_gpus,
    budget_usd_per_h: question.budget,
    policy: question.policy,
    engine: question.engine || null,
    spot: question.spot,
    reclaims_per_h: question.reclaims_per_h,
    cold_start_s: question.cold_start_s,
    drop_too_long: question.drop_too_long,
    seed: question.seed,
  };
}

/** The question that a job answers. `profiles` and `prices` of an order made elsewhere have no place in the form. */
export function fromJob({ question: order, trace }) {
  const source = order.trace.since
    ? { kind: "since", since: order.trace.since }
    : order.trace.sample
      ? { kind: "sample" }
      : { kind: "upload", id: order.trace.upload ?? trace.id, name: trace.name };
  return {
    ...DEFAULTS,
    trace: source,
    model: order.model ?? "",
    ttft_s: order.slo.ttft_s,
    tpot_s: order.slo.tpot_s,
    attainment: order.attainment,
    confidence: order.confidence,
    rate: order.rate_scale,
    prompts: order.prompt_scale ?? 1,
    outputs: order.output_scale ?? 1,
    prices: order.price_scale ?? 1,
    gpu: order.gpu,
    tp: order.tp,
    window: order.window ?? "",
    max_gpus: order.max_gpus,
    budget: order.budget_usd_per_h,
    policy: order.policy,
    engine: order.engine ?? "",
    spot: order.spot,
    reclaims_per_h: order.reclaims_per_h ?? null,
    cold_start_s: order.cold_start_s ?? null,
    drop_too_long: order.drop_too_long,
    seed: order.seed,
  };
}

/** `tokenfleet plan …` that gives the same plan; each word quoted as a shell needs it. */
export function toCommand(question) {
  const { trace } = question;
  const words = ["tokenfleet", "plan"];
  const flag = (name, value) => words.push(`--${name}`, quoted(String(value)));
  if (trace.kind === "since") flag("since", trace.since);
  else flag("trace", trace.kind === "sample" ? "examples/sample_trace.csv" : trace.name);
  flag("model", question.model);
  flag("slo", `ttft=${span(question.ttft_s)},tpot=${span(question.tpot_s)}`);
  if (question.attainment !== DEFAULTS.attainment) flag("attainment", question.attainment);
  if (question.confidence !== DEFAULTS.confidence) flag("confidence", question.confidence);
  for (const [name, value] of [
    ["rate", question.rate],
    ["prompt", question.prompts],
    ["output", question.outputs],
    ["price", question.prices],
  ]) {
    if (value !== 1) flag(`${name}-scale`, value);
  }
  question.gpu.forEach((name) => flag("gpu", name));
  question.tp.forEach((degree) => flag("tp", degree));
  if (question.window) flag("window", question.window);
  if (question.max_gpus !== null) flag("max-gpus", question.max_gpus);
  if (question.budget !== null) flag("budget-usd-per-h", question.budget);
  if (question.policy !== DEFAULTS.policy) flag("policy", question.policy);
  if (question.engine) flag("engine", question.engine);
  if (question.spot) words.push("--spot");
  if (question.reclaims_per_h !== null) flag("reclaims-per-h", question.reclaims_per_h);
  if (question.cold_start_s !== null) flag("cold-start", span(question.cold_start_s));
  if (question.drop_too_long) words.push("--drop-too-long");
  if (question.seed !== 0) flag("seed", question.seed);
  return words.join(" ");
}

const quoted = (word) =>
  /^[\w@%+=:,./-]+$/.test(word) && !word.startsWith("-") ? word : `'${word.replaceAll("'", `'\\''`)}'`;
