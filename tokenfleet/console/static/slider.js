/* A slider and a number field that say the same, each usable without the other. */

import { make } from "./dom.js";

const STEPS = 200;

/** Fill `place` with a slider over `stops` (ascending values) or, without stops, over `low`..`high` in equal ratios.
 *
 *  `unit` multiplies for people (1000 for milliseconds); the returned object's `value` is in plain units.
 *  The number field takes any value from `least` to `most`, also one between the slider's.
 */
export function slider(place, { id, name, unit = 1, suffix, low, high, stops, least, most, value, spoken }) {
  const last = stops ? stops.length - 1 : STEPS;
  const toValue = (step) => (stops ? stops[step] : nice(low * (high / low) ** (step / STEPS)));
  const toStep = (v) =>
    stops ? nearestStop(stops, v) : Math.round((Math.log(v / low) / Math.log(high / low)) * STEPS);
  const field = make("input", {
    id,
    type: "number",
    step: "any",
    min: tidy(least * unit),
    max: tidy(most * unit),
    inputmode: "decimal",
    required: true,
  });
  const range = make("input", {
    id: `${id}-slider`,
    type: "range",
    min: 0,
    max: last,
    step: 1,
    "aria-label": `${name}, slider`,
  });
  let current = value;

  const showRange = () => {
    range.value = String(Math.min(last, Math.max(0, toStep(current))));
    range.setAttribute("aria-valuetext", spoken(current));
  };
  const changed = () => place.dispatchEvent(new CustomEvent("change-value", { bubbles: true }));
  range.addEventListener("input", () => {
    current = toValue(Number(range.value));
    field.value = tidy(current * unit);
    field.removeAttribute("aria-invalid");
    range.setAttribute("aria-valuetext", spoken(current));
    changed();
  });
  field.addEventListener("input", () => {
    const typed = Number(field.value) / unit;
    const isGood = field.value.trim() !== "" && typed >= least && typed <= most;
    field.toggleAttribute("aria-invalid", !isGood);
    if (!isGood) field.setAttribute("aria-invalid", "true");
    if (isGood) current = Number(typed.toPrecision(9));
    showRange();
    changed();
  });
  place.replaceChildren(
    make("label", { for: id }, name),
    make("span", { class: "typed" }, field, make("span", { class: "soft" }, suffix)),
    range,
  );
  const self = {
    get value() {
      return current;
    },
    set value(v) {
      current = v;
      field.value = tidy(v * unit);
      field.removeAttribute("aria-invalid");
      showRange();
    },
    get complaint() {
      if (!field.hasAttribute("aria-invalid")) return "";
      return `${name}: from ${tidy(least * unit)} to ${tidy(most * unit)} ${suffix}`.trim();
    },
    focus: () => field.focus(),
  };
  self.value = value;
  return self;
}

const tidy = (value) => String(Number(value.toPrecision(8)));

/** Two significant figures: nobody means a target of 412.6 ms. */
const nice = (value) => Number(value.toPrecision(2));

function nearestStop(stops, value) {
  return stops.reduce(
    (best, stop, i) => (Math.abs(stop - value) < Math.abs(stops[best] - value) ? i : best),
    0,
  );
}
