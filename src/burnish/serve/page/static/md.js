// The little of Markdown that answers use, as nodes: fences, inline code, bold, headings, lists. Text stays text.
import { el, visible } from "./base.js";

/** Nodes of a line: `code` and **bold**. */
function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) return el("code", {}, visible(part.slice(1, -1)));
    if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) return el("b", {}, visible(part.slice(2, -2)));
    return visible(part);
  });
}

/** Nodes of a whole text. */
export function nodes(text) {
  const found = [];
  for (const [place, part] of text.split(/^```[^\n]*\n?/m).entries()) {
    if (place % 2) { found.push(el("pre", {}, el("code", {}, visible(part.replace(/\n$/, ""))))); continue; }
    for (const block of part.split(/\n{2,}/)) {
      if (!block.trim()) continue;
      const lines = block.split("\n");
      if (lines.every((line) => /^\s*[-*] /.test(line))) found.push(el("ul", {}, lines.map((line) => el("li", {}, inline(line.replace(/^\s*[-*] /, ""))))));
      else if (/^#{1,6} /.test(lines[0]) && lines.length === 1) found.push(el("p", {}, el("b", {}, inline(lines[0].replace(/^#+ /, "")))));
      else found.push(el("p", {}, inline(block)));
    }
  }
  return found;
}
