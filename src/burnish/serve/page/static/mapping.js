// @ts-check
// Column mapping for a data file without an entry in dataset_info.json.
import { $, el, notify } from "./dom.js";
import { visible } from "./format.js";
import { send } from "./net.js";
import { t } from "./words.js";

/**
 * Create selects for the format and the columns of its parts; they set the options formatting and columns.
 * @param {string} file @param {any} found of api/datasets/columns @param {Map<string, any>} values
 * @param {(values: Record<string, any>) => void} tell @param {(entry: {name: string, folder: string}) => Promise<void>} onSaved
 */
export function mapping(file, { columns, formats, known, proposed }, values, tell, onSaved) {
  const parts = el("div", { class: "grid" });
  /** @type {Record<string, string>} */
  const chosen = typeof values.get("columns") === "object" ? { ...values.get("columns") } : {};
  const partsOf = (/** @type {string} */ name) =>
    formats.find((/** @type {any[]} */ one) => one[0] === name)?.[1] ?? [];
  const format = el(
    "select",
    { id: "columns-format" },
    el("option", { value: "" }, known ? t("columns_known", { format: known }) : "–"),
    formats.map((/** @type {any[]} */ [name]) =>
      el("option", { value: name, selected: name === values.get("formatting") }, name),
    ),
  );
  const told = () =>
    tell({ formatting: format.value, columns: format.value && Object.keys(chosen).length ? { ...chosen } : "" });
  /** @param {string} part */
  function row(part) {
    const first = el("p", { class: "hint" }),
      id = `columns-${part}`;
    const select = el(
      "select",
      { id },
      el("option", { value: "" }, "–"),
      columns.map((/** @type {any[]} */ [name]) =>
        el("option", { value: name, selected: chosen[part] === name }, visible(name)),
      ),
    );
    const show = () => {
      first.textContent = visible(
        (columns.find((/** @type {any[]} */ [name]) => name === select.value)?.[1] ?? []).join(" · "),
      );
    };
    select.addEventListener("change", () => {
      if (select.value) chosen[part] = select.value;
      else delete chosen[part];
      show();
      told();
    });
    show();
    return el("div", { class: "field" }, el("label", { for: id }, part), select, first);
  }
  const fill = () => parts.replaceChildren(...partsOf(format.value).map(row));
  format.addEventListener("change", () => {
    for (const part of Object.keys(chosen)) delete chosen[part];
    for (const [part, column] of Object.entries(proposed))
      if (partsOf(format.value).includes(part)) chosen[part] = /** @type {string} */ (column);
    fill();
    told();
  });
  fill();
  const name = el("input", {
    id: "columns-name",
    value: file
      .replace(/^.*\//, "")
      .replace(/\.\w+$/, "")
      .replace(/[^\w-]/g, "_"),
  });
  const keep = async () => {
    const entry = { file, formatting: format.value || known, columns: chosen };
    await onSaved(await send("PUT", `api/datasets/${encodeURIComponent(name.value)}`, entry));
    notify(t("columns_kept", { name: name.value }));
  };
  return el(
    "details",
    { id: "columns", class: "full-width", open: !known },
    el("summary", {}, t("columns")),
    el(
      "p",
      { class: "hint" },
      t("columns_found", { names: visible(columns.map((/** @type {any[]} */ [one]) => one).join(", ")) }),
    ),
    el("div", { class: "field" }, el("label", { for: "columns-format" }, t("format")), format),
    parts,
    el(
      "div",
      { class: "field" },
      el("label", { for: "columns-name" }, t("name")),
      el(
        "div",
        { class: "browse" },
        name,
        el("button", { type: "button", id: "columns-keep", onclick: keep }, t("columns_keep")),
      ),
    ),
  );
}
