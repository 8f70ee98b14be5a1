// The list of runs: searched, followed, chosen from.
import { $, $$, duration, follow, ready, send, short, t, up } from "./base.js";

await ready;
const known = new Set($$("tr[data-run]").map((row) => row.dataset.run));
$("#search").addEventListener("input", (event) => {
  const wanted = event.target.value.toLowerCase();
  for (const row of $$("tr[data-run]")) row.hidden = !row.dataset.words.toLowerCase().includes(wanted);
});
const chosen = () => $$("tr[data-run] input:checked").map((box) => box.value);
$("#runs")?.addEventListener("change", () => {
  const link = $("#compare");
  link.hidden = chosen().length < 2;
  link.href = `${up}compare?runs=${chosen().join(",")}`;
});
for (const button of $$("[data-unqueue]")) {
  button.addEventListener("click", async () => { await send("DELETE", `api/queue/${button.dataset.unqueue}`); location.reload(); });
}
const alive = ["running", "evaluating", "saving"];
follow(() => "list=1", "", (name, run) => {
  if (name === "gone") { $(`tr[data-run="${run.run}"]`)?.remove(); return; }
  if (name !== "run") return;
  const row = $(`tr[data-run="${run.id}"]`);
  if (!row) { if (!known.has(run.id)) { known.add(run.id); location.reload(); } return; }
  const put = (column, text) => { $(`[data-is=${column}]`, row).textContent = text; };
  const state = $(".state", row);
  state.className = `state ${run.state}`;
  state.textContent = t(`state_${run.state}`);
  put("step", run.total ? `${run.step}/${run.total}` : run.step);
  for (const column of ["loss", "eval_loss", "tokens_per_s"]) put(column, short(run[column]));
  put("left_s", alive.includes(run.state) ? duration(run.left_s) : "–");
});
