// @ts-check
// The field for the next message, and the buttons that send it and that stop a response.
import { $ } from "./dom.js";

/** Whether a response is being written. */
export const isBusy = () => !$("#stop-response").hidden;
/** @param {boolean} is */
export function busy(is) {
  $("#stop-response").hidden = !is;
  $("#send").hidden = is;
  for (const id of ["#retry", "#held-out"]) $(id).disabled = is;
}
/** Send messages, and empty the field after those that were accepted. @param {(text: string) => boolean} send */
export function onSubmit(send) {
  const field = $("#message");
  $("#composer").addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    const text = field.value;
    if ($("#send").hidden || $("#send").disabled) return;
    if (send(text)) field.value = "";
  });
  field.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("#composer").requestSubmit();
    }
  });
}
