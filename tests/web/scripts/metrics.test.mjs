import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const page = (name) => new URL(`../../../src/burnish/serve/page/${name}`, import.meta.url);
const { groups, titleOf, nameOf, fullNameOf } = await import(page("static/metrics.js"));
const words = (language) =>
  Object.assign(
    {},
    ...[language, `run.${language}`].map((name) => JSON.parse(readFileSync(page(`words/${name}.json`)))),
  );
const translator = (language) => {
  const texts = words(language);
  return (key, values = {}) => {
    assert.ok(key in texts, `${language}: ${key}`);
    return Object.entries(values).reduce((text, [name, value]) => text.replace(`{${name}}`, value), texts[key]);
  };
};
const english = translator("en");
const columnsOf = (names) => Object.fromEntries(["step", ...names].map((name) => [name, [1]]));
const shape = (names) => groups(columnsOf(names)).map((one) => [one.name, one.columns.length, one.points.length]);
const GRPO = [
  ...["reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "rewards/exact/mean", "rewards/exact/std"],
  ...["rewards/exact/none", "completions/clipped_ratio", "completions/mean_length", "completions/min_length"],
  ...["completions/max_length", "completions/mean_terminated_length", "completions/min_terminated_length"],
  "completions/max_terminated_length",
];
const EVERY = [
  ...GRPO,
  ...GRPO.map((name) => `eval_${name}`),
  ...["clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean", "clip_ratio/high_max"],
  ...["clip_ratio/region_mean", "cispo_clip_ratio", "vespo/phi_seq_mean", "frac_groups_dropped", "entropy_coef"],
  ...["time/generate", "time/logps", "time/reward", "time/train", "step_time", "sampling/logp_difference"],
  ...["eval_pass@1", "eval_pass@4", "tools/call_frequency", "tools/failure_frequency", "policy_loss"],
  ...["ppo/policy_loss", "ppo/value_loss", "ppo/clipfrac", "ppo/value_clipfrac", "ppo/entropy", "ppo/skipped"],
  ...["objective/kl", "kl_coef", "accuracy", "margin", "mean_reward", "min_reward", "max_reward"],
  ...["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "mean_token_accuracy"],
  ...["logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected", "nll_loss", "aux_loss"],
];

test("a run of rollouts shows its reward first, others their loss, and no column twice", () => {
  const names = shape(["loss", "reward", "rewards/format/mean", "kl", "lr", "tokens"]).map(([name]) => name);
  assert.deepEqual(names, ["reward", "loss", "functions", "kl", "lr", "rate"]);
  assert.deepEqual(shape(["loss", "lr"])[0], ["loss", 1, 0]);
  const shown = groups(columnsOf(EVERY)).flatMap((one) => [...one.columns, ...one.points]);
  assert.deepEqual(shown.toSorted(), EVERY.toSorted());
});
test("the values of evaluations are points in the chart of their metric", () => {
  assert.deepEqual(shape(["loss", "eval_loss", "kl", "eval_kl"]), [
    ["loss", 1, 1],
    ["kl", 1, 1],
  ]);
  const pair = ["rewards/chosen", "rewards/rejected"];
  assert.deepEqual(shape([...pair, ...pair.map((name) => `eval_${name}`)]), [["chosen_rejected", 2, 2]]);
  assert.deepEqual(shape(["eval_loss", "eval_pass@1", "eval_pass@2"]), [
    ["loss", 1, 0],
    ["pass_at_k", 2, 0],
  ]);
  assert.deepEqual(shape(["own", "eval_own", "eval_other"]), [
    ["own", 1, 1],
    ["eval_other", 1, 0],
  ]);
});
test("every metric that burnish logs has a name in both languages", () => {
  for (const language of ["en", "zh"]) {
    const t = translator(language);
    for (const group of groups(columnsOf(EVERY))) {
      assert.notEqual(titleOf(group.name, t), group.name);
      const names = [...group.columns, ...group.points].map((column) => nameOf(column, t));
      assert.ok(
        names.every((name) => !/[/_]/.test(name)),
        `${group.name}: ${names}`,
      );
    }
  }
});
test("names in a legend are short, and those elsewhere complete", () => {
  assert.equal(nameOf("rewards/chosen", english), "chosen");
  assert.equal(fullNameOf("rewards/chosen", english), "Rewards of chosen and rejected responses: chosen");
  assert.equal(nameOf("eval_rewards/margins", english), "Reward margin (evaluation)");
  assert.equal(nameOf("rewards/exact/mean", english), "exact");
  assert.equal(nameOf("eval_loss", english), "Evaluation loss");
  assert.equal(titleOf("eval_other", english), "other (evaluation)");
  assert.equal(fullNameOf("own_metric", english), "own_metric");
});
