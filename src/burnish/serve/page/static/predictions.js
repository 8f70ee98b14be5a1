// @ts-check
// Predictions of a run, with reference responses and the images of the prompts.
import { el, figure } from "./dom.js";
import { visible } from "./format.js";
import { get } from "./net.js";
import { smallImage } from "./small_image.js";
import { t } from "./words.js";

/** Shorten repeated image tokens to one with a count. @param {string} text */
const shortened = (text) =>
  text.replace(/(<[^<>\s]{1,40}>|\[IMG\])\1{3,}/g, (all, token) => `${token} × ${all.length / token.length} `);

/** @param {any} row */
function card(row) {
  const part = (/** @type {string} */ name, /** @type {string | undefined} */ text) =>
    text === undefined ? null : [el("h3", {}, t(name)), el("pre", {}, visible(shortened(text)) || "–")];
  const scores = ["chosen", "rejected"].filter((name) => row[name] !== undefined);
  return el(
    "section",
    { class: "completion prediction" },
    (row.images ?? []).map((/** @type {string} */ path) => smallImage(path)),
    part("prompt", row.prompt),
    part("response", row.predict),
    part("reference_response", row.label),
    scores.map((name) => el("span", { class: "tag" }, name, " ", figure(row[name]))),
  );
}
/** @param {any} place @param {string} id */
export async function showPredictions(place, id) {
  const list = el("div", { class: "stack" });
  const more = el("button", { type: "button", onclick: () => add() }, t("more_predictions"));
  const files = el("select", { "aria-label": t("tab_files"), onchange: () => begin() });
  let next = /** @type {number | null} */ (0);
  let begun = 0; // how often a file was selected
  const ask = () => get(`api/runs/${id}/predictions?offset=${next ?? 0}&file=${encodeURIComponent(files.value)}`);
  async function add() {
    const own = begun;
    more.disabled = true;
    try {
      const found = await ask();
      if (own !== begun) return null; // another file was selected meanwhile
      next = found.next;
      more.hidden = next === null;
      list.append(...found.rows.map(card));
      return found;
    } finally {
      more.disabled = false;
    }
  }
  async function begin() {
    begun += 1;
    next = 0;
    list.replaceChildren();
    const found = await add();
    if (!found) return;
    if (!found.rows.length) list.append(el("p", { class: "hint" }, t("nothing_yet")));
    if (!files.children.length)
      files.replaceChildren(...found.files.map((/** @type {string} */ name) => el("option", { value: name }, name)));
    files.hidden = files.children.length < 2;
  }
  await begin();
  place.replaceChildren(files, list, more);
}
