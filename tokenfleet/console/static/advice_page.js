/* The advice: what the fleet has and should have, why, and the last day. Every sentence is the server's. */

import { Refused, Unreachable, ask } from "./api.js";
import { chart } from "./chart.js";
import { byId, make, say, table } from "./dom.js";
import { clock, number } from "./format.js";

const PATH = "/v1/advice";
const EVERY_MS = 5000;

async function look() {
  const connection = byId("connection");
  try {
    show(await ask("GET", PATH));
    connection.hidden = true;
  } catch (error) {
    if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
    say(connection, error.message);
    connection.hidden = false;
  }
  setTimeout(() => void look(), EVERY_MS);
}

function show({ now, charts }) {
  const [[, verdict], ...lines] = now.says;
  say(byId("verdict"), verdict);
  say(byId("facts"), now.model);
  byId("lines").replaceChildren(table(now.model, [{ name: "" }, { name: "" }], lines));
  const place = byId("charts");
  if (place.contains(document.activeElement)) return; // a chart under the finger holds still
  const open = new Set([...place.querySelectorAll("details[open]")].map((d) => d.dataset.of));
  place.replaceChildren(
    ...charts.map((one) => {
      const figure = drawn(one);
      const details = figure.querySelector("details");
      details.dataset.of = one.title;
      details.open = open.has(one.title);
      return figure;
    }),
  );
}

function drawn({ title, says, unit, series }) {
  const shown = series.filter(({ points }) => points.some((point) => point[1] !== null));
  const times = series[0].points.map(([at]) => at);
  const columns = [{ name: "at" }, ...shown.map(({ name }) => ({ name, number: true }))];
  const rows = times.map((at, i) => [
    clock(at),
    ...shown.map(({ points }) => points[i].slice(1).map((value) => number(value)).join(" – ")),
  ]);
  return shown.length
    ? chart({
        title,
        says,
        x: { name: "", kind: "linear", format: clock },
        y: { name: unit, kind: "linear", zero: true, format: (value) => number(value) },
        series: shown,
        data: { columns, rows },
        height: 150,
      })
    : make("figure", { class: "chart" }, make("h3", {}, title), make("details", {}));
}

void look();
