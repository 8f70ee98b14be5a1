// A new run: fields from the options' declarations, and what will happen, checked as it is changed.
import { $, $$, Failed, api, bytes, copy, el, events, get, ready, say, send, short, t, up, visible } from "./base.js";

await ready;
const form = $("#form"), values = new Map();
let declared = {}, layout = null, answer = {}, sample = 0, problems = [], checking = null, timer = null;
const [found, lists] = await Promise.all([get("api/form"), Promise.all([get("api/models"), get("api/datasets")])]);
layout = found;
declared = Object.fromEntries(found.fields.map((field) => [field.name, field]));
$("#loading").remove();

// --- fields -----------------------------------------------------------------------------------------------------------

/** A control for one option, by its declaration. */
function control(field, id) {
  const common = { id, name: field.name, "aria-describedby": `${id}-hint ${id}-problem`, disabled: field.name in layout.risky };
  if (field.control === "switch") return el("select", common, el("option", { value: "" }, `${t("default")}: ${field.default ?? "–"}`), el("option", { value: "true" }, "true"), el("option", { value: "false" }, "false"));
  if (field.control === "choice") return el("select", common, el("option", { value: "" }, `${t("default")}: ${field.default ?? "–"}`), field.choices.map((choice) => el("option", { value: choice }, choice)));
  const shown = field.default === null || field.default === undefined ? "" : Array.isArray(field.default) || typeof field.default === "object" ? JSON.stringify(field.default) : String(field.default);
  const list = { model_name_or_path: "models", adapter_name_or_path: "models", dataset: "datasets", eval_dataset: "datasets" }[field.name] ?? (field.choices.length ? `${id}-choices` : null);
  const input = el("input", { ...common, type: "text", inputmode: field.control === "number" ? "decimal" : null, placeholder: shown, list, spellcheck: "false", autocomplete: "off" });
  return field.choices.length ? [input, el("datalist", { id: `${id}-choices` }, field.choices.map((choice) => el("option", { value: choice })))] : input;
}

function fieldOf(name, where) {
  const field = declared[name], id = `${where}-${name}`;
  const risk = layout.risky[name];
  const hint = risk ? t("not_from_page", { why: risk }) : `${field.help}${field.unit ? ` (${field.unit})` : ""}${field.ignored ? ` ${field.ignored}` : ""}`;
  return el("div", { class: "field", "data-option": name }, el("label", { for: id }, name), control(field, id),
    el("p", { class: "hint", id: `${id}-hint`, lang: "en" }, hint), el("p", { class: "problem", id: `${id}-problem`, lang: "en" }));
}

const boxed = new Set(Object.values(found.boxes).flat());
for (const [box, names] of Object.entries(found.boxes)) {
  $("#boxes").append(el("fieldset", { class: "box", id: `box-${box}` }, el("legend", {}, t(`box_${box}`)), names.filter((name) => name in declared).map((name) => fieldOf(name, "box"))));
}
const rest = found.fields.filter((field) => !boxed.has(field.name));
const search = el("input", { type: "search", "aria-label": t("search_options"), placeholder: t("search_options") });
const groups = found.groups.map((group) => [group, rest.filter((field) => field.group === group)]).filter(([, fields]) => fields.length);
const all = el("details", { class: "box", id: "all-options" }, el("summary", {}, t("all_options", { count: found.fields.length }), " ", el("small", { id: "set-count" })), search);
all.addEventListener("toggle", () => { // three hundred fields are made when they are wanted
  if ($("fieldset", all)) return;
  for (const [group, fields] of groups) all.append(el("fieldset", {}, el("legend", { lang: "en" }, group), fields.map((field) => fieldOf(field.name, "all"))));
  for (const name of values.keys()) put(name);
}, { once: false });
search.addEventListener("input", () => {
  const wanted = search.value.toLowerCase();
  for (const node of $$(".field", all)) {
    const field = declared[node.dataset.option];
    node.hidden = ![field.name, field.help, ...field.aliases].some((text) => text.toLowerCase().includes(wanted));
  }
});
$("#boxes").append(all,
  el("datalist", { id: "models" }, lists[0].models.map((one) => el("option", { value: one.path }, one.kind))),
  el("datalist", { id: "datasets" }, lists[1].datasets.map((one) => el("option", { value: one.name }, one.folder))));

// --- values -----------------------------------------------------------------------------------------------------------

