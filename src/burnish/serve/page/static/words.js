// @ts-check
// The texts of the page in the reader's language.

const root = document.documentElement;
export const language = root.lang;
/** @type {Record<string, string>} */
let words = {};
export const ready = fetch(root.dataset.words ?? "")
  .then((response) => response.json())
  .then((found) => {
    words = found;
  });

/** A text of the page, its {names} filled in. @param {string} key @param {Record<string, any>} values */
export function t(key, values = {}) {
  return Object.entries(values).reduce(
    (text, [name, value]) => text.replaceAll(`{${name}}`, String(value)),
    words[key] ?? key,
  );
}
/** A text that need not be there. @param {string} key */
export const optionalText = (key) => words[key];
