/* Fields for the options that an API lists: one for each, whatever the option; every one has its label, its help and
   its value as the API takes it. */

import { byId, make } from "./dom.js";
import { counted } from "./format.js";

const SMALLEST = 1e-6; // where a value must be above 0

const capital = (text) => text[0].toUpperCase() + text.slice(1);

/** A field of an option: `element` to place, `value` to read and to set. `changed()` once a file has been read. */
export function fieldOf(option, changed) {
  const made = { switch: switchField, choice: choiceField, file: fileField }[option.kind] ?? inputField;
  return made(option, option.is_list, changed);
}

function labelled(option, label, field) {
  const hint = `${option.key}-hint`;
  field.setAttribute("aria-describedby", hint);
  return make(
    "div",
    {},
    make("label", { for: option.key }, capital(label)),
    field,
    make("small", { id: hint, class: "soft" }, option.help),
  );
}

function switchField(option) {
  const box = make("input", { id: option.key, type: "checkbox" });
  return {
    element: make("label", { class: "choice" }, box, ` ${capital(option.help)}`),
    get value() {
      return box.checked;
    },
    set value(on) {
      box.checked = on;
    },
  };
}

function choiceField(option) {
  const unset = option.default === null ? [["", "default"]] : [];
  const listed = [...unset, ...option.choices.map((name) => [name, name])];
  const select = make("select", { id: option.key });
  select.replaceChildren(...listed.map(([value, text]) => make("option", { value }, text)));
  return {
    element: labelled(option, option.label, select),
    get value() {
      return select.value || null;
    },
    set value(value) {
      if (listed.some(([known]) => known === (value ?? ""))) select.value = value ?? "";
    },
  };
}

/** Whether items of a list have parts with commas between: `chat:ttft=1s,tpot=30ms`. */
const hasParts = (text) => text.includes("=");

function inputField(option, isList) {
  const isNumber = ["number", "count", "duration"].includes(option.kind) && !isList;
  const { gt, ge, lt, le } = option.bounds;
  const whole = option.kind === "count";
  const bounds = {
    min: ge ?? (gt === 0 ? SMALLEST : gt),
    max: le ?? (whole && lt !== undefined ? lt - 1 : lt),
    step: whole ? 1 : "any",
    inputmode: whole ? "numeric" : "decimal",
  };
  const known = Object.entries(isNumber ? bounds : {}).filter(([, value]) => value !== undefined);
  const field = make("input", {
    id: option.key,
    type: isNumber ? "number" : "text",
    autocomplete: "off",
    ...Object.fromEntries(known),
  });
  const read = (text) => (isNumber ? Number(text) : text);
  const label = option.kind === "duration" ? `${option.label}, seconds` : option.label;
  return {
    element: labelled(option, label, field),
    get value() {
      const text = field.value.trim();
      if (isList) return text === "" ? [] : text.split(hasParts(text) ? /\s+/ : /[\s,]+/);
      return text === "" ? option.default : read(text);
    },
    set value(value) {
      field.value = isList ? value.join(hasParts(value.join()) ? " " : ", ") : (value ?? "");
    },
  };
}

function fileField(option, isList, changed) {
  let texts = [];
  const field = make("input", { id: option.key, type: "file", accept: ".yaml,.yml", multiple: isList });
  const kept = make("span", {});
  const clear = make("button", { type: "button", hidden: true }, "Leave out");
  const show = (value) => {
    texts = value;
    kept.textContent = texts.length === 0 ? "" : `${counted(texts.length, "file")} to plan with `;
    clear.hidden = texts.length === 0;
  };
  field.addEventListener("change", async () => {
    show(await Promise.all([...field.files].map((file) => file.text())));
    changed();
  });
  clear.addEventListener("click", () => {
    field.value = "";
    show([]);
    byId(option.key).focus();
    changed();
  });
  const element = labelled(option, option.label, field);
  element.append(make("div", {}, kept, clear));
  return {
    element,
    get value() {
      return isList ? texts : (texts[0] ?? null);
    },
    set value(value) {
      show(isList ? value : value === null ? [] : [value]);
    },
  };
}
