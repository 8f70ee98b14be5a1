// @ts-check
// Why a run of the list failed.
import { $, el } from "./dom.js";
import { language, loadRunWords } from "./words.js";

/** Show why a run failed, or "". @param {any} row @param {string} text */
export function showProblem(row, text) {
  const cell = $("th", row);
  if (!cell || (cell.dataset.problem ?? "") === text) return;
  cell.dataset.problem = text;
  $(".problem", cell)?.remove();
  if (!text) return;
  const shown = el("small", { class: "problem", title: text }, text);
  cell.append(shown);
  if (language !== "en")
    void Promise.all([import("./panels.js"), loadRunWords()]).then(([{ usualSentence }]) => {
      shown.textContent = shown.title = usualSentence(text);
    });
}
