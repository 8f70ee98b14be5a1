import assert from "node:assert/strict";
import { test } from "node:test";

const {
  ago,
  axisLabels,
  bytes,
  clock,
  duration,
  helpOf,
  hasWeights,
  joined,
  optionsOf,
  humanized,
  plain,
  progressOf,
  short,
  shortOption,
  visible,
} = await import(new URL("../../../src/burnish/serve/page/static/format.js", import.meta.url));

test("labels of an axis have one notation", () => {
  assert.deepEqual(axisLabels([0, 0.0005, 0.001]), ["0", "5e-4", "1e-3"]);
  assert.deepEqual(axisLabels([0, 0.01, null]), ["0", "0.01", ""]);
  assert.deepEqual(axisLabels([0, 1000, 2000]), ["0", "1K", "2K"]);
  assert.deepEqual(axisLabels([0, 1e18]), ["0", "1e18"]);
});
test("figures are as short as a person reads them", () => {
  assert.equal(short(0.00005), "5e-5");
  assert.equal(short(1.23456), "1.235");
  assert.equal(short(123456), "123,456");
  assert.equal(short(123456.7), "123.5K");
  assert.equal(short(2027), "2,027");
  assert.equal(short(2027.4), "2,027");
  assert.equal(short(30.0), "30");
  assert.equal(short(1e18), "1e18");
  assert.equal(short(-2.5e20), "-2.5e20");
  assert.equal(short(null), "–");
  assert.equal(short("NaN"), "NaN");
  assert.equal(bytes(5.9e9), "5.9 GB");
  assert.equal(duration(3723), "1:02:03");
  assert.equal(ago(1000, "en", 1000 + 7200), "2 hours ago");
});
test("values of options are as a person writes them", () => {
  for (const [text, shown] of [
    ["30.0", "30"],
    ["5.0e-05", "5e-5"],
    ["0.10000000149", "0.1"],
    ["1024", "1024"],
    ["saves/30.0", "saves/30.0"],
    ["true", "true"],
    ['["demo_train", "b"]', "demo_train, b"],
    ['["a\\"b"]', '["a\\"b"]'],
    ["[1, 2]", "[1, 2]"],
  ])
    assert.equal(shortOption(text), shown);
});
test("what cannot be seen is shown, and what a terminal would obey is left out", () => {
  assert.equal(visible("a\u202eb"), "a⟨U+202E⟩b");
  assert.equal(plain("10%\r\u001b[31m20%\u001b[0m"), "20%");
});
test("options are read from a run's YAML", () => {
  assert.deepEqual(optionsOf('# by\nlearning_rate: 0.0001  # run.yaml\noutput_dir: "saves/a"\n'), {
    learning_rate: "0.0001",
    output_dir: "saves/a",
  });
  assert.equal(humanized("max_grad_norm"), "Max grad norm");
});
test("sentences are separated, also after a quoted value", () => {
  assert.equal(joined("Received: not json", "Write JSON."), "Received: not json. Write JSON.");
  assert.equal(joined("It failed.", "Try again."), "It failed. Try again.");
  assert.equal(joined("It failed", ""), "It failed");
  assert.equal(joined(undefined, "Try again."), "Try again.");
});
test("a run without a checkpoint has weights only if it is done", () => {
  const run = { kind: "train", maker: "burnish", checkpoint: null, state: "failed" };
  assert.equal(hasWeights(run), false);
  assert.equal(hasWeights({ ...run, state: "done" }), true);
  assert.equal(hasWeights({ ...run, checkpoint: 8 }), true);
  assert.equal(hasWeights({ ...run, kind: "predict", state: "done" }), false);
});
test("progress is in steps and epochs of two decimals, or in prompts without training", () => {
  const t = (key, values) => `${key} ${Object.values(values).join("/")}`;
  const run = { step: 3, total: 9, epoch: 0.008163 };
  assert.equal(progressOf({ ...run, kind: "train" }, t), "step_of 3/9 · epoch_is 0.01");
  assert.equal(progressOf({ ...run, kind: "predict", epoch: null }, t), "done_of 3/9");
});
test("a long line without a carriage return is shown at once", () => {
  assert.equal(plain("10%\r20%\r\n30%\r40%"), "20%\n40%");
  const long = "x".repeat(300000);
  const began = performance.now();
  assert.equal(plain(long), long);
  assert.ok(performance.now() - began < 1000);
});
test("values that are not numbers are shown as they are", () => {
  assert.equal(short(true), "true");
  assert.equal(short("NaN"), "NaN");
});
test("the time of another day has its date", () => {
  assert.match(clock(1.79e9, "en"), /2026/);
  assert.doesNotMatch(clock(Date.now() / 1000, "en"), /20\d\d/);
});
test("the unit of an option is named once", () => {
  assert.equal(
    helpOf({ help: "Number of steps between checkpoints.", unit: "steps" }),
    "Number of steps between checkpoints.",
  );
  assert.equal(helpOf({ help: "Default: the model's.", unit: "s" }), "Default: the model's. (s)");
  assert.equal(helpOf({ help: "Size of a file.", unit: "GB" }), "Size of a file. (GB)");
  assert.equal(helpOf({ help: "Text." }), "Text.");
});
