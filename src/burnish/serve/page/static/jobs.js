// @ts-check
// Exports, predictions and evaluations: forms, and started jobs with their state.
import { $, $$, el, notify } from "./dom.js";
import { JobCard } from "./job_card.js";
import { Failed, get, pause, send } from "./net.js";
import { choices, findTargets } from "./targets.js";
import { ready, t } from "./words.js";

await ready;
const form = $("#job-form"),
  isExport = form.getAttribute("data-kind") === "export", // form.dataset is the field of that name
  chosen = form.getAttribute("data-target"),
  source = $("#source");
const targets = await findTargets(chosen),
  isMissing = Boolean(chosen) && !targets.has(chosen); // a link may be old: no other model is selected instead
source.replaceChildren(...choices(targets, chosen, isMissing ? "–" : undefined));
$("#no-models").hidden = targets.size > 0;
form.hidden = !targets.size;

let proposed = "";
/** Propose a folder, unless another one was entered. */
function propose() {
  if ($("#folder").value !== proposed) return;
  const name = (targets.get(source.value)?.label ?? "model").replace(/[^\w.-]+/g, "-");
  const kind = isExport ? "exports" : `evaluations/${$("input[name=kind]:checked").value}`;
  proposed = $("#folder").value = `${kind}/${name}`;
}
source.addEventListener("change", propose);
propose();
const datasets = $("#dataset") ? (await get("api/datasets")).datasets : [];
$("#dataset")?.append(
  ...datasets.map((/** @type {any} */ one, /** @type {number} */ place) =>
    el("option", { value: place }, one.name, !one.folder || one.folder === "." ? "" : ` · ${one.folder}`),
  ),
);
if ($("#no-data")) $("#no-data").hidden = datasets.length > 0;
/** The selected dataset, if the form shows one. */
const dataOfForm = () => {
  const one = $("#for-data")?.hidden === false ? datasets[Number($("#dataset").value)] : undefined;
  return { dataset: one?.name, dataset_dir: one?.folder };
};
if (isExport) {
  const settle = () => {
    if ($("#for-data")) $("#for-data").hidden = !$("#format").selectedOptions[0].hasAttribute("data-quantized");
  };
  $("#format").addEventListener("change", settle);
  settle();
  form.body = () => ({ format: $("#format").value, ...dataOfForm() });
} else {
  const settle = () => {
    const isTask = $("input[name=kind]:checked").value === "task";
    $("#for-task").hidden = !isTask;
    $("#for-data").hidden = isTask;
    propose();
  };
  for (const one of form.elements.kind) one.addEventListener("change", settle);
  settle();
  form.body = () => ({
    kind: $("input[name=kind]:checked").value,
    ...dataOfForm(),
    task: $("#task").value,
    task_dir: $("#task-dir").value,
  });
}
$("button.main", form).disabled = false;

/** Fields of the options that an error names. @type {Record<string, string>} */
const FIELDS = {
  folder: "#folder",
  format: "#format",
  dataset: "#dataset",
  eval_dataset: "#dataset",
  dataset_dir: "#dataset",
  task: "#task",
  task_dir: "#task-dir",
};
form.addEventListener("input", () => {
  $("#job-problem").textContent = "";
  for (const field of $$("[aria-invalid]", form)) field.removeAttribute("aria-invalid");
});
form.addEventListener("submit", async (/** @type {Event} */ event) => {
  event.preventDefault();
  const button = $("button.main", form);
  $("#job-problem").textContent = "";
  $("#job-wait").textContent = t("stage_starting");
  button.disabled = true;
  try {
    const { id } = await send("POST", isExport ? "api/exports" : "api/evaluations", {
      ...targets.get(source.value)?.body,
      folder: $("#folder").value,
      ...form.body(),
    });
    void watch(id);
  } catch (failed) {
    if (!(failed instanceof Failed)) throw failed;
    $("#job-problem").textContent = failed.message;
    const field = $(FIELDS[failed.option] ?? "#source");
    field?.setAttribute("aria-invalid", "true");
    field?.focus();
  } finally {
    $("#job-wait").textContent = "";
    button.disabled = false;
  }
});
/** @type {Map<string, JobCard>} */
const cards = new Map();
/** Show the current state of a job, and return whether it is still running. @param {string} id */
async function refresh(id) {
  const job = await get(`api/jobs/${id}`),
    card = cards.get(id);
  if (card) card.update(job);
  else {
    const made = new JobCard(job),
      place = $(`[data-job="${id}"]`);
    cards.set(id, made);
    if (place) place.replaceWith(made.node);
    else $("#jobs").prepend(made.node);
    made.log.scrollTop = made.log.scrollHeight;
  }
  $("#no-jobs").hidden = true;
  return job.state === "running";
}
/** Show a job until it ends. A lost connection does not end it. @param {string} id */
async function watch(id) {
  for (let isRunning = true; isRunning; await pause(1000)) {
    try {
      isRunning = await refresh(id);
    } catch (failed) {
      if (!(failed instanceof Failed)) throw failed;
      notify(failed.message);
      if ([401, 404].includes(failed.status)) return $(`[data-job="${id}"]`)?.remove();
      await pause(4000);
    }
  }
}
const { jobs } = await get("api/jobs");
for (const job of jobs.filter((/** @type {any} */ one) => (one.kind === "export") === isExport).toReversed()) {
  $("#jobs").prepend(el("section", { "data-job": job.id })); // its place in the order
  void watch(job.id);
}
