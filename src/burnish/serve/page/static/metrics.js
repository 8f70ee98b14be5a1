// @ts-check
// The charts of a run, the metrics that they show, and the words for their names. Does not access the DOM.

/** @typedef {import("./curves.js").Columns} Columns */
/** @typedef {{smooth?: boolean, zero?: boolean, unit?: string}} Look */
/** @typedef {{name: string, columns: string[], points: string[]} & Look} Group */

/** Charts of training methods: name, metrics, look. @type {[string, RegExp, Look][]} */
const METHODS = [
  ["reward", /^reward$/, { smooth: true }],
  ["chosen_rejected", /^rewards\/(chosen|rejected)$/, { smooth: true }],
  ["margins", /^(rewards\/margins|margin)$/, { smooth: true }],
  ["accuracies", /^(rewards\/accuracies|accuracy)$/, { smooth: true }],
  ["functions", /^rewards\/.+\/mean$/, { smooth: true }],
  ["reward_range", /^(mean|min|max)_reward$/, {}],
  ["pass_at_k", /^pass@\d+$/, { zero: true }],
  ["lengths", /^completions\/(mean_|min_|max_)?length$/, { zero: true }],
  ["kl", /^(objective\/)?kl$/, { zero: true }],
  ["entropy", /^(ppo\/)?entropy$/, { zero: true }],
  ["mean_token_accuracy", /^mean_token_accuracy$/, { smooth: true, zero: true }],
  ["logps", /^logps\/(chosen|rejected)$/, { smooth: true }],
  ["logits", /^logits\/(chosen|rejected)$/, { smooth: true }],
];
/** Charts after those of the machine. @type {[string, RegExp, Look][]} */
const DETAILS = [
  ["reward_std", /^reward_std$/, { zero: true }],
  ["functions_std", /^rewards\/.+\/std$/, { zero: true }],
  ["functions_none", /^rewards\/.+\/none$/, { zero: true }],
  ["frac_reward_zero_std", /^frac_reward_zero_std$/, { zero: true }],
  ["frac_groups_dropped", /^frac_groups_dropped$/, { zero: true }],
  ["clipped_ratio", /^completions\/clipped_ratio$/, { zero: true }],
  ["terminated_lengths", /^completions\/(mean|min|max)_terminated_length$/, { zero: true }],
  ["clip_ratio", /^(clip_ratio\/(low|high|region)_\w+|ppo\/(value_)?clipfrac|cispo_clip_ratio)$/, { zero: true }],
  ["losses", /^(ppo\/(policy|value)|policy|nll|aux)_loss$/, {}],
  ["ppo_skipped", /^ppo\/skipped$/, { zero: true }],
  ["kl_coef", /^kl_coef$/, { zero: true }],
  ["entropy_coef", /^entropy_coef$/, { zero: true }],
  ["logp_difference", /^sampling\/logp_difference$/, {}],
  ["vespo_weight", /^vespo\/phi_seq_mean$/, { zero: true }],
  ["tool_calls", /^tools\/(call|failure)_frequency$/, { zero: true }],
  ["seconds", /^(time\/(generate|logps|reward|train)|step_time)$/, { zero: true }],
];
const MACHINE = new Set(["lr", "grad_norm", "rate", "memory_bytes"]);
const OWN = new Set(["step", "loss", "eval_loss", ...MACHINE, "tokens_per_s", "epoch", "time", "tokens"]);
/** Whether there are metrics that not every run has. @param {Record<string, any>} columns */
export const hasOtherMetrics = (columns) => Object.keys(columns).some((name) => !OWN.has(name));
/** Words for the parts of a chart: the last part of a metric's name -> key. @type {[RegExp, string][]} */
const PARTS = [
  [/\/(chosen|rejected)$/, "part_$1"],
  [/^(mean|min|max)_reward$/, "part_$1"],
  [/^completions\/(mean|min|max)_(terminated_)?length$/, "part_$1"],
  [/^clip_ratio\/(low_mean|low_min|high_mean|high_max|region_mean)$/, "part_$1"],
  [/^cispo_clip_ratio$/, "part_region_mean"],
  [/^(?:ppo\/)?(policy|value|nll|aux)_loss$/, "part_$1"],
  [/^ppo\/clipfrac$/, "part_policy"],
  [/^ppo\/value_clipfrac$/, "part_value"],
  [/^tools\/(call|failure)_frequency$/, "part_$1"],
  [/^time\/(generate|logps|reward|train)$/, "part_$1"],
  [/^step_time$/, "part_step"],
];
const asTrained = (/** @type {string} */ column) => column.replace(/^eval_/, "");
/** @param {string} column */
const chartOf = (column) =>
  OWN.has(column) ? column : [...METHODS, ...DETAILS].find(([, pattern]) => pattern.test(column))?.[0];

