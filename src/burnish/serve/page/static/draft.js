// @ts-check
// The values of an unsent form, kept in this tab for a reload and for the way back. Secrets are not kept.
import { notify } from "./dom.js";
import { t } from "./words.js";

const KEY = `draft ${location.pathname}${location.search}`;
/** Options that may be kept; null while the form is being prepared. @type {Set<string> | null} */
let allowed = null;

export const drop = () => sessionStorage.removeItem(KEY);
/** Keep the values from now on. @param {Record<string, any>} declared */
export function begin(declared) {
  allowed = new Set(Object.keys(declared).filter((name) => !declared[name].is_secret));
}
/** @param {Map<string, any>} values */
export function keep(values) {
  if (!allowed) return;
  try {
    sessionStorage.setItem(KEY, JSON.stringify([...values].filter(([name]) => allowed?.has(name))));
  } catch {
    drop(); // the browser's storage is full, and an older draft would be wrong
  }
}
/** Take the values that were kept, and return whether there were any. @param {(name: string, value: any) => void} set */
export function restore(set) {
  const kept = JSON.parse(sessionStorage.getItem(KEY) ?? "[]");
  for (const [name, value] of kept) set(name, value);
  const clear = () => {
    drop();
    location.reload();
  };
  if (kept.length) notify(t("draft_restored"), [t("draft_clear"), clear]);
  return kept.length > 0;
}
