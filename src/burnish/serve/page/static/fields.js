// @ts-check
// Form fields created from option declarations: label, option name, and a control for its type.
import { el } from "./dom.js";
import { helpOf, humanized } from "./format.js";
import { language, t } from "./words.js";

/** @typedef {Record<string, any>} Field */
const NEEDED = new Set(["model_name_or_path", "dataset", "output_dir"]);

/** @param {Field} field */
export const labelOf = (field) => field.label ?? humanized(field.name);
/** Format a value for a control. @param {any} value */
export function textOf(value) {
  if (value === undefined || value === null) return "";
  if (Array.isArray(value) && value.every((item) => typeof item === "string")) return value.join(", ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
/** Show a value in a control. A select receives an option for a value that it does not have. @param {any} input @param {string} text */
export function showValue(input, text) {
  if (input.value === text) return;
  if (input.localName === "select") {
    input.querySelector("[data-unlisted]")?.remove();
    if (![...input.options].some((option) => option.value === text))
      input.append(el("option", { value: text, "data-unlisted": true }, t("not_listed", { value: text })));
  }
  input.value = text;
}
/** @param {Field} field @param {string} id @param {boolean} isOff */
function control(field, id, isOff) {
  const common = { id, name: field.name, "aria-describedby": `${id}-hint ${id}-problem`, disabled: isOff };
  const usual = NEEDED.has(field.name)
    ? t("required")
    : field.default === null || field.default === undefined
      ? t("automatic")
      : textOf(field.default);
  if (field.control === "switch" || field.control === "choice") {
    const choices = field.control === "switch" ? ["true", "false"] : field.choices;
    const name = (/** @type {string} */ choice) =>
      field.control === "switch" ? t(choice === "true" ? "on" : "off") : choice;
    const shown =
      field.control === "switch" && typeof field.default === "boolean" ? t(field.default ? "on" : "off") : usual;
    return el(
      "select",
      common,
      el("option", { value: "" }, `${t("default")}: ${shown}`),
      choices.map((/** @type {string} */ choice) => el("option", { value: choice }, name(choice))),
    );
  }
  const list = field.choices ? `${id}-choices` : null;
  const input = el("input", {
    ...common,
    type: "text",
    inputmode: field.control === "number" ? "decimal" : null,
    placeholder: usual,
    list,
    spellcheck: "false",
    autocomplete: "off",
  });
  return list
    ? [
        input,
        el(
          "datalist",
          { id: list },
          field.choices.map((/** @type {string} */ choice) => el("option", { value: choice })),
        ),
      ]
    : input;
}
/** @param {Field} field @param {{risk?: string, browse?: () => void}} how */
export function fieldOf(field, { risk, browse } = {}) {
  const id = `box-${field.name}`,
    help = field.short;
  const hint = risk
    ? t("not_from_page", { why: risk })
    : (help ?? `${helpOf(field)}${field.ignored ? ` ${field.ignored}` : ""}`);
  const input = control(field, id, Boolean(risk));
  return el(
    "div",
    { class: `field${browse ? " full-width" : ""}`, "data-option": field.name },
    el(
      "div",
      { class: "name" },
      el("label", { for: id }, labelOf(field)),
      el("code", { title: field.name }, field.name),
    ),
    browse
      ? el("div", { class: "browse" }, input, el("button", { type: "button", onclick: browse }, t("browse")))
      : input,
    el("p", { class: "hint", id: `${id}-hint`, lang: help || field.label || language === "en" ? null : "en" }, hint),
    el("p", { class: "problem", id: `${id}-problem`, lang: language === "en" ? null : "en" }),
  );
}
/** Whether a field matches a search: all words occur in its label, name, help or aliases. @param {Field} field @param {string} text */
export function isFound(field, text) {
  const whole = [field.name, field.name.replaceAll("_", " "), labelOf(field), field.help, ...(field.aliases ?? [])]
    .join(" ")
    .toLowerCase();
  return text
    .toLowerCase()
    .split(/\s+/)
    .every((word) => whole.includes(word));
}
