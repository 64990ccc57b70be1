/* The plots that an answer brings along: their words, axes, series and numbers are the server's. */

import { chart } from "./chart.js";
import { figureColumns, make } from "./dom.js";
import { number } from "./format.js";

/** Every plot of a plan or a portfolio; older ones have none. */
export const figures = ({ figures: all = [] }) => make("div", { class: "charts" }, all.map(drawn));

const drawn = ({ title, caption, x, y, series, columns, rows, marks, wide }) =>
  chart({
    title,
    says: caption,
    x: axis(x),
    y: axis(y),
    series,
    marks: marks.map(([across, at, name]) => ({ axis: across, at, name })),
    data: { columns: figureColumns(columns, rows), rows },
    wide,
  });

function axis({ name, low, high, ticks, log, whole }) {
  const texts = new Map(ticks);
  return {
    name,
    kind: log ? "log" : whole ? "whole" : "linear",
    domain: low === null || high === null ? undefined : [low, high],
    zero: low === 0,
    ticks: ticks.length ? ticks.map(([at]) => at) : undefined,
    format: (value) => texts.get(value) ?? number(value, 6),
  };
}
