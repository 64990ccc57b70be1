/* Elements from plain values. Text only ever becomes text: nothing in the console parses HTML, so a name from
   the server can be as hostile as it likes. */

const SVG = "http://www.w3.org/2000/svg";
const COMMAND = /\x60((?:tokenfleet |--)[^\x60]+|serve|compare|fit)\x60/; // other backticks (x60) may be a name's own

/** An HTML element. Functions among `attributes` are listeners (`onclick`), false and null are left out. */
export function make(tag, attributes = {}, ...children) {
  const parts = children.flat(Infinity).flatMap((child) => (typeof child === "string" ? coded(child) : [child]));
  return fill(document.createElement(tag), attributes, parts);
}

/** Text with its commands and flags as code elements, where the terminal's text has backticks. */
function coded(text) {
  return text.split(COMMAND).map((part, i) => (i % 2 ? make("code", {}, part) : part));
}

/** An SVG element, in the same way. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** The element of that id; the page has it or is broken. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no #${id}`);
  return found;
}

/** The text `name` of the page's template `id`, with values for its {names}. */
export function words(id, name, values = {}) {
  const { textContent } = byId(id).content.querySelector(`[data-of="${name}"]`);
  return textContent.replace(/\{(\w+)\}/g, (_, key) => values[key]);
}

/** Set text only where it differs, so that a live region does not speak when nothing has changed. */
export function say(element, text) {
  const parts = coded(String(text ?? ""));
  const shown = parts.map((part) => part.textContent ?? part).join("");
  if (element.textContent !== shown) element.replaceChildren(...parts);
}

/** A table with a caption; `columns` are {name, number?}, `rows` lists of text or elements. */
export function table(caption, columns, rows, attributes = {}) {
  const side = (column) => (column.number ? "number" : null);
  const cell = (value, i) =>
    i === 0
      ? make("th", { scope: "row" }, value)
      : make("td", { class: side(columns[i]), "data-name": columns[i].name }, value);
  return make(
    "div",
    { class: "table", tabindex: "0", role: "region", "aria-label": caption },
    make(
      "table",
      attributes,
      make("caption", {}, caption),
      make(
        "thead",
        {},
        make(
          "tr",
          {},
          columns.map((c) => make("th", { scope: "col", class: side(c) }, c.name)),
        ),
      ),
      make(
        "tbody",
        {},
        rows.map((row) => make("tr", {}, row.map(cell))),
      ),
    ),
  );
}

const OLDER = [["Older plan", "This plan was made by an older version. Plan again to read it in words."]];

/** The (topic, text) lines of a plan or a portfolio; older ones have sentences without topics, or none. */
export const linesOf = ({ says }) => (Array.isArray(says?.[0]) ? says : OLDER);

/** The verdict in one line, for the heading and for screen readers. */
export const sentence = (plan) => linesOf(plan)[0].join(": ").replaceAll("   ", ", ");

/** The lines of an answer, each under its topic. */
export function saidLines(lines) {
  const rows = lines.map(([topic, text]) => [make("dt", {}, topic), make("dd", {}, text)]);
  return make("dl", { class: "says" }, rows);
}

/** The columns of a table; those of figures are flush right. */
export function figureColumns(columns, rows) {
  const isFigure = (i) => rows.every((row) => /^([-–?$]|\d[^x]*$)/.test(row[i]));
  return columns.map((name, i) => ({ name, number: i > 0 && isFigure(i) }));
}

/** A table that an answer brings along, under its title. */
export function shownTable({ title, columns, rows }) {
  const named = figureColumns(columns, rows);
  return make("section", {}, make("h3", {}, title), table(title, named, rows, { class: "cards" }));
}
