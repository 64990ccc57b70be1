/* Numbers as people read them, in the words that `tokenfleet plan` prints on a terminal. */

const DASH = "–";

const figures = (value, most) =>
  Number(value.toPrecision(most)).toLocaleString("en-US", { maximumFractionDigits: 12 });
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** `97.8 ms`, `1.6 s`, `58.4 min`. */
export function duration(seconds, most = 3) {
  if (!isNumber(seconds)) return DASH;
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.9995) return `${figures(seconds * 1e3, most)} ms`;
  if (size < 120) return `${figures(seconds, most)} s`;
  return size < 7200 ? `${figures(seconds / 60, most)} min` : `${figures(seconds / 3600, most)} h`;
}

/** A share as a percentage with the digits that its distance from 100 % needs. */
export function share(value) {
  if (!isNumber(value)) return DASH;
  if (value === 0 || value === 1) return `${value * 100} %`;
  return `${(value * 100).toFixed(value < 0.9995 ? 2 : 3)} %`;
}

/** A part of a whole in plain percent: `34 %`, `0.2 %`. */
export const percent = (value) => (isNumber(value) ? `${figures(value * 100, value < 0.1 ? 1 : 2)} %` : DASH);

/** `$16.14/h`, or that no price is known. */
export function dollars(usdPerHour) {
  if (!isNumber(usdPerHour)) return "no price known";
  const text = usdPerHour.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
  return `$${text}/h`;
}

/** Three significant figures. */
export const number = (value, most = 3) => (isNumber(value) ? figures(value, most) : DASH);

/** `18,000`. */
export const count = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en-US") : DASH);

/** `1 worker`, `3 workers`. */
export const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** `29.6 KiB`. */
export function bytes(value) {
  if (!isNumber(value)) return DASH;
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  return `${figures(value / 1024 ** power, 3)} ${units[power]}`;
}

/** A Unix time as this person's clock has it. */
export const clock = (unix) => new Date(unix * 1e3).toLocaleTimeString([], { hour12: false });

/** A Unix time with its date, for machines: the `datetime` of a <time>. */
export const stamp = (unix) => new Date(unix * 1e3).toISOString();

/** A fleet's groups in a line: `1 × h100-sxm TP2 + 1 × h100-sxm TP4`. */
export const fleetLabel = (groups) =>
  groups.map((g) => `${g.workers} × ${kind(g)}${role(g.role)}`).join(" + ") || "no fleet";

/** A type of worker: its GPU, TP degree, and ranks where it has several. */
export const kind = (g) => `${g.gpu} TP${g.tp_degree}${g.ranks ? ` ${g.ranks}` : ""}`;

const role = (name) => (name && name !== "any" ? ` (${name})` : "");
