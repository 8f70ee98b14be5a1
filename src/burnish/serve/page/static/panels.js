// @ts-check
// Tabs below the charts of a run: log, events, options, checkpoints and files.
import { $, copy, el, setText } from "./dom.js";
import { bytes, clock, plain, visible } from "./format.js";
import { get, up } from "./net.js";
import { language, loadRunWords, optionalText, t } from "./words.js";

const MOST_EVENTS = 500;
/** @param {string} name */
export const panel = (name) => $(`#panel-${name}`);
/** The text of an event in the language of the page, if it is one of burnish's usual events. @param {any} event */
export function eventText({ kind, text }) {
  const name = kind === "stage" ? text : kind === "evaluation" && text !== "evaluated" ? "evaluation_loss" : kind;
  if (!text || optionalText(`event_${name}`) === undefined) return text;
  return t(`event_${name}`, { step: /\d*$/.exec(text)?.[0], value: /\S*$/.exec(text)?.[0] });
}
/** Sentences about the end of a run -> key of their text. @type {[RegExp, string][]} */
const SENTENCES = [
  [/^Stopped at step (\d+)\.$/, "said_stopped"],
  [/^Stopped at step (\d+), without a checkpoint of that step\.$/, "said_stopped_without"],
  [/^Stopped immediately, at step (\d+)\.$/, "said_stopped_now"],
  [/^(?:Run the same command again to resume|Resume it) from (?:the|its) last checkpoint\.$/, "said_resume"],
  [/^Running on (.+)\.$/, "said_elsewhere"],
  [/^Started on (.+), no updates for a long time\.$/, "said_silent"],
  [/^The process ended unexpectedly: it was killed, or the machine went down\.$/, "said_died"],
];
/** A usual sentence about the end of a run in the language of the page. @param {string} [text] */
export function usualSentence(text = "") {
  const found = SENTENCES.find(([pattern]) => pattern.test(text));
  const value = found?.[0].exec(text)?.[1];
  return found ? t(found[1], { step: value, host: value }) : text;
}
/** @param {any} event */
const keyOf = ({ time, step, kind, text }) => JSON.stringify([time, step, kind, text]);
/** @param {any} event */
const eventLine = (event) =>
  el(
    "li",
    { "data-key": keyOf(event) },
    el("small", {}, `${clock(event.time, language)} · ${t("step")} ${event.step ?? "–"}`),
    visible(String(eventText(event) ?? "")),
  );
/** Show a new event, unless the list has it already, and no more than MOST_EVENTS. @param {any} event */
export function addEvent(event) {
  const list = $("ul", panel("events"));
  if (!list || $(`[data-key="${CSS.escape(keyOf(event))}"]`, list)) return;
  list.prepend(eventLine(event));
  if (list.children.length > MOST_EVENTS) list.lastChild.remove();
}
/** @param {any} run */
export function fillPanels(run) {
  const id = run.id;
  panel("events").replaceChildren(el("ul", { class: "timeline" }, run.events.map(eventLine).reverse()));
  const { argv = [], host, user, burnish } = run.launch,
    command = [argv].flat().join(" "),
    where = [user, host].filter(Boolean).join("@");
  /** @param {any} shown @param {string} text to copy */
  const copied = (shown, text) =>
    el("div", { class: "row copied" }, shown, el("button", { type: "button", onclick: () => copy(text) }, t("copy")));
  panel("options").replaceChildren(
    run.yaml ? copied(el("pre", { class: "grow" }, visible(run.yaml)), run.yaml) : el("p", {}, "–"),
    command ? copied(el("code", { class: "grow" }, visible(command)), command) : "",
    el("p", { class: "hint" }, [where, burnish && `burnish ${burnish}`].filter(Boolean).join(" · ")),
  );
  const file = (/** @type {any} */ one) =>
    el(
      "li",
      {},
      el("a", { href: `${up}api/runs/${id}/download/${encodeURIComponent(one.name)}`, download: one.name }, one.name),
      " ",
      el("small", {}, bytes(one.bytes)),
    );
  if (run.files.some((/** @type {any} */ one) => one.name === "completions.jsonl"))
    $("#tab-completions").hidden = false;
  panel("files").replaceChildren(
    run.files.length
      ? el("ul", { class: "timeline" }, run.files.map(file))
      : el("p", { class: "hint" }, t("nothing_yet")),
  );
  const checkpoint = (/** @type {number} */ step) =>
    el(
      "li",
      { class: "row" },
      el("b", { class: "grow" }, `checkpoint-${step}`),
      el("a", { class: "button", href: `${up}chat?target=${id}/${step}` }, t("nav_chat")),
      el("a", { class: "button", href: `${up}export?target=${id}/${step}` }, t("nav_export")),
    );
  panel("checkpoints")?.replaceChildren(
    run.checkpoints.length
      ? el("ul", { class: "timeline" }, run.checkpoints.toReversed().map(checkpoint))
      : el("p", { class: "hint" }, t("nothing_yet")),
  );
  if (run.outcome.traceback)
    panel("events").append(
      el("details", {}, el("summary", {}, "Traceback"), el("pre", {}, visible(run.outcome.traceback))),
    );
}

