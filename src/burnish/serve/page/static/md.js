// @ts-check
// Renders Markdown as DOM nodes. HTML in it is shown as text, images as links.
import { copy, el, icon } from "./dom.js";
import { visible } from "./format.js";
import { pieces } from "./highlight.js";
import { parse } from "./markdown.js";
import { t } from "./words.js";

const INLINE =
  /(`[^`\n]+`|\*\*[^*\n]+\*\*|\*[^*\s][^*\n]*\*|~~[^~\n]+~~|!?\[[^[\]\n]+\]\(https?:\/\/[^\s()]+\)|https?:\/\/[^\s<>()"'`*]*[\w/])/;
const MARKS = { "`": "code", "**": "b", "*": "i", "~~": "s" };

/** Render `code`, **bold**, *italic*, ~~struck~~ text and links. @param {string} text @returns {any[]} */
const inline = (text) => text.split(INLINE).map((part, place) => (place % 2 ? marked(part) : visible(part)));
/** @param {string} part */
function marked(part) {
  const [, text, address] = /^!?\[(.+)\]\((.+)\)$/.exec(part) ?? [];
  if (address) return link(text, address);
  const mark = Object.entries(MARKS).find(([letters]) => part.startsWith(letters));
  if (!mark) return link(part, part);
  const inside = part.slice(mark[0].length, -mark[0].length);
  return el(mark[1], {}, mark[1] === "code" ? visible(inside) : inline(inside));
}
/** A link to another site, which is not told where it was followed. @param {string} text @param {string} href */
const link = (text, href) =>
  el("a", { href, title: visible(href), target: "_blank", rel: "noopener noreferrer" }, visible(text));
/** @param {string} code @param {string} kind */
function fence(code, kind) {
  const colored = pieces(code, kind.split(" ")[0]).map(([name, text]) =>
    name ? el("span", { class: `code-${name}` }, visible(text)) : visible(text),
  );
  const button = el(
    "button",
    { type: "button", class: "quiet", "aria-label": t("copy"), title: t("copy"), onclick: () => copy(code) },
    icon("copy"),
  );
  return el(
    "div",
    { class: "code" },
    el("div", { class: "row" }, el("small", { class: "grow" }, kind), button),
    el("pre", { tabindex: 0 }, el("code", {}, colored)),
  );
}
/** @param {string[]} head @param {string[][]} rows */
function table(head, rows) {
  const row = (/** @type {string[]} */ cells, /** @type {string} */ tag) =>
    el(
      "tr",
      {},
      cells.map((cell) => el(tag, tag === "th" ? { scope: "col" } : {}, inline(cell))),
    );
  const body = rows.map((cells) => row(cells, "td"));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, row(head, "th")), el("tbody", {}, body)));
}
/** @param {import("./markdown.js").Block} block @returns {any} */
function node(block) {
  if (block.kind === "code") return fence(block.text, block.language);
  if (block.kind === "table") return table(block.head, block.rows);
  if (block.kind === "quote") return el("blockquote", {}, block.blocks.map(node));
  if (block.kind === "rule") return el("hr");
  if (block.kind === "list") {
    const items = block.items.map((blocks) => el("li", {}, blocks.map(node)));
    return block.start === null ? el("ul", {}, items) : el("ol", { start: block.start }, items);
  }
  return el("p", { class: block.kind === "heading" && "heading" }, inline(block.text));
}
/** Render a text. @param {string} text */
export const nodes = (text) => parse(text).map(node);
