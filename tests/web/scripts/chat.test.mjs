import assert from "node:assert/strict";
import { test } from "node:test";

const at = (name) => new URL(`../../../src/burnish/serve/page/static/${name}`, import.meta.url);
const { pieces } = await import(at("highlight.js"));

test("code is cut into pieces that give it back", () => {
  const code = 'def f(x):  # twice\n    return 2 * x + "a#b"\n';
  const found = pieces(code, "python");
  assert.equal(found.map(([, text]) => text).join(""), code);
  assert.deepEqual(
    found.filter(([name]) => name),
    [
      ["word", "def"],
      ["comment", "# twice"],
      ["word", "return"],
      ["number", "2"],
      ["text", '"a#b"'],
    ],
  );
});
test("a comment is what its language says, and plain text stays plain", () => {
  assert.deepEqual(pieces("a // b", "js"), [
    ["", "a "],
    ["comment", "// b"],
  ]);
  assert.deepEqual(pieces("a // b", "python"), [["", "a // b"]]);
  assert.deepEqual(pieces("if 1", "text"), [["", "if 1"]]);
  assert.deepEqual(pieces("", "js"), []);
});