/** @param {{key: string, values: any}[]} warnings */
export async function showWarnings(warnings) {
  if (warnings.length) await loadRunWords();
  $("#warnings").hidden = !warnings.length;
  $("#warnings").replaceChildren(...warnings.map(({ key, values }) => el("li", {}, t(key, values))));
}
/** Show the predictions of a run, if any. @param {string} id */
export async function fillPredictions(id) {
  const place = panel("predictions");
  if (place) await (await import("./predictions.js")).showPredictions(place, id);
}

/** @param {string} text @param {string} wanted */
const linesWith = (text, wanted) =>
  text
    .split("\n")
    .filter((line) => line.toLowerCase().includes(wanted.toLowerCase()))
    .map((line) => `${line}\n`)
    .join("");
const MOST_LOG = 2 ** 21; // characters
/** The log of a run; scrolls with new lines while the user is at its end, and loads earlier ones at its beginning. */
export class LiveLog {
  /** @param {any} place @param {string} id */
  constructor(place, id) {
    this.place = place;
    this.id = id;
    this.text = "";
    this.begin = 0; // offsets in the file, of the text and after it
    this.end = -1;
    this.find = ""; // only lines that contain it are shown
    /** @type {Promise<void> | null} */
    this.filling = null;
    place.addEventListener("scroll", () => {
      if (place.scrollTop < 200 && this.begin > 0) this.fillEarlier().catch(() => {});
    });
  }
  /** Load the end of the log. */
  fill() {
    this.filling ??= this.load().finally(() => {
      this.filling = null;
    });
    return this.filling;
  }
  async load() {
    const { text, from, to } = await get(this.address());
    this.text = text;
    this.begin = from;
    this.end = to;
    this.show();
    while (this.find && this.begin > 0 && this.place.scrollHeight <= this.place.clientHeight) await this.loadEarlier();
  }
  /** Return the address of a part of the log. @param {number} [before] offset of its end */
  address(before) {
    const query = [before !== undefined && `before=${before}`, this.find && `find=${encodeURIComponent(this.find)}`];
    return `api/runs/${this.id}/log?${query.filter(Boolean).join("&")}`;
  }
  /** Show only lines that contain a text; all lines if it is empty. @param {string} text */
  async search(text) {
    await this.filling;
    if (text === this.find) return;
    this.find = text;
    await this.fill();
    this.place.scrollTop = this.place.scrollHeight;
  }
  /** Load lines before those that are shown, which stay in their place. */
  fillEarlier() {
    this.filling ??= this.loadEarlier().finally(() => {
      this.filling = null;
    });
    return this.filling;
  }
  async loadEarlier() {
    const { text, from, to } = await get(this.address(this.begin));
    if (to !== this.begin) return this.load(); // the file is another one
    const { scrollHeight, scrollTop } = this.place;
    this.text = text + this.text;
    this.begin = from;
    this.show();
    this.place.scrollTop = scrollTop + this.place.scrollHeight - scrollHeight;
  }
  /** Add new text, or load the log again if the text does not follow what is shown. @param {any} part */
  async add({ text, from, to }) {
    await this.filling;
    if (to <= this.end) return;
    if (from !== this.end || this.text.length > MOST_LOG) return this.fill();
    this.text += this.find ? linesWith(text, this.find) : text;
    this.end = to;
    this.show();
  }
  show() {
    const place = this.place,
      isNew = !$("#log-text", place);
    if (isNew) place.replaceChildren(this.searchField(), el("pre", { id: "log-text", tabindex: 0 }));
    const follows = isNew || place.scrollHeight - place.scrollTop - place.clientHeight < 40;
    setText($("#log-text", place), plain(this.text) || t(this.find ? "nothing_found" : "nothing_yet"));
    if (follows) place.scrollTop = place.scrollHeight;
  }
  searchField() {
    /** @type {any} */ let timer;
    const start = () => void this.search(field.value.trim()).catch(() => {});
    const field = el("input", {
      type: "search",
      id: "log-search",
      placeholder: t("search"),
      "aria-label": t("search"),
    });
    field.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(start, 300);
    });
    return field;
  }
}
