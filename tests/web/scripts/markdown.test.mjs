import assert from "node:assert/strict";
import { test } from "node:test";

const { parse } = await import(new URL("../../../src/burnish/serve/page/static/markdown.js", import.meta.url));
const text = (content) => ({ kind: "text", text: content });
const list = (start, ...items) => ({ kind: "list", start, items });

test("a list may follow its introduction without a blank line", () => {
  assert.deepEqual(parse("Steps:\n1. one\n2. two\n\nDone."), [
    text("Steps:"),
    list(1, [text("one")], [text("two")]),
    text("Done."),
  ]);
  assert.deepEqual(parse("Points:\n- a\n- b"), [text("Points:"), list(null, [text("a")], [text("b")])]);
  assert.deepEqual(parse("It was in\n2020. Then"), [text("It was in\n2020. Then")]);
});
test("items hold lists, paragraphs and code", () => {
  assert.deepEqual(parse("1. a\n   - b\n   - c\n\n2. d\n\n   more\n"), [
    list(1, [text("a"), list(null, [text("b")], [text("c")])], [text("d"), text("more")]),
  ]);
  assert.deepEqual(parse("- a\n  ```py\n  if x:\n      y\n  ```\n- b"), [
    list(null, [text("a"), { kind: "code", language: "py", text: "if x:\n    y" }], [text("b")]),
  ]);
  assert.deepEqual(parse("- a\ncontinued\n- b"), [list(null, [text("a\ncontinued")], [text("b")])]);
});
test("a list of another type, or a paragraph after a blank line, ends a list", () => {
  assert.deepEqual(parse("- a\n1. b"), [list(null, [text("a")]), list(1, [text("b")])]);
  assert.deepEqual(parse("- a\n\nb"), [list(null, [text("a")]), text("b")]);
  assert.deepEqual(parse("- a\n# b"), [list(null, [text("a")]), { kind: "heading", text: "b" }]);
});
test("a heading needs no blank lines around it", () => {
  assert.deepEqual(parse("a\n## b ##\nc"), [text("a"), { kind: "heading", text: "b" }, text("c")]);
  assert.deepEqual(parse("#hashtag"), [text("#hashtag")]);
});
test("quotes, rules and tables", () => {
  assert.deepEqual(parse("> a\n> - b\n\nc"), [
    { kind: "quote", blocks: [text("a"), list(null, [text("b")])] },
    text("c"),
  ]);
  assert.deepEqual(parse("a\n\n---\n* * *\nb"), [text("a"), { kind: "rule" }, { kind: "rule" }, text("b")]);
  assert.deepEqual(parse("Table:\n| x | y |\n|---|--:|\n| 1 | 2 |\nend"), [
    text("Table:"),
    { kind: "table", head: ["x", "y"], rows: [["1", "2"]] },
    text("end"),
  ]);
});
test("code may be unfinished, empty, or contain shorter fences", () => {
  assert.deepEqual(parse("```Python title\na"), [{ kind: "code", language: "python title", text: "a", isOpen: true }]);
  assert.deepEqual(parse("```\n```\nb"), [{ kind: "code", language: "", text: "" }, text("b")]);
  assert.deepEqual(parse("````\n```\na\n```\n````"), [{ kind: "code", language: "", text: "```\na\n```" }]);
  assert.deepEqual(parse("a ```b``` c"), [text("a ```b``` c")]);
});
test("code of a whole text has ended, also inside lists and quotes", () => {
  for (const text of ["```\na", "- a\n  ```\n  b", "> ```\n> a", "1. > - ```\n        a"]) {
    assert.match(JSON.stringify(parse(text)), /"isOpen":true/);
    assert.equal(JSON.stringify(parse(text, true)), JSON.stringify(parse(text)).replace(',"isOpen":true', ""));
  }
});
test("deep nesting ends in text, and long texts take little time", () => {
  assert.doesNotThrow(() => parse(">".repeat(100_000)));
  assert.doesNotThrow(() => parse(Array.from({ length: 500 }, (_, depth) => `${" ".repeat(2 * depth)}- a`).join("\n")));
  const begin = performance.now();
  for (const part of ["- a\n", "a\n", "> a\n", "1. a\n   b\n\n", "```\n", "| a\n", "    ", "* ", "#"])
    parse(part.repeat(20_000));
  assert.ok(performance.now() - begin < 5000);
});
test("every word of a text is kept", () => {
  const words = ["- ", "1. ", "> ", "# ", "```", "|", "---", "  ", "\n", "\n\n", "word", "    ", "~~~", "* "];
  let seed = 1;
  for (let run = 0; run < 2000; run += 1) {
    const parts = Array.from({ length: 12 }, (_, n) => {
      seed = (seed * 48271) % 2147483647;
      return words[seed % words.length] + (seed % 3 ? "" : `w${n}`);
    });
    const source = parts.join(""),
      shown = JSON.stringify(parse(source)).toLowerCase();
    for (const [word] of source.matchAll(/w\d+/g)) assert.ok(shown.includes(word), JSON.stringify([source, word]));
  }
});
test("tabs in code are kept, and taken for four spaces elsewhere", () => {
  const code = (content) => ({ kind: "code", language: "make", text: content });
  assert.deepEqual(parse("```make\na:\n\tb\n```\n\tc"), [code("a:\n\tb"), text("    c")]);
  assert.deepEqual(parse("- a\n\n  ```make\n  a:\n  \tb\n  ```"), [list(null, [text("a"), code("a:\n\tb")])]);
});
test("the marks at the end of a heading are left out", () => {
  const headings = parse("# a #\n## b#\n# # c ##  \n# ##").map((block) => block.text);
  assert.deepEqual(headings, ["a", "b#", "# c", ""]);
});
test("long lines of marks and spaces are parsed at once", () => {
  const began = performance.now();
  for (const line of ["```" + " ".repeat(5000) + "`", "~".repeat(5000) + "`", "#" + " #".repeat(5000) + "x"])
    parse(line);
  assert.ok(performance.now() - began < 1000);
});
