// @ts-check
// Exports, predictions and evaluations: forms, and started jobs with their state.
import { $, $$, copy, el, figure, notify } from "./dom.js";
import { bytes, duration, plain } from "./format.js";
import { Failed, get, pause, send, up } from "./net.js";
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
if (!isExport) {
  const { datasets } = await get("api/datasets");
  $("#dataset").append(
    ...datasets.map((/** @type {any} */ one, /** @type {number} */ place) =>
      el("option", { value: place }, one.name, !one.folder || one.folder === "." ? "" : ` · ${one.folder}`),
    ),
  );
  $("#no-data").hidden = datasets.length > 0;
  const settle = () => {
    const isTask = $("input[name=kind]:checked").value === "task";
    $("#for-task").hidden = !isTask;
    $("#for-data").hidden = isTask;
    propose();
  };
  for (const one of form.elements.kind) one.addEventListener("change", settle);
  settle();
  form.body = () => {
    const one = datasets[Number($("#dataset").value)] ?? {};
    return {
      kind: $("input[name=kind]:checked").value,
      dataset: one.name,
      dataset_dir: one.folder,
      task: $("#task").value,
      task_dir: $("#task-dir").value,
    };
  };
} else form.body = () => ({ format: $("#format").value });
$("button.main", form).disabled = false;

/** Fields of the options that an error names. @type {Record<string, string>} */
const FIELDS = {
  folder: "#folder",
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
    button.disabled = false;
  }
});
/** The responses of a prediction, with the images of their prompts. @param {any} job */
function predictionsOf(job) {
  const place = el("div", { class: "predictions" });
  void import("./predictions.js").then((module) => module.showPredictions(place, job.run));
  return place;
}
/** @param {any} job */
function card(job) {
  const { done, total } = job.progress; // of a prediction: prompts or batches
  const share =
    job.state === "done"
      ? 1
      : job.expected
        ? Math.min(0.99, job.written / job.expected)
        : total
          ? done / total
          : undefined;
  const bar = el("progress", { max: 1, value: share, "aria-label": t("progress") });
  const amount = job.expected
    ? t("of_about", { done: bytes(job.written), all: bytes(job.expected) })
    : total
      ? t("done_of", { step: done, total })
      : "";
  const size = job.state === "running" && amount ? ` · ${amount}` : "";
  const line = (/** @type {string} */ text) =>
    el(
      "p",
      { class: "row line" },
      el("code", { class: "grow" }, text),
      el("button", { type: "button", onclick: () => copy(text) }, t("copy")),
    );
  const metrics = Object.entries(job.metrics).slice(0, 12);
  return el(
    "section",
    { class: "card stack job", "data-job": job.id },
    el(
      "div",
      { class: "row" },
      el("b", {}, job.name),
      el("span", { class: "tag" }, t(`job_${job.kind}`)),
      el("span", { class: "grow" }),
      el("small", { role: "status" }, `${duration(job.seconds)}${size}`),
      el("span", { class: `state ${job.state}` }, t(`state_${job.state}`)),
    ),
    job.state === "failed" ? null : bar,
    metrics.length
      ? el(
          "dl",
          { class: "tiles" },
          metrics.map(([name, value]) =>
            el("div", { class: "tile" }, el("dt", {}, name.replace(/^(eval|predict)_/, "")), figure(value, "dd")),
          ),
        )
      : null,
    job.lines.length ? el("div", { class: "job-lines" }, el("p", {}, t("export_done")), job.lines.map(line)) : null,
    job.answers ? predictionsOf(job) : null,
    el("small", { class: "mono" }, job.run ? el("a", { href: `${up}runs/${job.run}` }, job.folder) : job.folder),
    el(
      "details",
      { open: job.state !== "done" },
      el("summary", {}, t("tab_log")),
      el("pre", { class: "job-log", tabindex: 0 }, plain(job.text) || t("nothing_yet")),
    ),
  );
}
/** Show the current state of a job, and return whether it is still running. @param {string} id */
async function refresh(id) {
  const job = await get(`api/jobs/${id}`),
    shown = $(`[data-job="${id}"]`),
    node = card(job);
  if (shown) {
    const details = $("details", shown);
    if (job.state === "running" && details) $("details", node).open = details.open;
    shown.replaceWith(node);
  } else $("#jobs").prepend(node);
  $(".job-log", node).scrollTop = 1e6;
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
