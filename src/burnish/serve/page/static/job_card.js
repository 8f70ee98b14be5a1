// @ts-check
// The card of an export, a prediction or an evaluation. While the job runs, only what changed is rendered again.
import { copy, el, figure, setText } from "./dom.js";
import { bytes, duration, plain } from "./format.js";
import { up } from "./net.js";
import { t } from "./words.js";

/** The completed share of a job, or undefined. @param {any} job */
function shareOf({ state, expected, written, progress }) {
  if (state === "done") return 1;
  if (expected) return Math.min(0.99, written / expected);
  return progress.total ? progress.done / progress.total : undefined;
}
/** What a running job has written, or how many prompts or batches it has completed. @param {any} job */
function amountOf({ state, expected, written, progress: { done, total } }) {
  if (state !== "running") return "";
  if (expected) return ` · ${t("of_about", { done: bytes(written), all: bytes(expected) })}`;
  return total ? ` · ${t("done_of", { step: done, total })}` : "";
}
/** The responses of a prediction, with the images of their prompts. @param {string} run */
function predictionsOf(run) {
  const place = el("div", { class: "predictions" });
  void import("./predictions.js").then((module) => module.showPredictions(place, run));
  return place;
}
/** A command to copy. @param {string} text */
const line = (text) =>
  el(
    "p",
    { class: "row line" },
    el("code", { class: "grow" }, text),
    el("button", { type: "button", onclick: () => copy(text) }, t("copy")),
  );
/** @param {[string, any]} metric */
const tile = ([name, value]) =>
  el("div", { class: "tile" }, el("dt", {}, name.replace(/^(eval|predict)_/, "")), figure(value, "dd"));

export class JobCard {
  /** @param {any} job */
  constructor(job) {
    this.time = el("small");
    this.state = el("span", { role: "status" });
    this.bar = el("progress", { max: 1, "aria-label": t("progress") });
    this.results = el("div", { class: "stack" });
    this.folder = el("small", { class: "mono" });
    this.log = el("pre", { class: "job-log", tabindex: 0 });
    this.details = el("details", { open: job.state !== "done" }, el("summary", {}, t("tab_log")), this.log);
    this.node = el(
      "section",
      { class: "card stack job", "data-job": job.id },
      el(
        "div",
        { class: "row" },
        el("b", {}, job.name),
        el("span", { class: "tag" }, t(`job_${job.kind}`)),
        el("span", { class: "grow" }),
        this.time,
        this.state,
      ),
      this.bar,
      this.results,
      this.folder,
      this.details,
    );
    /** What each part shows, as JSON. @type {Map<any, string>} */
    this.shown = new Map();
    this.update(job);
  }
  /** Render the children of a part if they are made of other values than before. @param {any} part @param {any} of @param {() => any[]} render */
  put(part, of, render) {
    const text = JSON.stringify(of);
    if (this.shown.get(part) === text) return;
    this.shown.set(part, text);
    part.replaceChildren(...render());
  }
  /** Show the state of the job. @param {any} job */
  update(job) {
    this.put(this.time, [job.seconds, amountOf(job)], () => [`${duration(job.seconds)}${amountOf(job)}`]);
    this.put(this.state, job.state, () => [t(`state_${job.state}`)]);
    this.state.className = `state ${job.state}`;
    this.bar.hidden = job.state === "failed";
    const share = shareOf(job);
    if (share === undefined) this.bar.removeAttribute("value");
    else this.bar.value = share;
    const { metrics, lines, answers, run, folder } = job;
    this.put(this.results, [metrics, lines, answers, run], () => [
      ...(Object.keys(metrics).length
        ? [el("dl", { class: "tiles" }, Object.entries(metrics).slice(0, 12).map(tile))]
        : []),
      ...(lines.length ? [el("div", { class: "job-lines" }, el("p", {}, t("export_done")), lines.map(line))] : []),
      ...(answers ? [predictionsOf(run)] : []),
    ]);
    this.results.hidden = !this.results.children.length;
    this.put(this.folder, [run, folder], () => [run ? el("a", { href: `${up}runs/${run}` }, folder) : folder]);
    this.showLog(plain(job.text) || t("nothing_yet"));
    if (job.state === "done" && !this.details.contains(document.activeElement)) this.details.open = false;
  }
  /** Show the log, and follow its end unless the reader has scrolled. @param {string} text */
  showLog(text) {
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    setText(this.log, text);
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }
}
