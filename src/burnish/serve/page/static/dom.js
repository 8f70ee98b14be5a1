// @ts-check
// DOM helpers. Nodes are created directly; text is never parsed as HTML.
import { short } from "./format.js";
import { language, t } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

/**
 * Create an element from its tag, attributes (on… are event listeners) and children (nodes or text).
 * @param {string} tag @param {Record<string, any>} attributes @param {any[]} children @returns {any}
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
/**
 * Create a table from the cells of its head, and of each row.
 * @param {any[]} head @param {any[][]} rows @param {Record<string, any>} [attributes] @param {any} [caption]
 */
export const tableOf = (head, rows, attributes = {}, caption = null) => {
  const body = rows.map((cells) => el("tr", {}, cells));
  return el("table", attributes, caption, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
};
/** Create an SVG element. @param {string} tag @param {Record<string, any>} attributes @param {any[]} children */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}
/** @param {string} name */
export const icon = (name) => svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));

/** A number, with its exact value as a tooltip. @param {any} value @param {string} [tag] @returns {any} */
export const figure = (value, tag = "span") =>
  el(tag, { title: typeof value === "number" ? String(value) : null }, short(value, language));
/** Show a number in a node. @param {string} selector @param {any} value */
export const setFigure = (selector, value) => $(selector).replaceChildren(figure(value));

/** Show a text in a node. If text was only added at one end, a selection in it stays. @param {any} node @param {string} text */
export function setText(node, text) {
  const before = node.textContent;
  if (text === before) return;
  if (before && text.startsWith(before)) node.append(text.slice(before.length));
  else if (before && text.endsWith(before)) node.prepend(text.slice(0, -before.length));
  else node.textContent = text;
}

/** @param {string} selector @param {ParentNode} within @returns {any} */
export const $ = (selector, within = document) => within.querySelector(selector);
/** @param {string} selector @param {ParentNode} within @returns {any[]} */
export const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

/** @type {ReturnType<typeof setTimeout> | undefined} */
let said;
/** Show a notification, which screen readers announce. @param {string} text @param {[string, () => void]} [action] */
export function notify(text, action) {
  const place = $("#toast"),
    button =
      action &&
      el(
        "button",
        {
          type: "button",
          onclick: () => {
            place.replaceChildren();
            action[1]();
          },
        },
        action[0],
      );
  const dialog = $$("dialog[open]").at(-1); // it covers what is outside of it
  (dialog ?? document.body).append(place);
  dialog?.addEventListener("close", () => document.body.append(place), { once: true });
  place.replaceChildren(text, ...(button ? [button] : []));
  clearTimeout(said);
  said = setTimeout(() => place.replaceChildren(), action ? 12000 : 5000);
}
/** Copy the text of a selected field: the only way without https. Returns whether the browser did. @param {string} text */
function copySelected(text) {
  const focused = /** @type {any} */ (document.activeElement),
    area = el("textarea", { class: "hidden" });
  area.value = text;
  ($("dialog[open]") ?? document.body).append(area); // outside of an open dialog, nothing can be selected
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isCopied;
}
/** Copy text to the clipboard, and say whether that was possible. @param {string} text */
export async function copy(text) {
  const isCopied = await navigator.clipboard?.writeText(text).then(
    () => true,
    () => false,
  );
  notify(t(isCopied || copySelected(text) ? "copied" : "not_copied"));
}
/** Download a text or an image as a file. @param {Blob} blob @param {string} name */
export function download(blob, name) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
/** Create a menu button with three dots. @param {string} label @param {any[]} items */
export function menu(label, items) {
  const node = el(
    "details",
    { class: "menu" },
    el("summary", { class: "button quiet square", "aria-label": label, title: label }, icon("more")),
    el("div", { class: "items" }, items),
  );
  return node;
}
document.addEventListener(
  "click",
  (/** @type {any} */ { target }) => {
    if (target.closest("details.menu .items > *")) $("summary", target.closest("details")).focus(); // a dialog returns to it
  },
  { capture: true },
);
document.addEventListener("click", (/** @type {any} */ { target }) => {
  for (const open of $$("details.menu[open]"))
    if (!open.contains(target) || target.closest("details.menu .items > *")) open.open = false;
});
document.addEventListener("keydown", (event) => {
  const open = event.key === "Escape" && $("details.menu[open]");
  if (open) {
    open.open = false;
    $("summary", open).focus();
  }
});
/** Let arrow keys switch between tabs. @param {any[]} tabs @param {(tab: any) => void} chosen */
export function tabs(tabs, chosen) {
  /** @param {any} tab */
  const choose = (tab) => {
    for (const one of tabs) {
      one.setAttribute("aria-selected", String(one === tab));
      one.tabIndex = one === tab ? 0 : -1;
      $(`#${one.getAttribute("aria-controls")}`).hidden = one !== tab;
    }
    chosen(tab);
  };
  for (const tab of tabs) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      const move = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
      const shown = tabs.filter((one) => !one.hidden),
        next = shown[(shown.indexOf(tab) + move + shown.length) % shown.length];
      if (move) {
        choose(next);
        next.focus();
      }
    });
  }
  return choose;
}
/** Show a confirmation dialog; resolves to true or false. @param {string} text @param {string} yes */
export function askToConfirm(text, yes) {
  return new Promise((resolve) => {
    const dialog = el(
      "dialog",
      { "aria-label": text },
      el("div", { class: "body" }, el("p", {}, text)),
      el(
        "footer",
        {},
        el("button", { type: "button", onclick: () => dialog.close() }, t("cancel")),
        el("button", { type: "button", class: "main", onclick: () => dialog.close("yes") }, yes),
      ),
    );
    document.body.append(dialog);
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "yes");
      dialog.remove();
    });
    dialog.showModal();
  });
}
