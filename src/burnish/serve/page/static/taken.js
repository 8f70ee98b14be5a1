// @ts-check
// The question what to do with a folder that contains a run.
import { $, $$ } from "./dom.js";
import { t } from "./words.js";

/** Resolves to "resume", "overwrite" or "another"; "" if the dialog was cancelled. @param {string} folder */
export function askAboutFolder(folder) {
  const dialog = $("#folder-exists");
  $("#folder-exists-text").textContent = t("taken", { folder });
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    for (const button of $$("button", dialog)) button.onclick = () => dialog.close(button.value);
    dialog.onclose = () => resolve(dialog.returnValue);
  });
}
