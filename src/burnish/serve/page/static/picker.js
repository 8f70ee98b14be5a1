// @ts-check
// Pickers for models and datasets: local files, hub search, upload, and a preview of the first rows.
import { $, $$, el, icon, tableOf, tabs } from "./dom.js";
import { bytes, short, visible } from "./format.js";
import { Failed, api, get } from "./net.js";
import { language, t } from "./words.js";

const PIECE = 512 * 1024;

/** @param {any} data of api/datasets/columns */
export function preview({ columns }) {
  const count = Math.max(0, ...columns.map((/** @type {any[]} */ [, values]) => values.length));
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": t("first_rows") },
    tableOf(
      columns.map((/** @type {any[]} */ [name]) => el("th", { scope: "col" }, visible(name))),
      Array.from({ length: count }, (_, row) =>
        columns.map((/** @type {any[]} */ [, values]) => el("td", {}, visible(String(values[row] ?? "")))),
      ),
      { class: "preview" },
    ),
  );
}
/**
 * Create a dialog to select one of the results of api/models or api/datasets.
 * @param {{kind: "model" | "dataset", found: any[], chosen: (value: any) => void, uploaded?: (file: string) => void}} options
 */
export function pick({ kind, found, chosen, uploaded }) {
  const closed = new AbortController();
  const items = found.map(kind === "model" ? modelItem : dataItem);
  const title = t(`pick_${kind}`),
    done = (/** @type {any} */ value) => {
      dialog.close();
      chosen(value);
    };
  const shown = el("div", { class: "preview-pane" }, el("p", { class: "hint" }, t(`pick_${kind}_hint`)));
  const use = el("button", { type: "button", class: "main", disabled: true }, t("use_it"));
  /** @type {any} */ let selected = null;
  use.addEventListener("click", () => done(selected.value));
  /** @param {any} item */
  async function look(item) {
    selected = item;
    use.disabled = false;
    for (const one of $$(".item", dialog)) one.setAttribute("aria-pressed", String(one.item === item));
    shown.replaceChildren(el("h3", {}, visible(item.name)), el("p", { class: "hint" }, item.detail));
    if (!item.file) return;
    const waiting = el("span", { class: "skeleton chart" });
    shown.append(waiting);
    try {
      waiting.replaceWith(preview(await get(`api/datasets/columns?file=${encodeURIComponent(item.file)}`)));
    } catch (failed) {
      waiting.replaceWith(el("p", { class: "problem" }, failed instanceof Failed ? failed.message : String(failed)));
    }
  }
  const row = (/** @type {any} */ item) => {
    const node = el(
      "button",
      {
        type: "button",
        class: "item",
        "aria-pressed": "false",
        onclick: () => look(item),
        ondblclick: () => done(item.value),
      },
      icon("folder"),
      el("span", { class: "grow" }, visible(item.name)),
      el("small", {}, item.detail),
    );
    return Object.assign(node, { item });
  };
  const list = el("div", { class: "items-list", role: "group", "aria-label": title }, items.map(row));
  if (!items.length) list.append(el("p", { class: "hint" }, t("nothing_yet")));
  const search = el("input", { type: "search", placeholder: t("search"), "aria-label": t("search") });
  search.addEventListener("input", () => {
    for (const one of list.children) one.hidden = !one.textContent.toLowerCase().includes(search.value.toLowerCase());
  });
  const panels = [
    ["local", el("div", { class: "stack" }, search, list)],
    ["hub", hubPanel(kind, row)],
    ...(kind === "dataset"
      ? [
          [
            "upload",
            uploadPanel(closed.signal, (file) => {
              dialog.close();
              uploaded?.(file);
            }),
          ],
        ]
      : []),
  ];
  const buttons = panels.map(([name], place) =>
    el(
      "button",
      {
        type: "button",
        role: "tab",
        id: `pick-tab-${name}`,
        "aria-controls": `pick-${name}`,
        "aria-selected": String(place === 0),
        tabindex: place ? -1 : 0,
      },
      t(`pick_from_${name}`),
    ),
  );
  const dialog = el(
    "dialog",
    { class: "picker", "aria-label": title },
    el("header", {}, el("h2", { class: "grow" }, title)),
    el(
      "div",
      { class: "body" },
      el("div", { class: "tabs", role: "tablist", "aria-label": title }, buttons),
      el(
        "div",
        { class: "halves" },
        el(
          "div",
          {},
          panels.map(([name, node], place) =>
            el(
              "div",
              { id: `pick-${name}`, role: "tabpanel", "aria-labelledby": `pick-tab-${name}`, hidden: place > 0 },
              node,
            ),
          ),
        ),
        shown,
      ),
    ),
    el("footer", {}, el("button", { type: "button", onclick: () => dialog.close() }, t("cancel")), use),
  );
  tabs(buttons, () => {});
  dialog.addEventListener("close", () => {
    closed.abort();
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
}
/** @param {string} kind @param {(item: any) => any} row */
function hubPanel(kind, row) {
  const searchInput = el("input", {
      type: "search",
      placeholder: kind === "model" ? "Qwen2.5-0.5B" : "alpaca",
      "aria-label": t("search_hub"),
    }),
    found = el("div", { class: "items-list" });
  let asked = 0;
  const search = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const own = (asked += 1);
    found.replaceChildren(el("span", { class: "skeleton chart" }));
    try {
      const answer = await get(`api/hub?kind=${kind}&q=${encodeURIComponent(searchInput.value)}`);
      if (own !== asked) return; // there is a newer search
      const items = answer.found.map((/** @type {any} */ one) =>
        row({
          name: one.name,
          detail: one.downloads ? t("downloads", { count: short(one.downloads, language) }) : "",
          value: { name: one.name, folder: "", hub: true },
        }),
      );
      found.replaceChildren(...(items.length ? items : [el("p", { class: "hint" }, t("nothing_found"))]));
    } catch (failed) {
      if (own === asked)
        found.replaceChildren(
          el("p", { class: "problem" }, failed instanceof Failed ? failed.message : String(failed)),
        );
    }
  };
  return el(
    "form",
    { class: "stack", onsubmit: search },
    el("div", { class: "browse" }, searchInput, el("button", {}, t("search"))),
    el("p", { class: "hint" }, t("hub_hint")),
    found,
  );
}
/** @param {AbortSignal} closed ends an upload @param {(file: string) => void} done */
function uploadPanel(closed, done) {
  const input = el("input", { type: "file", accept: ".jsonl,.json,.csv,.parquet", id: "upload" }),
    said = el("p", { class: "problem", role: "alert" }),
    bar = el("progress", { max: 1, value: 0, hidden: true, "aria-label": t("progress") });
  input.addEventListener("change", async () => {
    const file = input.files[0];
    if (!file) return; // the selection was cancelled
    const name = file.name.replace(/[^A-Za-z0-9_.-]/g, "_");
    bar.value = 0;
    bar.hidden = false;
    input.disabled = true;
    said.textContent = "";
    try {
      for (let offset = 0; offset === 0 || offset < file.size; offset += PIECE) {
        const isLast = offset + PIECE >= file.size;
        const answer = await api(
          "PUT",
          `api/uploads/${encodeURIComponent(name)}?offset=${offset}${isLast ? "&last=1" : ""}`,
          file.slice(offset, offset + PIECE),
          closed,
        );
        bar.value = Math.min(1, (offset + PIECE) / file.size);
        if (isLast) done((await answer.json()).file);
      }
    } catch (failed) {
      said.textContent = failed instanceof Failed ? failed.message : String(failed);
    } finally {
      bar.hidden = true;
      input.disabled = false;
      input.value = ""; // the same file can be selected again
    }
  });
  return el("div", { class: "stack" }, el("label", { for: "upload" }, t("upload_hint")), input, bar, said);
}
/** @param {any} one of api/models */
const modelItem = (one) => ({
  name: one.path,
  detail: [one.type, one.bytes ? bytes(one.bytes) : "", t(`kind_of_${one.kind}`)].filter(Boolean).join(" · "),
  value: one.path,
});
/** @param {any} one of api/datasets */
const dataItem = (one) => ({
  name: one.name,
  detail: [one.folder === "." ? "" : one.folder, one.bytes ? bytes(one.bytes) : ""].filter(Boolean).join(" · "),
  file: one.file,
  value: one,
});
