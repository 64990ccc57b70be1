/* Small SVG charts, drawn at the width they have, each with its numbers in a table for people who cannot see it. */

import { make, svg, table } from "./dom.js";
import { extent, scale } from "./scale.js";

const HEIGHT = 220;
const TOP = 12;
const BOTTOM = 40;
const RIGHT = 22;
const LETTER = 6.6; // width of a letter of a tick's text, in pixels

let made = 0;

/** A <figure>.
 *
 *  `x`, `y`: {name, kind, format, domain?, zero?, ticks?}, kind as in scale.js.
 *  `series`: {name, kind, tone, points}; points are [x, y], of a band [x, low, high]; a null y is a gap.
 *            kinds: line, steps and filled steps (each y holds until the next x), band, dots, open dots, and
 *            bars with `labels` above them and `tones`, one for each.
 *  `marks`: {axis: "x" | "y", at, name}: a line across.
 *  `data`: {columns, rows} of the table under it.
 */
export function chart({ title, says, x, y, series, marks = [], data, height = HEIGHT, wide = false }) {
  made += 1;
  const id = `chart-${made}`;
  const drawing = svg("svg", {
    role: "img",
    "aria-labelledby": `${id}-title`,
    "aria-describedby": `${id}-says`,
    height,
  });
  const draw = (width) => drawing.replaceChildren(...drawn({ x, y, series, marks, width, height }));
  const figure = make(
    "figure",
    { class: wide ? "chart wide" : "chart" },
    make(
      "figcaption",
      {},
      make("h3", { id: `${id}-title` }, title),
      make("p", { id: `${id}-says`, class: "soft" }, says),
    ),
    legend(series),
    drawing,
    make("details", {}, make("summary", {}, "Numbers"), table(title, data.columns, data.rows)),
  );
  let last = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (width > 0 && width !== last) draw((last = width));
  }).observe(figure);
  return figure;
}

function legend(series) {
  const named = series.filter((one) => one.name);
  if (named.length < 2) return null;
  const swatch = (one) =>
    svg(
      "svg",
      { width: 22, height: 12, "aria-hidden": "true" },
      one.kind === "band"
        ? svg("rect", { class: `band ${one.tone}`, width: 22, height: 12 })
        : isDots(one)
          ? svg("circle", { class: dotClass(one), cx: 11, cy: 6, r: 4 })
          : svg("path", { class: `line ${one.tone}`, d: "M1 6H21" }),
    );
  return make(
    "ul",
    { class: "legend" },
    named.map((one) => make("li", {}, swatch(one), one.name)),
  );
}

const isDots = ({ kind }) => kind === "dots" || kind === "open dots";
const dotClass = ({ kind, tone }) => `dot ${tone}${kind === "dots" ? "" : " hollow"}`;

function drawn({ x, y, series, marks, width, height }) {
  const marksOn = (axis) => marks.filter((m) => m.axis === axis).map((m) => m.at);
  const xs = series.flatMap((s) => s.points.map((p) => p[0]));
  const ys = series.flatMap((s) => s.points.flatMap((p) => p.slice(1))).filter((v) => v !== null);
  const xDomain = x.domain ?? extent([...xs, ...marksOn("x")], { log: x.kind === "log", zero: x.zero });
  const yDomain = y.domain ?? extent([...ys, ...marksOn("y")], { log: y.kind === "log", zero: y.zero });
  const yTicks = distinct(scale(y.kind, yDomain, [height - BOTTOM, TOP]), 5, y.format);
  const left = Math.max(...yTicks.map((t) => y.format(t).length), 2) * LETTER + 32;
  const atX = scale(x.kind, xDomain, [left, width - RIGHT]);
  const atY = scale(y.kind, yDomain, [height - BOTTOM, TOP]);
  const widest = Math.max(...atX.ticks(6).map((t) => x.format(t).length), 2) * LETTER + 16;
  const xTicks = x.ticks
    ? fitting(x, (width - RIGHT - left) / x.ticks.length)
    : distinct(atX, Math.max(2, Math.min(8, Math.floor((width - left) / widest))), x.format);
  const middle = (TOP + height - BOTTOM) / 2;
  const frame = [
    ...yTicks.map((t) => svg("path", { class: "grid", d: `M${left} ${atY(t)}H${width - RIGHT}` })),
    ...yTicks.map((t) =>
      svg("text", { class: "tick", x: left - 8, y: atY(t) + 4, "text-anchor": "end" }, y.format(t)),
    ),
    ...xTicks.map((t) => svg("path", { class: "grid", d: `M${atX(t)} ${height - BOTTOM}v5` })),
    ...xTicks.map((t) =>
      svg(
        "text",
        { class: "tick", x: atX(t), y: height - BOTTOM + 18, "text-anchor": "middle" },
        x.format(t),
      ),
    ),
    svg(
      "text",
      { class: "axis", x: (left + width - RIGHT) / 2, y: height - 5, "text-anchor": "middle" },
      x.name,
    ),
    svg(
      "text",
      { class: "axis", transform: `translate(12 ${middle}) rotate(-90)`, "text-anchor": "middle" },
      y.name,
    ),
  ];
  return [
    ...frame,
    ...series.filter((s) => s.kind === "band" && s.points.length).map((s) => shape(s, atX, atY)),
    ...marks.map((m) => mark(m, atX, atY, { left, width, height })),
    ...series.filter((s) => s.kind !== "band" && s.points.length).map((s) => shape(s, atX, atY)),
  ];
}

