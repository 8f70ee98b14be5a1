// @ts-check
// Syntax highlighting: comments, strings, numbers and keywords of common languages. Does not access the DOM.

const WORDS = new Set(
  "and as assert async await bool boolean break case catch class const continue def default del do done echo elif else enum except export extends false False fi finally float fn for from func function global if impl import in int interface is lambda let match mod mut new nil None nonlocal not null or package pass pub raise return select self static string struct super switch then this throw true True try type undefined use var void when where while with yield SELECT FROM WHERE INSERT UPDATE JOIN".split(
    " ",
  ),
);
const HASH = new Set([
  "python",
  "py",
  "bash",
  "sh",
  "shell",
  "yaml",
  "yml",
  "toml",
  "ruby",
  "r",
  "dockerfile",
  "makefile",
]);
const PLAIN = new Set(["text", "txt", "plain", "markdown", "md"]);

/**
 * Split code into tokens in order, each with its type: "comment", "text", "number", "word", or "" for anything else.
 * @param {string} code @param {string} kind the language that the fence names @returns {[string, string][]}
 */
export function pieces(code, kind) {
  if (PLAIN.has(kind)) return [["", code]];
  const comment = HASH.has(kind)
    ? "#[^\\n]*"
    : kind
      ? "//[^\\n]*|/\\*[\\s\\S]*?\\*/|<!--[\\s\\S]*?-->"
      : "(?:#|//) [^\\n]*";
  const pattern = new RegExp(
    `(${comment})|("""[\\s\\S]*?"""|'''[\\s\\S]*?'''|"(?:\\\\.|[^"\\\\\\n])*"|'(?:\\\\.|[^'\\\\\\n])*'|\`(?:\\\\.|[^\`\\\\])*\`)|\\b(\\d[\\w.]*)\\b|\\b([A-Za-z_]\\w*)\\b`,
    "g",
  );
  /** @type {[string, string][]} */
  const found = [];
  let at = 0;
  const add = (/** @type {string} */ name, /** @type {string} */ text) => {
    const last = found.at(-1);
    if (last && last[0] === name) last[1] += text;
    else if (text) found.push([name, text]);
  };
  for (const match of code.matchAll(pattern)) {
    add("", code.slice(at, match.index));
    const [whole, isComment, isText, isNumber] = match;
    add(isComment ? "comment" : isText ? "text" : isNumber ? "number" : WORDS.has(whole) ? "word" : "", whole);
    at = match.index + whole.length;
  }
  add("", code.slice(at));
  return found;
}
