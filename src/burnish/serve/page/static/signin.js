// @ts-check
// The key may stand behind the # of a link, which no server and no log ever sees.
import { $ } from "./dom.js";
import { api } from "./net.js";
import { ready } from "./words.js";

const form = $("#sign-in");
/** @param {string} key */
async function enter(key) {
  try {
    await api("POST", "sign-in", { key });
    location.replace(form.elements.to.value || "runs");
  } catch (failed) {
    $("#wrong").textContent = failed instanceof Error ? failed.message : String(failed);
    $("#key").setAttribute("aria-invalid", "true");
    $("#key").focus();
  }
}
form.addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  void enter($("#key").value);
});
function takeGiven() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!given) return;
  history.replaceState(null, "", location.pathname + location.search);
  void ready.then(() => enter(given));
}
addEventListener("hashchange", takeGiven);
takeGiven();
