// @ts-check
// Texts of the page in the selected language.

const root = document.documentElement;
export const language = root.lang;
/** @type {Record<string, string>} */
let words = {};
export const ready = fetch(root.dataset.words ?? "")
  .then((response) => response.json())
  .then((found) => {
    words = found;
  });

/** Return a text of the page with its {placeholders} filled in. @param {string} key @param {Record<string, any>} values */
export function t(key, values = {}) {
  return Object.entries(values).reduce(
    (text, [name, value]) => text.replaceAll(`{${name}}`, String(value)),
    words[key] ?? key,
  );
}
/** Return a text of the page, or undefined if the key does not exist. @param {string} key */
export const optionalText = (key) => words[key];
