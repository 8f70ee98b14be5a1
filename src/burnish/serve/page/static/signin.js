// The key may stand behind the # of a link, which no server and no log ever sees.
import { $, api, ready } from "./base.js";

const form = $("#sign-in");
async function enter(key) {
  try {
    await api("POST", "sign-in", { key });
    location.replace(form.elements.to.value || "runs");
  } catch (failed) {
    $("#wrong").textContent = failed.message;
    $("#key").setAttribute("aria-invalid", "true");
    $("#key").focus();
  }
}
form.addEventListener("submit", (event) => { event.preventDefault(); void enter($("#key").value); });
function takeGiven() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!given) return;
  history.replaceState(null, "", location.pathname + location.search);
  void ready.then(() => enter(given));
}
addEventListener("hashchange", takeGiven);
takeGiven();
