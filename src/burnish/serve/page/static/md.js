// @ts-check
// Renders Markdown as DOM nodes. HTML in it is shown as text, images as links.
import { $, copy, el, icon } from "./dom.js";
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
/** What a node shows: each item as JSON, the kind of its node, and the node. @typedef {{text: string, kind: string, node: any}} Shown */
/** @type {WeakMap<Element, Shown[]>} */
const shown = new WeakMap();
/**
 * Show items as the first children of a node, and return it. Items that did not change keep their nodes. `render` may
 * show a changed item in the node of the item that was in its place, which it receives if the kinds are the same.
 * @template Item @param {any} place @param {Item[]} items @param {(item: Item, old?: any) => any} render
 * @param {(item: Item) => string} [kindOf]
 */
function show(place, items, render, kindOf = () => "") {
  const before = shown.get(place) ?? [],
    texts = items.map((item) => JSON.stringify(item));
  let same = 0;
  while (same < texts.length && texts[same] === before[same]?.text) same += 1;
  const now = before.slice(0, same);
  for (const [at, item] of items.slice(same).entries()) {
    const kind = kindOf(item),
      old = at === 0 && before[same]?.kind === kind ? before[same].node : undefined,
      node = render(item, old);
    if (node !== old) place.append(node);
    now.push({ text: texts[same + at], kind, node });
  }
  for (const { node } of before.slice(same)) if (node !== now[same]?.node) node.remove();
  shown.set(place, now);
  return place;
}
/** Characters of a block being written that are highlighted with each update. */
const HIGHLIGHTED = 4000;
/** @param {string} code @param {string} kind @param {boolean} isOpen @param {any} [old] */
function fence(code, kind, isOpen, old) {
  const end = isOpen ? HIGHLIGHTED : code.length,
    tokens = [...pieces(code.slice(0, end), kind.split(" ")[0]), ["", code.slice(end)]];
  const place = old ? $("code", old) : el("code");
  show(place, tokens, ([name, text]) =>
    name ? el("span", { class: `code-${name}` }, visible(text)) : document.createTextNode(visible(text)),
  );
  const node = old ?? el("div", { class: "code" }, el("div", { class: "row" }, el("small", { class: "grow" }, kind)));
  node.code = code;
  if (old) return node;
  const button = { type: "button", class: "quiet", "aria-label": t("copy"), title: t("copy") };
  $(".row", node).append(el("button", { ...button, onclick: () => copy(node.code) }, icon("copy")));
  node.append(el("pre", { tabindex: 0 }, place));
  return node;
}
/** @param {string[]} head @param {string[][]} rows @param {any} [old] */
function table(head, rows, old) {
  const row = (/** @type {string[]} */ cells, /** @type {string} */ tag = "td") =>
    el(
      "tr",
      {},
      cells.map((cell) => el(tag, tag === "th" ? { scope: "col" } : {}, inline(cell))),
    );
  const body = old ? $("tbody", old) : el("tbody");
  show(body, rows, (cells) => row(cells));
  return old ?? el("div", { class: "scroll" }, el("table", {}, el("thead", {}, row(head, "th")), body));
}
/** @typedef {import("./markdown.js").Block} Block */
/** @param {Block[]} blocks @param {any} [old] */
const item = (blocks, old = el("li")) => show(old, blocks, node, kindOf);
/** @param {Block} block @param {any} [old] @returns {any} */
function node(block, old) {
  if (block.kind === "code") return fence(block.text, block.language, Boolean(block.isOpen), old);
  if (block.kind === "table") return table(block.head, block.rows, old);
  if (block.kind === "quote") return show(old ?? el("blockquote"), block.blocks, node, kindOf);
  if (block.kind === "rule") return el("hr");
  if (block.kind === "list")
    return show(old ?? (block.start === null ? el("ul") : el("ol", { start: block.start })), block.items, item);
  return el("p", { class: block.kind === "heading" && "heading" }, inline(block.text));
}
/** What must be equal for two blocks to share a node. @param {any} block @returns {string} */
const kindOf = ({ kind, language, head, start }) => JSON.stringify([kind, language, head, start]);
/** Render a text. @param {string} text */
export const nodes = (text) => parse(text, true).map((block) => node(block));
/**
 * Show a text that is being written: what did not change keeps its nodes, and a selection in them.
 * @param {any} place a node without other children @param {string} text @param {boolean} isWhole no text follows
 */
export const update = (place, text, isWhole) => show(place, parse(text, isWhole), node, kindOf);