/**
 * Charts of a run, the main one first: the reward if the run has one, otherwise the loss. `points` are the values of
 * evaluations; a metric that only evaluations have is a line.
 * @param {Columns} columns @returns {Group[]}
 */
export function groups(columns) {
  const present = Object.keys(columns).filter((name) => columns[name].some((value) => value !== null));
  const has = (/** @type {string} */ name) => present.includes(name);
  const group = (/** @type {[string, RegExp, Look]} */ [name, pattern, look]) => {
    const trained = present.filter((one) => pattern.test(one)),
      evaluated = present.filter((one) => one.startsWith("eval_") && pattern.test(asTrained(one)));
    return { name, columns: trained.length ? trained : evaluated, points: trained.length ? evaluated : [], ...look };
  };
  const hasRate = has("tokens_per_s") || has("tokens");
  const methods = METHODS.map(group),
    loss = group(["loss", /^loss$/, { smooth: true }]);
  const charts = [
    ...(has("reward") ? [methods[0], loss] : [loss, methods[0]]),
    ...methods.slice(1),
    group(["lr", /^lr$/, { zero: true }]),
    group(["grad_norm", /^grad_norm$/, { smooth: true, zero: true }]),
    { name: "rate", columns: hasRate ? ["rate"] : [], points: [], zero: true },
    group(["memory_bytes", /^memory_bytes$/, { zero: true, unit: "bytes" }]),
    ...DETAILS.map(group),
  ];
  const shown = new Set([...OWN, ...charts.flatMap((one) => [...one.columns, ...one.points])]);
  const rest = present.filter((name) => !shown.has(name));
  const others = rest
    .filter((name) => !rest.includes(asTrained(name)) || name === asTrained(name))
    .map((name) => ({ name, columns: [name], points: rest.filter((one) => one === `eval_${name}`) }));
  return [...charts, ...others].filter((one) => one.columns.length);
}

/** @typedef {(key: string, values?: Record<string, any>) => string} Translate */
const ofEvaluation = (/** @type {string} */ column, /** @type {string} */ text, /** @type {Translate} */ t) =>
  column.startsWith("eval_") ? t("of_evaluation", { name: text }) : text;
/** The title of a chart. @param {string} name @param {Translate} t */
export const titleOf = (name, t) =>
  name === "rate"
    ? t("tokens_per_s")
    : OWN.has(name) || [...METHODS, ...DETAILS].some(([known]) => known === name)
      ? t(name)
      : ofEvaluation(name, asTrained(name), t);
/** The part of a chart that a metric is: "chosen", the name of a reward function. @param {string} column @param {Translate} t */
function partOf(column, t) {
  for (const [pattern, key] of PARTS) {
    const match = pattern.exec(column);
    if (match) return t(key.replace("$1", match[1]));
  }
  return /^rewards\/(.+)\/(mean|std|none)$/.exec(column)?.[1] ?? (/^pass@/.test(column) ? column : "");
}
/** The name of a metric in the legend of its chart. @param {string} column @param {Translate} t */
export function nameOf(column, t) {
  if (OWN.has(column)) return titleOf(column, t);
  const trained = asTrained(column);
  return ofEvaluation(column, partOf(trained, t) || titleOf(chartOf(trained) ?? trained, t), t);
}
/** The name of a metric outside of its chart. @param {string} column @param {Translate} t */
export function fullNameOf(column, t) {
  if (OWN.has(column)) return titleOf(column, t);
  const trained = asTrained(column),
    title = titleOf(chartOf(trained) ?? trained, t),
    part = partOf(trained, t);
  return ofEvaluation(column, part ? `${title}: ${part}` : title, t);
}
