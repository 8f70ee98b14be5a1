// Take a model away: what, where to, and the lines that serve it afterwards.
import { $, copy, el, get, plain, ready, send, t } from "./base.js";

await ready;
const targets = new Map(), { runs } = await get("api/runs");
for (const run of runs.filter((one) => one.maker === "burnish")) {
  targets.set(run.id, [run.name, { run: run.id }]);
  for (const step of (await get(`api/runs/${run.id}`)).checkpoints.toReversed().slice(0, 8)) targets.set(`${run.id}/${step}`, [`${run.name} / checkpoint-${step}`, { run: run.id, checkpoint: step }]);
}
const source = $("#source"), form = $("#export");
source.append(...[...targets].map(([value, [label]]) => el("option", { value, selected: value === form.dataset.target }, label)));
const propose = () => { $("#folder").value = `exports/${(targets.get(source.value)?.[0] ?? "model").replace(/[^\w.-]+/g, "-")}`; };
source.addEventListener("change", propose);
propose();
$("button", form).disabled = false;

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  $("#folder-problem").textContent = "";
  try {
    const { id } = await send("POST", "api/exports", { ...targets.get(source.value)?.[1], folder: $("#folder").value, format: $("#format").value });
    $("#progress-box").hidden = false;
    await until(id);
  } catch (failed) {
    $("#folder-problem").textContent = failed.message;
    $("#folder").setAttribute("aria-invalid", "true");
    $("#folder").focus();
  }
});
async function until(id) {
  for (;;) {
    const found = await get(`api/exports/${id}`);
    $("#export-text").textContent = plain(found.text);
    $("#export-state").textContent = t({ running: "exporting", done: "export_done", failed: "export_failed" }[found.state]);
    if (found.state !== "running") {
      $("#export-lines").replaceChildren(...found.lines.map((line) => el("p", { class: "row" }, el("code", {}, line), el("button", { type: "button", onclick: () => copy(line) }, t("copy")))));
      return;
    }
    await new Promise((resolve) => { setTimeout(resolve, 700); });
  }
}
