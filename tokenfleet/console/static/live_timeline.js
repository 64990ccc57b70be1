/* The last half hour, from the fleet's own buckets: throughput, TTFT, TPOT, errors, and attainment by target. */

import { bar, chart } from "./chart.js";
import { byId, make, say, words } from "./dom.js";
import { clock, count, duration, number, percent, share } from "./format.js";

const MINUTES = 30;
const TARGETS = [
  ["ttft", "TTFT"],
  ["tpot", "TPOT"],
  ["both", "both"],
];

export const TIMELINE = `/v1/fleet/timeline?minutes=${MINUTES}`;

/** Tone of an attainment: as asked, up to twice the misses that were asked for, more. */
export function tone(ratio, asked) {
  if (ratio === null || ratio >= asked) return "good";
  return 1 - ratio <= 2 * (1 - asked) ? "warn" : "bad";
}

export const ratioOf = ({ met, of }) => (of ? met / of : null);

/** The charts and the attainment by target. */
export class Timeline {
  #drawn = "";

  /** Draw these buckets, unless they are the ones that stand there: a chart under the finger holds still. */
  draw({ points, bucket_s: bucketS, now_s: nowS }, slo) {
    const key = JSON.stringify([points.length, points.at(-1)?.at_s, slo]);
    if (key === this.#drawn || byId("timeline").contains(document.activeElement)) return;
    this.#drawn = key;
    // The newest bucket still fills, so its rates would read as a fall.
    const frame = { buckets: points.filter((p) => p.at_s + bucketS <= nowS), bucketS, nowS };
    const open = new Set([...byId("timeline").querySelectorAll("details[open]")].map((d) => d.dataset.of));
    const figures = [
      throughput(frame),
      latency(frame, "ttft", slo.ttft_s),
      latency(frame, "tpot", slo.tpot_s),
      errors(frame),
    ].map((parts) => {
      const figure = chart({ ...parts, x: timeAxis(frame), height: 150 });
      const details = figure.querySelector("details");
      details.dataset.of = parts.title;
      details.open = open.has(parts.title);
      return figure;
    });
    byId("timeline").replaceChildren(...figures);
  }

  /** Attainment by target: over the last minutes, coloured by the target, and since the fleet started. */
  attainment({ attainment: all, attainment_target: asked, lately, slo, classes = [] }) {
    const named = classes.map(({ name, met, of, target }) => {
      const ratio = ratioOf({ met, of });
      return words("words", "class", { name, reached: share(ratio), count: count(of), asked: percent(target) });
    });
    const targets = { ttft: duration(slo.ttft_s), tpot: duration(slo.tpot_s), asked: percent(asked) };
    const over = duration(lately.over_s, 2);
    say(byId("attainment-says"), words("words", "attainment", targets) + named.join(""));
    byId("targets").replaceChildren(
      ...TARGETS.map(([name, label]) => {
        const ratio = ratioOf(lately.attainment[name]);
        const { met, of } = lately.attainment[name];
        const since = ratioOf(all[name]);
        return make(
          "li",
          {},
          make("b", { class: `tone ${tone(ratio, asked)}` }, `${label}: ${ratio === null ? words("words", "none") : share(ratio)}`),
          bar(ratio, tone(ratio, asked)),
          make("div", { class: "soft" }, words("words", "lately", { met: count(met), of: count(of), over })),
          make(
            "div",
            { class: "soft" },
            since === null
              ? words("words", "never")
              : words("words", "since", { reached: share(since), count: count(all[name].of) }),
          ),
        );
      }),
    );
  }
}

/* The charts of a frame: {buckets, bucketS, nowS}. */

/** A chart's words, which the page has, and its table. `values` has the columns' texts of a bucket. */
function worded(frame, name, values, said = {}) {
  const { title, dataset } = byId("captions").content.querySelector(`[data-of="${name}"]`);
  const columns = dataset.columns.split(",");
  return { title, says: words("captions", name, said), unit: dataset.unit, columns, data: rows(frame, columns, values) };
}

function throughput(frame) {
  const chart = worded(frame, "throughput", (b) => [number(b.tokens_per_s), count(b.finished)]);
  return {
    ...chart,
    y: { name: chart.unit, kind: "linear", zero: true, format: (v) => number(v) },
    series: [{ name: chart.columns[0], kind: "line", tone: "a", points: series(frame, (b) => b.tokens_per_s) }],
  };
}

function latency(frame, name, targetS) {
  const field = `${name}_s`;
  const most = Math.max(0, ...frame.buckets.map((b) => b[field]?.p90 ?? 0));
  const of = (percentile) => (b) => b[field]?.[percentile] ?? null;
  const texts = (b) => ["p50", "p90", "p99"].map((percentile) => duration(of(percentile)(b)));
  const chart = worded(frame, name, texts, { target: duration(targetS) });
  const [p50, p90] = chart.columns;
  return {
    ...chart,
    y: { name: chart.unit, kind: "linear", zero: true, format: (v) => duration(v, 2) },
    series: [
      { name: p90, kind: "line", tone: "a", points: series(frame, of("p90")) },
      { name: p50, kind: "line", tone: "b dotted", points: series(frame, of("p50")) },
    ],
    // Far below its target a latency would be a flat line under it.
    marks: most > targetS / 3 ? [{ axis: "y", at: targetS, name: byId("captions").dataset.target }] : [],
  };
}

function errors(frame) {
  const most = Math.max(1, ...frame.buckets.flatMap((b) => [b.failed, b.rejected]));
  const texts = (b) => [b.failed, b.rejected, b.aborted].map(count);
  const chart = worded(frame, "errors", texts, { bucket: duration(frame.bucketS) });
  const [failed, rejected] = chart.columns;
  return {
    ...chart,
    y: { name: chart.unit, kind: "whole", domain: [0, most], format: (v) => number(v) },
    series: [
      { name: failed, kind: "line", tone: "a", points: series(frame, (b) => b.failed) },
      { name: rejected, kind: "line", tone: "b dashed", points: series(frame, (b) => b.rejected) },
    ],
  };
}

function timeAxis({ buckets, nowS }) {
  const first = buckets.length ? (buckets[0].at_s - nowS) / 60 : 0;
  return { name: byId("captions").dataset.across, kind: "linear", domain: [Math.min(-2, first), 0], format: String };
}

/** [minutes from now, value] of each bucket, with a gap where no request was: such buckets are not sent. */
function series({ buckets, bucketS, nowS }, value) {
  return buckets.flatMap((bucket, i) => {
    const point = [(bucket.at_s - nowS) / 60, value(bucket)];
    const isAfterGap = i > 0 && bucket.at_s - buckets[i - 1].at_s > 1.5 * bucketS;
    return isAfterGap ? [[point[0], null], point] : [point];
  });
}

const rows = ({ buckets }, names, values) => ({
  columns: [{ name: "at" }, ...names.map((name) => ({ name, number: true }))],
  rows: buckets.map((b) => [clock(b.at_s), ...values(b)]),
});