function put(name) {
  for (const node of $$(`[data-option="${name}"]`)) {
    const input = $("input, select", node), value = values.get(name);
    const text = value === undefined ? "" : typeof value === "object" ? (Array.isArray(value) && value.every((item) => typeof item === "string") ? value.join(", ") : JSON.stringify(value)) : String(value);
    if (input.value !== text) input.value = text;
    node.classList.toggle("changed", values.has(name));
  }
}
function set(name, value) {
  if (value === "" || value === undefined || value === null) values.delete(name); else values.set(name, value);
  put(name);
}
/** Dependent options are shown where the one that they belong to has one of the values that they are for. */
function settle() {
  for (const [name, [on, wanted]] of Object.entries(layout.depends)) {
    const current = String(values.get(on) ?? declared[on]?.default ?? "");
    for (const node of $$(`#boxes > fieldset [data-option="${name}"]`)) node.hidden = !wanted.includes(current) && !values.has(name);
  }
  const count = $("#set-count");
  if (count) count.textContent = t("set_options", { count: values.size });
}
form.addEventListener("input", (event) => {
  const name = event.target.closest("[data-option]")?.dataset.option;
  if (!name) return;
  set(name, event.target.value.trim());
  if (name === "dataset") {
    const known = lists[1].datasets.find((one) => one.name === event.target.value.split(",")[0].trim());
    if (known && known.folder !== ".") set("dataset_dir", known.folder);
  }
  changed();
});
function changed() {
  settle();
  void askForColumns();
  $("#checked").textContent = t("checking");
  $("#start").disabled = $("#queue").disabled = true;
  clearTimeout(timer);
  timer = setTimeout(check, 400);
}
const given = () => Object.fromEntries(values);

// --- which column is which, of a file that has no entry in dataset_info.json -------------------------------------------

