// @ts-check
// The form for a new run, and its plan, which is updated after each change.
import { Columns } from "./columns.js";
import { $, $$, askToConfirm, copy, notify, tabs } from "./dom.js";
import * as draft from "./draft.js";
import { fieldOf, showValue, textOf } from "./fields.js";
import { joined } from "./format.js";
import { Failed, api, events, get, send, up } from "./net.js";
import { Examples, detailNodes, noteNodes, planLine, planNodes, showOthers } from "./plan.js";
import { presets } from "./presets.js";
import { Topics } from "./topics.js";
import { loadWordsOf, ready, t } from "./words.js";

await Promise.all([ready, loadWordsOf("new")]);
const form = $("#form"),
  examples = new Examples();
/** @type {Map<string, any>} */
const values = new Map();
/** Fields that the user has changed. Before the first attempt to start, errors are shown for these only. @type {Set<string>} */
const touched = new Set();
/** @type {any} */
let answer = {},
  /** @type {any} */
  timer = null,
  /** @type {AbortController | null} */
  checking = null,
  /** @type {any[]} */
  problems = [],
  hasTried = false;
const [found, ...lists] = await Promise.all([get("api/form"), get("api/models"), get("api/datasets")]);
/** @type {Record<string, any>} */
const declared = Object.fromEntries(found.fields.map((/** @type {any} */ field) => [field.name, field]));
$("#loading").remove();

// --- fields -----------------------------------------------------------------------------------------------------------

const pick = async (/** @type {any} */ options) => (await import("./picker.js")).pick(options);
/** @type {Record<string, () => Promise<void>>} */
const BROWSE = {
  model_name_or_path: () =>
    pick({
      kind: "model",
      found: lists[0].models.filter((/** @type {any} */ one) => one.kind === "model"),
      chosen: (/** @type {any} */ value) => change({ model_name_or_path: value.hub ? value.name : value }),
    }),
  dataset: () =>
    pick({
      kind: "dataset",
      found: lists[1].datasets,
      chosen: chooseData,
      uploaded: async (/** @type {string} */ file) => {
        lists[1] = await get("api/datasets");
        change({ dataset: file });
      },
    }),
};
const columns = new Columns(change, async () => {
  lists[1] = await get("api/datasets");
});
/** @param {any} one */
const chooseData = (one) =>
  change({ dataset: one.name, ...(one.folder && one.folder !== "." ? { dataset_dir: one.folder } : {}) });
const make = (/** @type {string} */ name) => fieldOf(declared[name], { risk: found.risky[name], browse: BROWSE[name] });
const known = Object.fromEntries(
  Object.entries(found.boxes).map(([box, names]) => [
    box,
    names.filter((/** @type {string} */ name) => name in declared),
  ]),
);
$("#essentials").append(...known.essentials.map(make));
const topics = new Topics(
  found,
  known,
  declared,
  make,
  (names) => {
    names.forEach(put);
    settle();
    showProblems();
  },
  () => settle(),
);

// --- values -----------------------------------------------------------------------------------------------------------

/** @param {string} name */
function put(name) {
  for (const node of $$(`[data-option="${CSS.escape(name)}"]`)) {
    showValue($("input, select", node), textOf(values.get(name)));
    node.classList.toggle("changed", values.has(name));
  }
}
/** @param {string} name @param {any} value */
function set(name, value) {
  if (value === "" || value === undefined || value === null) values.delete(name);
  else values.set(name, value);
  put(name);
}
/** @param {Record<string, any>} more */
function change(more) {
  for (const [name, value] of Object.entries(more)) set(name, value);
  changed();
}
/** Show dependent options only if the option that they depend on has a matching value. */
function settle() {
  for (const [name, [on, wanted]] of Object.entries(/** @type {Record<string, any>} */ (found.depends))) {
    const current = String(values.get(on) ?? declared[on]?.default ?? "");
    for (const node of $$(`#topics [data-option="${name}"]`))
      node.hidden = !wanted.includes(current) && !values.has(name);
  }
  topics.count(values);
}
form.addEventListener("input", (/** @type {any} */ event) => {
  const name = event.target.closest("[data-option]")?.dataset.option;
  if (!name) return;
  touched.add(name);
  set(name, event.target.value.trim());
  const one =
    name === "dataset" &&
    lists[1].datasets.find((/** @type {any} */ data) => data.name === event.target.value.split(",")[0].trim());
  if (one?.folder && one.folder !== ".") set("dataset_dir", one.folder);
  changed();
});
const isEmpty = () => !values.has("model_name_or_path") || !values.has("dataset");
function changed() {
  checking?.abort(); // its values are no longer those of the form
  draft.keep(values);
  settle();
  void columns.ask(values, lists[1].datasets);
  $("#start").disabled = $("#queue").disabled = true;
  $("#plan-empty").hidden = !isEmpty();
  $("#plan").hidden = $("#plan-tabs").hidden = isEmpty();
  clearTimeout(timer);
  if (isEmpty()) {
    $("#plan-status").textContent = "";
    for (const item of $$("#plan-empty [data-requires]"))
      item.classList.toggle("done", values.has(item.dataset.requires));
    return;
  }
  $("#plan-status").textContent = t("checking");
  timer = setTimeout(check, 400);
}
const current = () => Object.fromEntries(values);
// --- plan -------------------------------------------------------------------------------------------------------------

