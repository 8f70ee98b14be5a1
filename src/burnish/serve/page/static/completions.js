// @ts-check
// Completions of a run with their rewards and the images of their prompts, by step and record; two steps of a prompt can be compared.
import { el, figure } from "./dom.js";
import { visible } from "./format.js";
import { get } from "./net.js";
import { smallImage } from "./small_image.js";
import { t } from "./words.js";

/** A prompt or a completion as text; other programs write messages. @param {any} value */
const textOf = (value) => (typeof value === "string" ? value : value ? JSON.stringify(value, null, 1) : "");
/** @param {any} row */
function completion(row) {
  const reward = Object.entries(row.rewards ?? {}).map(([name, value]) =>
    el("span", { class: "tag" }, visible(name), " ", figure(value)),
  );
  const kind = row.advantage > 0 ? "good" : row.advantage < 0 ? "low" : "";
  return el(
    "div",
    { class: "completion" },
    el(
      "div",
      { class: "row" },
      reward,
      el("span", { class: kind }, t("advantage"), " ", figure(row.advantage)),
      el(
        "small",
        { class: "grow" },
        t("tokens_count", { count: row.tokens ?? "–" }),
        row.ended === false ? ` · ${t("cut_off")}` : "",
      ),
    ),
    el("pre", {}, visible(textOf(row.completion))),
  );
}
/** @param {any} place @param {string} id */
export async function showCompletions(place, id) {
  const found = await get(`api/runs/${id}/completions`);
  if (!found.steps.length) {
    place.replaceChildren(el("p", { class: "hint" }, t("nothing_yet")));
    return;
  }
  const choose = (
    /** @type {string} */ label,
    /** @type {any[]} */ values,
    /** @type {any} */ chosen,
    /** @type {string} */ none,
  ) =>
    el(
      "label",
      {},
      `${label} `,
      el(
        "select",
        { onchange: show },
        none ? el("option", { value: "" }, none) : null,
        values.map((value) => el("option", { value, selected: value === chosen }, value)),
      ),
    );
  // Most prompts occur in few steps: select a record that occurs twice, with its last and first step.
  /** @type {{name: string, steps: number[]}[]} */
  const records = found.records;
  const names = records.map((one) => one.name);
  const first = records.find((one) => one.steps.length > 1) ?? records[0];
  const record = choose(t("record"), names, first.name, "");
  const step = choose(t("step"), [], "", ""),
    other = choose(t("beside_step"), [], "", t("none"));
  const select = (/** @type {any} */ label) => label.querySelector("select");
  function chooseSteps() {
    const steps = records.find((one) => one.name === select(record).value)?.steps ?? [];
    const options = () => steps.map((value) => el("option", { value }, value));
    select(step).replaceChildren(...options());
    select(other).replaceChildren(el("option", { value: "" }, t("none")), ...options());
    if (steps.length > 1) select(other).value = steps.at(-1);
  }
  select(record).addEventListener("change", chooseSteps, { capture: true });
  chooseSteps();
  const order = el(
    "label",
    {},
    `${t("sort_by")} `,
    el(
      "select",
      { onchange: show },
      el("option", { value: "sample" }, t("sample")),
      el("option", { value: "best" }, t("best_first")),
      el("option", { value: "worst" }, t("worst_first")),
    ),
  );
  const shown = el("div");
  place.replaceChildren(
    el("div", { class: "row controls" }, record, step, other, order),
    found.is_part ? el("p", { class: "hint" }, t("completions_part")) : "",
    shown,
  );
  const of = (/** @type {any} */ label) => select(label).value;
  let shows = 0;
  async function show() {
    const own = (shows += 1);
    const steps = [of(other), of(step)].filter(Boolean);
    const part = (/** @type {string} */ one, offset = 0) =>
      get(
        `api/runs/${id}/completions?${new URLSearchParams({ step: one, record: of(record), order: of(order), offset: String(offset) })}`,
      );
    const columns = await Promise.all(steps.map((one) => part(one)));
    if (own !== shows) return; // another step was selected meanwhile
    const first = columns.flatMap((one) => one.rows)[0];
    shown.replaceChildren(
      ...(first
        ? [
            el("h3", {}, t("prompt")),
            ...(first.images ?? []).map((/** @type {string} */ path) => smallImage(path)),
            el("pre", { class: "prompt" }, visible(textOf(first.prompt))),
          ]
        : [el("p", { class: "hint" }, t("no_completions_here"))]),
      el(
        "div",
        { class: "pair" },
        columns.map((one, place) => column(steps[place], one, (offset) => part(steps[place], offset))),
      ),
    );
  }
  await show();
}
/**
 * The completions of a step. More are requested with a button.
 * @param {string} step @param {any} found @param {(offset: number) => Promise<any>} part
 */
function column(step, found, part) {
  const list = el("div"),
    count = el("span", { role: "status" }),
    more = el("button", { type: "button", onclick: add }, t("more_predictions")),
    rest = el("div", { class: "row" }, count, more);
  /** @param {any} next */
  function show(next) {
    list.append(...next.rows.map(completion));
    const shown = list.children.length;
    rest.hidden = shown >= next.count;
    count.textContent = t("completions_shown", { shown, all: next.count });
  }
  async function add() {
    more.disabled = true;
    try {
      show(await part(list.children.length));
    } finally {
      more.disabled = false;
    }
  }
  show(found);
  return el("section", { "aria-label": `${t("step")} ${step}` }, el("h3", {}, `${t("step")} ${step}`), list, rest);
}
