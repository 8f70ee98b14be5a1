// @ts-check
// Parses a subset of Markdown (CommonMark 0.31, with GitHub's tables). Does not access the DOM.

/**
 * @typedef {{kind: "text" | "heading", text: string}
 *   | {kind: "rule"}
 *   | {kind: "code", language: string, text: string, isOpen?: boolean}
 *   | {kind: "table", head: string[], rows: string[][]}
 *   | {kind: "quote", blocks: Block[]}
 *   | {kind: "list", start: number | null, items: Block[][]}} Block
 * A list with a start is numbered. The end of an open code block is missing.
 */

// Each pattern takes linear time, because a model may write anything.
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/,
  HEADING = /^ {0,3}#{1,6}\s/,
  RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/,
  QUOTE = /^ {0,3}> ?/,
  ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])(\s+|$)/,
  DASHES = /^[\s|:]*-[\s|:-]*$/;
const MAX_DEPTH = 8;

const indentOf = (/** @type {string} */ line) =>
  line.slice(0, line.length - line.trimStart().length).replaceAll("\t", "    ").length;
/** Remove up to a number of columns of the indentation. A tab counts as four. @param {string} line @param {number} columns */
function outdent(line, columns) {
  let at = 0;
  for (; at < line.length && columns > 0 && /\s/.test(line[at]); at += 1) columns -= line[at] === "\t" ? 4 : 1;
  return line.slice(at);
}
/** The text of a heading, without the marks at its end. @param {string} line */
function headingOf(line) {
  const text = line.trim().replace(/^#+\s*/, "");
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return end && text[end - 1].trim() ? text : text.slice(0, end).trimEnd();
}
const isItem = (/** @type {string} */ line) => ITEM.test(line) && !RULE.test(line);
const cellsOf = (/** @type {string} */ line) =>
  line
    .trim()
    .replace(/^\||\|$/g, "")
    .split("|")
    .map((cell) => cell.trim());

/** Parse a text, which may still be written unless `isWhole`. @param {string} text @param {boolean} [isWhole] */
export function parse(text, isWhole = false) {
  let isCode = false; // tabs in code are kept
  const lines = text.split("\n").map((line) => {
    if (FENCE.test(line.trimStart())) isCode = !isCode;
    return isCode ? line : line.replaceAll("\t", "    ");
  });
  const found = blocks(lines, 0);
  return isWhole ? found.map(ended) : found;
}
/** The same block without open code: no more text follows. @param {Block} block @returns {Block} */
function ended(block) {
  if (block.kind === "code") return { ...block, isOpen: undefined };
  if (block.kind === "quote") return { ...block, blocks: block.blocks.map(ended) };
  return block.kind === "list" ? { ...block, items: block.items.map((item) => item.map(ended)) } : block;
}

/** @param {string[]} lines @param {number} depth @returns {Block[]} */
function blocks(lines, depth) {
  if (depth > MAX_DEPTH) return [{ kind: "text", text: lines.join("\n") }];
  /** @type {Block[]} */
  const found = [];
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    if (!line.trim()) at += 1;
    else if (FENCE.test(line)) at = code(lines, at, found);
    else if (HEADING.test(line)) {
      found.push({ kind: "heading", text: headingOf(line) });
      at += 1;
    } else if (RULE.test(line)) {
      found.push({ kind: "rule" });
      at += 1;
    } else if (QUOTE.test(line)) {
      const end = endOf(lines, at, (next) => QUOTE.test(next));
      const quoted = lines.slice(at, end).map((each) => each.replace(QUOTE, ""));
      found.push({ kind: "quote", blocks: blocks(quoted, depth + 1) });
      at = end;
    } else if (isItem(line)) at = list(lines, at, depth, found);
    else if (startsTable(lines, at)) {
      const end = endOf(lines, at, (next) => next.includes("|"));
      found.push({ kind: "table", head: cellsOf(line), rows: lines.slice(at + 2, end).map(cellsOf) });
      at = end;
    } else {
      const start = at;
      do at += 1;
      while (at < lines.length && !interrupts(lines, at));
      found.push({ kind: "text", text: lines.slice(start, at).join("\n") });
    }
  }
  return found;
}
/** Return the index after the lines that `belongs` accepts. The first one does. */
function endOf(
  /** @type {string[]} */ lines,
  /** @type {number} */ at,
  /** @type {(line: string) => boolean} */ belongs,
) {
  do at += 1;
  while (at < lines.length && belongs(lines[at]));
  return at;
}
/** Whether a line ends the paragraph above it. A numbered list must start with 1, because a year may start a line. */
function interrupts(/** @type {string[]} */ lines, /** @type {number} */ at) {
  const line = lines[at],
    number = ITEM.exec(line)?.[2];
  return (
    !line.trim() ||
    [FENCE, HEADING, RULE, QUOTE].some((pattern) => pattern.test(line)) ||
    (isItem(line) && (number === undefined || number === "1")) ||
    startsTable(lines, at)
  );
}
const startsTable = (/** @type {string[]} */ lines, /** @type {number} */ at) =>
  lines[at].includes("|") && DASHES.test(lines[at + 1] ?? "");

/** Add a code block. While an answer is being written, its end may be missing. */
function code(/** @type {string[]} */ lines, /** @type {number} */ at, /** @type {Block[]} */ found) {
  const [, mark, language] = /** @type {RegExpExecArray} */ (FENCE.exec(lines[at])),
    indent = indentOf(lines[at]);
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(mark) && !lines[end].trim().replaceAll(mark[0], "")))
    end += 1;
  const inside = lines.slice(at + 1, end).map((line) => outdent(line, indent));
  const block = /** @type {const} */ ({
    kind: "code",
    language: language.trim().toLowerCase(),
    text: inside.join("\n"),
  });
  found.push(end < lines.length ? block : { ...block, isOpen: true });
  return end + 1;
}
/** Add a list. The lines of an item are those indented more than its marker, and lines that continue its paragraph. */
function list(
  /** @type {string[]} */ lines,
  /** @type {number} */ at,
  /** @type {number} */ depth,
  /** @type {Block[]} */ found,
) {
  const [, margin, start] = /** @type {RegExpExecArray} */ (ITEM.exec(lines[at]));
  /** @type {Block[][]} */
  const items = [];
  while (at < lines.length && isItem(lines[at])) {
    const [marker, indent, number] = /** @type {RegExpExecArray} */ (ITEM.exec(lines[at]));
    if (indent.length < margin.length || (number === undefined) !== (start === undefined)) break;
    const inside = [lines[at].slice(marker.length)];
    for (at += 1; at < lines.length; at += 1) {
      const line = lines[at],
        follows = lines[at - 1].trim() && !interrupts(lines, at);
      if (line.trim() && indentOf(line) <= indent.length && !(follows && !isItem(line))) break;
      inside.push(outdent(line, marker.length));
    }
    items.push(blocks(inside, depth + 1));
  }
  found.push({ kind: "list", start: start === undefined ? null : Number(start), items });
  return at;
}