async function check() {
  const mine = (checking = new AbortController());
  answer = {};
  problems = [];
  try {
    const body = { values: current(), seed: 0 };
    for await (const event of events(await api("POST", "api/check", body, mine.signal))) {
      const part = JSON.parse(event.data);
      if (part.code === "superseded") {
        if (!mine.signal.aborted) timer = setTimeout(check, 1000); // by another window
        return;
      }
      answer = { ...answer, ...part };
      if (part.problems) problems = part.problems;
      show();
    }
  } catch (failed) {
    if (mine.signal.aborted) return;
    if (!(failed instanceof Failed)) throw failed;
    problems = [{ option: failed.option, sentence: failed.message, remedy: "" }];
    show();
  }
  $("#plan-status").textContent = problems.length ? t("problems_count", { count: problems.length }) : t("checked");
  $("#start").disabled = $("#queue").disabled = problems.length > 0 || !answer.rows;
}
function show() {
  showProblems();
  if (answer.yaml) $("#yaml").textContent = answer.yaml;
  if (answer.command) $("#command").textContent = answer.command;
  if (answer.steps) $("#plan").replaceChildren(...planNodes(answer));
  $("#panel-notes").replaceChildren(noteNodes(answer));
  $("#panel-more").replaceChildren(...detailNodes(answer));
  $("#plan-line").textContent = planLine({ ...answer, problems });
  examples.show(answer.rows ?? [], problems.length > 0);
}
function showProblems() {
  for (const node of $$("[data-option]")) {
    const name = node.dataset.option,
      own =
        hasTried || touched.has(name) || values.has(name) ? problems.filter((problem) => problem.option === name) : [];
    $(".problem", node).textContent = own.map((problem) => joined(problem.sentence, problem.remedy)).join(" ");
    const input = $("input, select", node);
    if (own.length) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }
  showOthers(problems, values, (name) => change({ [name]: "" }));
}
for (const button of $$("[data-copy]"))
  button.addEventListener("click", () => copy($(`#${button.dataset.copy}`).textContent));
tabs($$("#plan-tabs [role=tab]"), () => {});

// --- start ------------------------------------------------------------------------------------------------------------

/** @param {string} when @param {string} folder */
async function start(when, folder) {
  $("#start").disabled = $("#queue").disabled = true; // until the response
  try {
    const begun = await send("POST", "api/runs", { values: current(), when, folder });
    draft.drop();
    if (begun.id) location.href = `${up}runs/${begun.id}`;
    else {
      notify(t("queued"));
      setTimeout(() => location.assign(`${up}runs`), 800);
    }
  } catch (failed) {
    $("#start").disabled = $("#queue").disabled = false;
    if (!(failed instanceof Failed)) throw failed;
    if (failed.code !== "folder_not_empty") {
      hasTried = true;
      problems = [{ option: failed.option, sentence: failed.message, remedy: "" }];
      showProblems();
      $("[aria-invalid=true]")?.focus();
      return;
    }
    const choice = await (await import("./taken.js")).askAboutFolder(values.get("output_dir"));
    if (choice === "overwrite" && !(await askToConfirm(t("start_over_sure"), t("start_over")))) return;
    if (choice) void start(when, choice);
  }
}
form.addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  hasTried = true;
  if ($("#start").disabled) {
    showProblems();
    ($("[aria-invalid=true]") ?? $("#box-model_name_or_path")).focus();
  } else void start("now", "new");
});
$("#queue").addEventListener("click", () => start("queue", "new"));
presets(found, change, current);
const free = async (/** @type {string} */ path) => (await get(`api/free?folder=${encodeURIComponent(path)}`)).folder;
const beginning = form.getAttribute("data-start"); // form.dataset is the field of that name
/** Take the values of an earlier run. @param {string} id */
async function duplicate(id) {
  const run = await get(`api/runs/${id}`),
    { values: read, problems: wrong } = await send("POST", "api/yaml", { text: run.yaml });
  if (wrong.length) notify(wrong.join(" "));
  for (const [name, value] of Object.entries(read)) set(name, value);
  set("overwrite_output_dir", "");
  set("output_dir", await free(values.get("output_dir") ?? run.folder));
}
const begin = async () =>
  draft.restore(set) || (beginning ? duplicate(beginning) : set("output_dir", await free("saves/first")));
await begin().finally(changed);
draft.begin(declared);
