/* Attainment against the SLO, target by target: since the fleet began, and of late, from counts taken here. */

import { bar, chart } from "./chart.js";
import { byId, make, say } from "./dom.js";
import { count, duration, share } from "./format.js";

const KEPT_S = 600;
const LATELY_S = 300;
const BUCKET_S = 15;
const TARGETS = [
  ["ttft", "TTFT", "a dashed"],
  ["tpot", "TPOT", "b dotted"],
  ["both", "both", "c"],
];

/** Counts over time. `counts` is {ttft, tpot, both}, each {met, of}, never falling while the fleet lives. */
export class Attainment {
  #samples = []; // [seconds, counts], one for each bucket and the newest
  #drawn = "";

  /** Take the counts of a moment and show them. `slo` may be missing. */
  show(counts, slo, nowS) {
    const says = slo
      ? `TTFT within ${duration(slo.ttft_s)} and TPOT within ${duration(slo.tpot_s)}, unless a request asks for its own.`
      : "";
    say(byId("attainment-says"), says);
    this.#take(counts, nowS);
    const [fromS, then] = this.#samples.find(([at]) => at >= nowS - LATELY_S);
    const lately = (name) => [minus(counts[name], then[name]), nowS - fromS];
    byId("targets").replaceChildren(
      ...TARGETS.map(([name, label]) => tile(label, counts[name], ...lately(name))),
    );
    this.#draw(nowS);
  }

  #take(counts, nowS) {
    const last = this.#samples.at(-1);
    // A fleet that has begun anew counts from zero: what went before says nothing of it.
    if (last && counts.both.of < last[1].both.of) this.#samples = [];
    const isSameBucket = this.#samples.length > 1 && bucket(nowS) === bucket(this.#samples.at(-1)[0]);
    if (isSameBucket) this.#samples.pop();
    this.#samples.push([nowS, counts]);
    while (this.#samples[0][0] < nowS - KEPT_S) this.#samples.shift();
  }

  #draw(nowS) {
    const steps = this.#samples.slice(1).map(([at, counts], i) => [at, counts, this.#samples[i][1]]);
    const points = (name) =>
      steps.map(([at, counts, before]) => {
        const { met, of } = minus(counts[name], before[name]);
        return [(at - nowS) / 60, of > 0 ? met / of : null];
      });
    const ended = steps.map(([at, counts, before]) => [at, counts.both.of - before.both.of]);
    // Drawn anew only with a new bucket: a chart under the finger should hold still.
    const key = `${this.#samples.length} ${bucket(nowS)}`;
    if (key === this.#drawn || steps.length < 2) return;
    this.#drawn = key;
    const isOpen = byId("attainment-chart").querySelector("details")?.open ?? false;
    const values = TARGETS.flatMap(([name]) => points(name).map((p) => p[1])).filter((v) => v !== null);
    const lowest = Math.min(0.9, ...values);
    const figure = chart({
      title: "The last ten minutes",
      says: `Share of the requests that finished in each ${BUCKET_S} s, while this page is open.`,
      x: {
        name: "minutes from now",
        kind: "linear",
        domain: [Math.min(-2, points("both")[0][0]), 0],
        format: (v) => String(v),
      },
      y: {
        name: "attainment",
        kind: "linear",
        domain: [Math.max(0, lowest - 0.05), 1.01],
        format: (v) => (v > 1 ? "" : `${Math.round(v * 1000) / 10} %`),
      },
      series: TARGETS.map(([name, label, tone]) => ({
        name: label,
        kind: "line",
        tone,
        points: points(name),
      })),
      height: 180,
      data: {
        columns: [
          { name: "seconds ago" },
          { name: "finished", number: true },
          ...TARGETS.map(([, label]) => ({ name: label, number: true })),
        ],
        rows: ended.map(([at, of], i) => [
          count(nowS - at),
          count(of),
          ...TARGETS.map(([name]) => share(points(name)[i][1])),
        ]),
      },
    });
    figure.querySelector("details").open = isOpen;
    byId("attainment-chart").replaceChildren(figure);
  }
}

const bucket = (s) => Math.floor(s / BUCKET_S);
const minus = (a, b) => ({ met: a.met - b.met, of: a.of - b.of });

function tile(label, all, lately, overS) {
  const ratio = all.of ? all.met / all.of : null;
  const late = lately.of ? `${share(lately.met / lately.of)} of ${count(lately.of)}` : "none finished";
  return make(
    "li",
    {},
    make("b", {}, `${label}: ${ratio === null ? "nothing finished yet" : share(ratio)}`),
    bar(ratio, ratio === null || ratio >= 0.99 ? "good" : ratio >= 0.9 ? "warn" : "bad"),
    make("div", { class: "soft" }, `${count(all.met)} of ${count(all.of)} since the fleet began`),
    make("div", { class: "soft" }, `${late} in the last ${duration(overS, 2)}`),
  );
}
