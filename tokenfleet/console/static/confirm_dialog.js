/* "Are you sure?", in words that say what will happen. */

import { make } from "./dom.js";

/** Whether the person agrees; Escape and Cancel are no. Focus goes back to where it was. */
export function confirmed(title, says, verb) {
  const dialog = make(
    "dialog",
    { "aria-labelledby": "confirm-title", "aria-describedby": "confirm-says" },
    make(
      "form",
      { method: "dialog" },
      make("h2", { id: "confirm-title" }, title),
      make("p", { id: "confirm-says" }, says),
      make(
        "p",
        { class: "buttons" },
        make("button", { value: "no", autofocus: true }, "Cancel"),
        make("button", { value: "yes", class: "primary" }, verb),
      ),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
  });
}
