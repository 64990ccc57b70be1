/* Axes: from values to pixels, and the ticks a person would choose. */

/** A scale from `domain` to `range`. `kind`: linear, log (both ends above 0), or whole (linear, ticks at integers). */
export function scale(kind, [low, high], [from, to]) {
  const forward = kind === "log" ? Math.log : (v) => v;
  const [a, b] = [forward(low), forward(high)];
  const per = b === a ? 0 : (to - from) / (b - a);
  const at = (value) => from + (forward(value) - a) * per;
  at.ticks = (most) =>
    kind === "log" ? logTicks(low, high, most) : linearTicks(low, high, most, kind === "whole");
  return at;
}

/** `[low, high]` of the finite values, with a little air; never empty. */
export function extent(values, { zero = false, log = false } = {}) {
  const finite = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
  if (!finite.length) return log ? [0.1, 1] : [0, 1];
  let low = finite.reduce((a, b) => Math.min(a, b));
  let high = finite.reduce((a, b) => Math.max(a, b));
  if (log) return low === high ? [low / 2, high * 2] : [low, high];
  if (zero) low = Math.min(0, low);
  if (low === high) [low, high] = zero && high > 0 ? [0, high] : [low - 0.5, high + 0.5];
  const air = (high - low) * 0.06;
  return [zero && low === 0 ? 0 : low - air, high + air];
}

function linearTicks(low, high, most, whole) {
  const raw = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const first = Math.ceil(low / step - 1e-9);
  const ticks = [];
  for (let i = first; i * step <= high + step * 1e-9; i += 1) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high, most) {
  for (const steps of [[1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p += 1) {
      for (const m of steps) {
        const tick = Number((m * 10 ** p).toPrecision(3));
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
      }
    }
    if (ticks.length <= most || steps.length === 1) return ticks;
  }
  return [];
}