let columnsOf = "";
async function askForColumns() {
  const file = String(values.get("dataset") ?? "").trim();
  if (file === columnsOf) return;
  columnsOf = file;
  $("#columns")?.remove();
  if (!/\.\w+$/.test(file) || lists[1].datasets.some((one) => one.name === file)) return;
  const known = await get(`api/datasets/columns?file=${encodeURIComponent(file)}`).catch(() => null);
  if (known && file === columnsOf) $("#box-data [data-option=dataset]").after(mapping(known));
}
/** Selects for the format and for the column of each of its parts; what is chosen are the options formatting and columns. */
function mapping({ columns, formats, known, proposed }) {
  const parts = el("div"), chosen = typeof values.get("columns") === "object" ? { ...values.get("columns") } : {};
  const format = el("select", { id: "columns-format" }, el("option", { value: "" }, known ? t("columns_known", { format: known }) : "–"), formats.map(([name]) => el("option", { value: name, selected: name === values.get("formatting") }, name)));
  const tell = () => {
    set("formatting", format.value);
    set("columns", format.value && Object.keys(chosen).length ? { ...chosen } : "");
    changed();
  };
  const row = (part) => {
    const first = el("p", { class: "hint" }), id = `columns-${part}`;
    const select = el("select", { id, onchange: () => { if (select.value) chosen[part] = select.value; else delete chosen[part]; show(); tell(); } }, el("option", { value: "" }, "–"), columns.map(([name]) => el("option", { value: name, selected: chosen[part] === name }, visible(name))));
    const show = () => { first.textContent = visible((columns.find(([name]) => name === select.value)?.[1] ?? []).join(" · ")); };
    show();
    return el("div", { class: "field" }, el("label", { for: id }, part), select, first, el("p", { class: "problem" }));
  };
  const fill = () => parts.replaceChildren(...(formats.find(([name]) => name === format.value)?.[1] ?? []).map(row));
  format.addEventListener("change", () => {
    const wanted = formats.find(([name]) => name === format.value)?.[1] ?? [];
    for (const part of Object.keys(chosen)) delete chosen[part];
    for (const [part, column] of Object.entries(proposed)) if (wanted.includes(part)) chosen[part] = column;
    fill();
    tell();
  });
  fill();
  const name = el("input", { id: "columns-name", value: columnsOf.replace(/^.*\//, "").replace(/\.\w+$/, "").replace(/[^\w-]/g, "_") });
  const keep = el("button", { type: "button", id: "columns-keep", onclick: async () => {
    try {
      const kept = await send("PUT", `api/datasets/${encodeURIComponent(name.value)}`, { file: columnsOf, formatting: format.value || known, columns: chosen });
      for (const [option, value] of [["dataset", kept.name], ["dataset_dir", kept.folder], ["formatting", ""], ["columns", ""]]) set(option, value);
      lists[1] = await get("api/datasets");
      say(t("columns_kept", { name: kept.name }));
      void askForColumns();
      changed();
    } catch (failed) { say(failed.message); }
  } }, t("columns_keep"));
  const named = el("div", { class: "field" }, el("label", { for: "columns-name" }, t("name")), name, keep, el("p", { class: "problem" }));
  const found = el("p", { class: "hint" }, t("columns_found", { names: visible(columns.map(([name]) => name).join(", ")) }));
  return el("details", { id: "columns", open: !known }, el("summary", {}, t("columns")), found, el("div", { class: "field" }, el("label", { for: "columns-format" }, t("format")), format, el("p", { class: "problem" })), parts, named);
}

// --- what will happen -------------------------------------------------------------------------------------------------

async function check() {
  checking?.abort();
  const mine = checking = new AbortController();
  if (!values.has("model_name_or_path") || !values.has("dataset")) { $("#plan").textContent = t("no_model_yet"); }
  answer = {};
  problems = [];
  try {
    const response = await api("POST", "api/check", { values: given(), seed: 0 }, mine.signal);
    for await (const event of events(response)) {
      const part = JSON.parse(event.data);
      if (part.code === "superseded") return;
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
  $("#checked").textContent = t("checked");
  const isReady = !problems.length && Boolean(answer.rows);
  $("#start").disabled = $("#queue").disabled = !isReady;
  $("#why-not").textContent = problems.length ? t("first_problem", { count: problems.length }) : "";
}

function show() {
  showProblems();
  $("#yaml").textContent = answer.yaml ?? $("#yaml").textContent;
  $("#command").textContent = answer.command ?? $("#command").textContent;
  if (answer.steps) $("#plan").replaceChildren(plan());
  showSample();
}

function showProblems() {
  for (const node of $$(".field[data-option]")) {
    const own = problems.filter((problem) => problem.option === node.dataset.option);
    $(".problem", node).textContent = own.map((problem) => `${problem.sentence} ${problem.remedy}`.trim()).join(" ");
    const input = $("input, select", node);
    if (own.length) input.setAttribute("aria-invalid", "true"); else input.removeAttribute("aria-invalid");
    if (own.length && node.closest("details")) node.closest("details").open = true;
  }
  const shown = new Set($$(".field[data-option]").map((node) => node.dataset.option));
  const others = problems.filter((problem) => !shown.has(problem.option));
  $("#problems").replaceChildren(...others.map((problem) => el("p", { lang: "en" }, `${problem.where ? `${problem.where}: ` : ""}${problem.sentence} ${problem.remedy}`)));
}

function plan() {
  const facts = el("dl"), add = (name, ...value) => facts.append(el("dt", {}, t(name)), el("dd", {}, ...value));
  const { steps, memory, disk } = answer;
  if (steps.rows) add("plan_rows", String(steps.rows));
  add("plan_steps", t("steps_text", { total: steps.total, per_epoch: steps.per_epoch }));
  if (memory) {
    const share = memory.available ? memory.total / memory.available : 0;
    const bar = el("progress", { class: "meter", max: 1, value: Math.min(1, share), "aria-label": t("plan_memory") });
    add("plan_memory", t("of_free", { needed: bytes(memory.total), free: bytes(memory.available) }), " ", share > 1 ? el("b", { class: "problem" }, t("too_much")) : t("fits"), bar, el("small", {}, memory.terms.map((term) => `${term.name} ${bytes(term.bytes)}`).join(" · ")));
  }
  if (disk) add("plan_disk", t("of_free", { needed: bytes(disk.needed), free: bytes(disk.free) }));
  if (steps.curve?.length) {
    const high = Math.max(...steps.curve) || 1;
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    svg.setAttribute("viewBox", "0 0 120 28");
    svg.setAttribute("class", "spark");
    svg.setAttribute("aria-hidden", "true");
    line.setAttribute("points", steps.curve.map((value, place) => `${(place * 120) / (steps.curve.length - 1)},${26 - (24 * value) / high}`).join(" "));
    svg.append(line);
    add("plan_rate", `${short(high)} `, svg);
  }
  const notes = [...(answer.dropped ?? []), ...(answer.notes ?? [])];
  const parts = [facts];
  if (notes.length) parts.push(el("details", {}, el("summary", {}, `${t("notes")} (${notes.length})`), el("ul", { lang: "en" }, notes.map((note) => el("li", {}, note)))));
  parts.push(el("details", {}, el("summary", {}, t("more")), (answer.sections ?? []).map((section) => [el("h3", { lang: "en" }, section.title), el("dl", { lang: "en" }, section.lines.map(([name, text, where]) => [el("dt", {}, name), el("dd", {}, visible(text), where ? el("small", {}, ` ${where}`) : null)]))])));
  return el("div", {}, parts);
}

function showSample() {
  const rows = answer.rows ?? [];
  if (!rows.length) return;
  sample = (sample + rows.length) % rows.length;
  const row = rows[sample], ids = $("#row-ids").checked, brackets = $("#row-brackets").checked;
  $("#row-title").textContent = t("row_of", row).replace(/^\d+(: |：)/, ""); // a row that was drawn has no other title
  $("#sample").replaceChildren(...row.pieces.map(([text, trained, tokens]) => {
    const shown = ids ? ` ${tokens.join(" ")} ` : visible(text);
    return trained ? el("mark", {}, brackets ? `⟦${shown}⟧` : shown) : document.createTextNode(shown);
  }));
}
$("#row-before").addEventListener("click", () => { sample -= 1; showSample(); });
$("#row-after").addEventListener("click", () => { sample += 1; showSample(); });
for (const box of ["#row-ids", "#row-brackets"]) $(box).addEventListener("input", showSample);
for (const button of $$("[data-copy]")) button.addEventListener("click", () => copy($(`#${button.dataset.copy}`).textContent));

// --- start ------------------------------------------------------------------------------------------------------------

async function start(when, folder) {
  try {
    const begun = await send("POST", "api/runs", { values: given(), when, folder });
    if (begun.id) location.href = `${up}runs/${begun.id}`;
    else { say(t("queued")); setTimeout(() => { location.href = `${up}runs`; }, 800); }
  } catch (failed) {
    if (failed.code !== "folder_not_empty") { problems = [{ option: failed.option, sentence: failed.message, remedy: "" }]; showProblems(); focusProblem(); return; }
    const dialog = $("#taken");
    $("#taken-text").textContent = t("taken", { folder: values.get("output_dir") });
    dialog.showModal();
    for (const button of $$("button", dialog)) {
      button.onclick = () => {
        if (button.value === "anew" && !confirm(t("anew_sure"))) return;
        dialog.close();
        if (button.value) void start(when, button.value);
      };
    }
  }
}
function focusProblem() { $("[aria-invalid=true]")?.focus(); }
form.addEventListener("submit", (event) => { event.preventDefault(); if ($("#start").disabled) focusProblem(); else void start("now", "new"); });
$("#queue").addEventListener("click", () => start("queue", "new"));

const own = new Set(Object.keys(found.own_presets)), kept = { ...found.presets, ...found.own_presets };
function showPresets(chosen) {
  const listed = (names, label) => (names.length ? [el("optgroup", { label }, names.map((name) => el("option", { value: name, selected: name === chosen }, name)))] : []);
  $("#preset").replaceChildren(el("option", { value: "" }, "–"), ...listed(Object.keys(found.presets), t("presets_carried")), ...listed([...own], t("presets_own")));
  $("#drop-preset").hidden = !own.has(chosen);
}
showPresets("");
$("#preset").addEventListener("change", ({ target }) => {
  for (const [name, value] of Object.entries(kept[target.value] ?? {})) set(name, value);
  $("#drop-preset").hidden = !own.has(target.value);
  changed();
});
const KEPT_ASIDE = /^(output_dir|overwrite_output_dir|resume_from_checkpoint):/; // of one run, and of no other
$("#save-preset").addEventListener("click", async () => {
  const name = prompt(t("preset_name"), $("#preset").value);
  if (!name) return;
  const text = $("#yaml").textContent.split("\n").filter((line) => !KEPT_ASIDE.test(line)).join("\n");
  try {
    await send("PUT", `api/presets/${encodeURIComponent(name)}`, { text });
    own.add(name);
    kept[name] = (await send("POST", "api/yaml", { text })).values;
    showPresets(name);
    say(t("preset_kept", { name }));
  } catch (failed) { say(failed.message); }
});
$("#drop-preset").addEventListener("click", async () => {
  const name = $("#preset").value;
  await send("DELETE", `api/presets/${encodeURIComponent(name)}`);
  own.delete(name);
  showPresets("");
});

/** The values of a YAML text, read by the server as it reads a file. Returns what is wrong with it. */
async function take(text) {
  const { values: read, problems: wrong } = await send("POST", "api/yaml", { text });
  for (const [name, value] of Object.entries(read)) set(name, value);
  return wrong;
}
$("#load-yaml").addEventListener("click", () => $("#yaml-dialog").showModal());
$("#yaml-cancel").addEventListener("click", () => $("#yaml-dialog").close());
$("#yaml-take").addEventListener("click", async () => {
  const wrong = await take($("#yaml-text").value);
  $("#yaml-problems").replaceChildren(...wrong.map((sentence) => el("p", { lang: "en" }, sentence)));
  if (wrong.length) { $("#yaml-text").focus(); return; }
  $("#yaml-dialog").close();
  changed();
});
const free = async (folder) => (await get(`api/free?folder=${encodeURIComponent(folder)}`)).folder;
const beginning = form.getAttribute("data-start"); // form.dataset is the field of that name
if (beginning) {
  const run = await get(`api/runs/${beginning}`);
  await take(run.given);
  set("output_dir", await free(values.get("output_dir") ?? run.folder));
  values.delete("overwrite_output_dir");
} else if (!values.has("output_dir")) set("output_dir", await free("saves/first"));
changed();
