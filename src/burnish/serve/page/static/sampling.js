// @ts-check
// Generation settings of the chat, and the speed of a response.
import { $, notify } from "./dom.js";
import { short } from "./format.js";
import { toolsOf } from "./messages.js";
import { t } from "./words.js";

const number = (/** @type {string} */ id) => ($(id).value === "" ? undefined : Number($(id).value));
/** The settings of a request; empty fields are left to the model. @param {number} again how often the response was retried */
export function sampling(again) {
  const seed = number("#seed");
  return {
    temperature: number("#temperature"),
    top_p: number("#top_p"),
    max_tokens: number("#max_tokens"),
    seed: seed === undefined ? undefined : seed + again,
  };
}
/** The entered tools; undefined, with a notification, if they are not valid. */
export function tools() {
  try {
    return toolsOf($("#tools").value);
  } catch {
    notify(t("tools_wrong"));
    return undefined;
  }
}
/** @param {number} tokens @param {number} ms of the whole response @param {number} firstMs until its first token */
export const statistics = (tokens, ms, firstMs) =>
  t("response_statistics", { tokens, rate: short((1000 * tokens) / ms), first: short(firstMs / 1000) });
