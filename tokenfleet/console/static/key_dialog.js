/* The dialog that asks for the API's key; however many requests wait for one, it asks once. */

import { make } from "./dom.js";

let asking = null;

/** The key, once somebody has typed it. */
export function askForKey(complaint) {
  asking ??= ask(complaint).finally(() => {
    asking = null;
  });
  return asking;
}

function ask(complaint) {
  const input = make("input", {
    id: "key",
    type: "password",
    required: true,
    autocomplete: "off",
    spellcheck: "false",
    "aria-describedby": "key-hint",
  });
  const dialog = make(
    "dialog",
    { "aria-labelledby": "key-title" },
    make(
      "form",
      { method: "dialog" },
      make("h2", { id: "key-title" }, "This API asks for a key"),
      make("p", { class: "bad", role: "alert" }, complaint),
      make("label", { for: "key" }, "Control key"),
      input,
      make(
        "p",
        { id: "key-hint", class: "soft" },
        "Kept in this tab until you close it, and sent to this server only.",
      ),
      make("p", { class: "buttons" }, make("button", { class: "primary" }, "Use this key")),
    ),
  );
  // Without a key there is nothing to see behind the dialog, so Escape does not close it.
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  document.body.append(dialog);
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(input.value);
    });
  });
}
