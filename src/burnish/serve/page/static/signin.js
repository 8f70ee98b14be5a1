// @ts-check
// Read the key from the fragment of the URL, which is not sent to servers or written to logs.
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
    $("#sign-in-error").textContent = failed instanceof Error ? failed.message : String(failed);
    $("#key").setAttribute("aria-invalid", "true");
    $("#key").focus();
  }
}
form.addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  void enter($("#key").value);
});
function signInByLink() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!key) return;
  history.replaceState(null, "", location.pathname + location.search);
  void ready.then(() => enter(key));
}
addEventListener("hashchange", signInByLink);
signInByLink();
