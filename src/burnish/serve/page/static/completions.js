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
  place.replaceChildren(el("div", { class: "row controls" }, record, step, other, order), shown);
  const of = (/** @type {any} */ label) => select(label).value;
  let shows = 0;
  async function show() {
    const own = (shows += 1);
    const steps = [of(other), of(step)].filter(Boolean);
    const columns = await Promise.all(
      steps.map((one) => get(`api/runs/${id}/completions?step=${one}&record=${encodeURIComponent(of(record))}`)),
    );
    if (own !== shows) return; // another step was selected meanwhile
    const sign = { sample: 0, best: -1, worst: 1 }[/** @type {"sample" | "best" | "worst"} */ (of(order))];
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
        columns.map((one, place) =>
          el(
            "section",
            { "aria-label": `${t("step")} ${steps[place]}` },
            el("h3", {}, `${t("step")} ${steps[place]}`),
            one.rows
              .toSorted(
                (/** @type {any} */ a, /** @type {any} */ b) =>
                  sign * (a.advantage - b.advantage) || a.sample - b.sample,
              )
              .map(completion),
          ),
        ),
      ),
    );
  }
  await show();
}
