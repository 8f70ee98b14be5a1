// @ts-check
// Renders a subset of Markdown as DOM nodes: code blocks, inline code, bold, headings, lists, tables. No HTML.
import { copy, el, icon } from "./dom.js";
import { visible } from "./format.js";
import { pieces } from "./highlight.js";
import { t } from "./words.js";

/** Render a line with `code`, **bold** and *italic*. @param {string} text */
function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*|\*[^*\s][^*\n]*\*)/).map((part) => {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`"))
      return el("code", {}, visible(part.slice(1, -1)));
    if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) return el("b", {}, visible(part.slice(2, -2)));
    if (part.length > 2 && part.startsWith("*") && part.endsWith("*")) return el("i", {}, visible(part.slice(1, -1)));
    return visible(part);
  });
}
/** @param {string} code @param {string} kind */
function fence(code, kind) {
  const colored = pieces(code, kind).map(([name, text]) =>
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
/** @param {string[]} lines */
function table(lines) {
  const cells = (/** @type {string} */ line) =>
    line
      .replace(/^\s*\||\|\s*$/g, "")
      .split("|")
      .map((cell) => cell.trim());
  const [head, , ...body] = lines;
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          cells(head).map((cell) => el("th", { scope: "col" }, inline(cell))),
        ),
      ),
      el(
        "tbody",
        {},
        body.map((line) =>
          el(
            "tr",
            {},
            cells(line).map((cell) => el("td", {}, inline(cell))),
          ),
        ),
      ),
    ),
  );
}
/** @param {string} block */
function blockNode(block) {
  const lines = block.split("\n");
  if (lines.every((line) => /^\s*[-*] /.test(line)))
    return el(
      "ul",
      {},
      lines.map((line) => el("li", {}, inline(line.replace(/^\s*[-*] /, "")))),
    );
  if (lines.every((line) => /^\s*\d+[.)] /.test(line)))
    return el(
      "ol",
      { start: Number.parseInt(lines[0], 10) || 1 },
      lines.map((line) => el("li", {}, inline(line.replace(/^\s*\d+[.)] /, "")))),
    );
  if (/^#{1,6} /.test(lines[0]) && lines.length === 1)
    return el("p", { class: "heading" }, inline(lines[0].replace(/^#+ /, "")));
  if (lines.length > 1 && /\|/.test(lines[0]) && /^[\s|:-]+$/.test(lines[1])) return table(lines);
  return el("p", {}, inline(block));
}
/** Render a text. @param {string} text */
export function nodes(text) {
  const parts = text.split(/^```([^\n`]*)\n?/m); // text, language, code, "", text, ...
  const found = [];
  for (let place = 0; place < parts.length; place += 4) {
    for (const block of parts[place].split(/\n{2,}/))
      if (block.trim()) found.push(blockNode(block.replace(/^\n|\n$/g, "")));
    if (place + 2 < parts.length)
      found.push(fence(parts[place + 2].replace(/\n$/, ""), parts[place + 1].trim().toLowerCase()));
  }
  return found;
}
