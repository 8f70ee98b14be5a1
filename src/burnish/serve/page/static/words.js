// @ts-check
// Texts of the page in the selected language.

const root = document.documentElement;
export const language = root.lang;
/** @type {Record<string, string>} */
const words = {};
/** @param {string} [prefix] of the file's name */
const load = async (prefix = "") => {
  const response = await fetch((root.dataset.words ?? "").replace(/[^/]+$/, `${prefix}$&`));
  Object.assign(words, await response.json());
};
export const ready = load();
/** Load the texts of a page. @param {"new" | "chat"} page */
export const loadWordsOf = (page) => load(`${page}.`);
/** @type {Promise<void> | undefined} */
let ofRuns;
/** Load the texts of runs when they are needed: names of metrics and events, warnings. */
export const loadRunWords = () => (ofRuns ??= load("run."));

/** Return a text of the page with its {placeholders} filled in. @param {string} key @param {Record<string, any>} values */
export function t(key, values = {}) {
  return Object.entries(values).reduce(
    (text, [name, value]) => text.replaceAll(`{${name}}`, String(value)),
    words[key] ?? key,
  );
}
/** Return a text of the page, or undefined if the key does not exist. @param {string} key */
export const optionalText = (key) => words[key];