/** The ticks that an axis brings along, every second or third where their texts would touch. */
function fitting({ ticks, format }, each) {
  const widest = Math.max(...ticks.map((t) => format(t).length)) * LETTER + 10;
  const step = Math.max(1, Math.ceil(widest / each));
  return ticks.filter((_, i) => i % step === 0);
}

/** The ticks of a scale, fewer where their texts would repeat: two lines must not have one name. */
function distinct(at, most, format) {
  for (let n = most; n > 1; n -= 1) {
    const ticks = at.ticks(n);
    if (new Set(ticks.map(format)).size === ticks.length) return ticks;
  }
  return at.ticks(most).filter((tick, i, all) => i === 0 || format(tick) !== format(all[i - 1]));
}

function shape({ kind, tone, points, labels, tones }, atX, atY) {
  const at = ([px, py]) => `${atX(px).toFixed(1)} ${atY(py).toFixed(1)}`;
  if (kind === "bars") {
    const [first, last] = [atX(points[0][0] - 0.3), atX(points[0][0] + 0.3)];
    const width = Math.min(last - first, 60);
    // Where the labels would touch, each keeps its number alone.
    const isTight = Math.max(...labels.map((text) => text.length)) * LETTER > (last - first) / 0.6;
    const label = (text) => (isTight ? text.split(" ")[0] : text);
    const bars = points.map(([px, py], i) => {
      const size = { x: atX(px) - width / 2, y: atY(py), width, height: Math.max(0, atY(0) - atY(py)) };
      return [
        svg("rect", { class: `fill ${tones[i] ?? tone}`, ...size }),
        svg("text", { class: "tick strong", x: atX(px), y: atY(py) - 5, "text-anchor": "middle" }, label(labels[i])),
      ];
    });
    return svg("g", {}, bars);
  }
  if (isDots({ kind })) {
    const shown = points.filter((p) => p[1] !== null);
    return svg(
      "g",
      {},
      shown.map((p) => svg("circle", { class: dotClass({ kind, tone }), cx: atX(p[0]), cy: atY(p[1]), r: 4 })),
    );
  }
  if (kind === "band") {
    const whole = points.filter((p) => p[1] !== null && p[2] !== null);
    if (whole.length === 1) {
      // One bar of uncertainty: a band of no width would be invisible.
      const [px, low, high] = whole[0];
      return svg("path", {
        class: `whisker ${tone}`,
        d: `M${at([px, low])}V${atY(high)}m-5 0h10M${atX(px) - 5} ${atY(low)}h10`,
      });
    }
    const upper = whole.map((p) => at([p[0], p[2]]));
    const lower = whole.map((p) => at([p[0], p[1]])).reverse();
    return svg("path", {
      class: `band ${tone}`,
      d: whole.length ? `M${[...upper, ...lower].join("L")}Z` : "",
    });
  }
  const isSteps = kind === "steps" || kind === "filled steps";
  let path = "";
  let pen = false;
  for (const point of points) {
    if (point[1] === null) pen = false;
    else {
      if (!pen) path += `M${at(point)}`;
      else
        path +=
          isSteps ? `H${atX(point[0]).toFixed(1)}V${atY(point[1]).toFixed(1)}` : `L${at(point)}`;
      pen = true;
    }
  }
  const line = svg("path", { class: `line ${tone}`, d: path });
  if (kind !== "filled steps") return line;
  const [first, last] = [points[0], points.at(-1)].map(([px]) => atX(px).toFixed(1));
  const floor = atY(0).toFixed(1);
  return svg("g", {}, svg("path", { class: `band ${tone}`, d: `${path}H${last}V${floor}H${first}Z` }), line);
}

function mark({ axis, at, name }, atX, atY, { left, width, height }) {
  if (axis === "y") {
    return svg(
      "g",
      {},
      svg("path", { class: "mark", d: `M${left} ${atY(at)}H${width - RIGHT}` }),
      svg(
        "text",
        {
          class: "tick strong",
          x: width - RIGHT,
          y: atY(at) + (atY(at) < TOP + 16 ? 14 : -5),
          "text-anchor": "end",
        },
        name,
      ),
    );
  }
  const right = atX(at) < width - RIGHT - name.length * LETTER - 8;
  return svg(
    "g",
    {},
    svg("path", { class: "mark", d: `M${atX(at)} ${TOP}V${height - BOTTOM}` }),
    svg(
      "text",
      {
        class: "tick strong",
        x: atX(at) + (right ? 6 : -6),
        y: TOP + 10,
        "text-anchor": right ? "start" : "end",
      },
      name,
    ),
  );
}

/** A horizontal bar, `share` of its width full; what it says must stand beside it in words. */
export function bar(share, tone) {
  const width = `${(Math.max(0, Math.min(1, share || 0)) * 100).toFixed(2)}%`;
  return svg(
    "svg",
    { class: "bar", "aria-hidden": "true", height: 10 },
    svg("rect", { class: "bar-back", width: "100%", height: 10, rx: 3 }),
    svg("rect", { class: `bar-fill ${tone}`, width, height: 10, rx: 3 }),
  );
}
