// @ts-check
// Models for chat, evaluation and export: runs, their checkpoints, and model folders.
import { el } from "./dom.js";
import { hasWeights } from "./format.js";
import { get } from "./net.js";
import { t } from "./words.js";

/** @typedef {{label: string, group: string, body: Record<string, any>, folder: string}} Target */

/**
 * The newest runs, and the chosen one.
 * @param {string} chosen @param {(run: any) => boolean} isWanted whether to list a run, by its details
 * @returns {Promise<Map<string, Target>>}
 */
export async function findTargets(chosen = "", isWanted = () => true) {
  const [{ runs }, { models, named }] = await Promise.all([get("api/runs"), get("api/models")]);
  /** @type {Map<string, Target>} */
  const found = new Map();
  if (named) found.set("named", { label: named, group: t("models"), body: { named: true }, folder: "" });
  const usable = runs
    .filter((/** @type {any} */ run) => hasWeights(run) && run.state !== "unreadable")
    .filter((/** @type {any} */ run, /** @type {number} */ place) => place < 40 || run.id === chosen.split("/")[0]);
  const details = await Promise.all(
    usable.map((/** @type {any} */ run) => (run.checkpoint ? get(`api/runs/${run.id}`).catch(() => null) : null)),
  );
  for (const [place, run] of usable.entries()) {
    if (details[place] && !isWanted(details[place])) continue;
    found.set(run.id, { label: run.title, group: t("runs_title"), body: { run: run.id }, folder: run.folder });
    const steps = (details[place]?.checkpoints ?? []).toReversed();
    for (const step of steps.filter(
      (/** @type {number} */ one, /** @type {number} */ age) => age < 8 || `${run.id}/${one}` === chosen,
    )) {
      found.set(`${run.id}/${step}`, {
        label: `${run.title} / checkpoint-${step}`,
        group: t("runs_title"),
        body: { run: run.id, checkpoint: step },
        folder: `${run.folder}/checkpoint-${step}`,
      });
    }
  }
  const ofRuns = usable.map((/** @type {any} */ run) => `${run.folder}/`);
  const isOfRun = (/** @type {string} */ path) =>
    ofRuns.some((/** @type {string} */ one) => `${path}/`.startsWith(one));
  for (const model of models)
    if (!isOfRun(model.path))
      found.set(`path:${model.path}`, {
        label: model.kind === "model" ? model.path : `${model.path} (${t("kind_of_adapter")})`,
        group: t("models"),
        body: { path: model.path },
        folder: model.path,
      });
  return found;
}
/** Create the grouped options of a select. @param {Map<string, Target>} targets @param {string} chosen @param {string} [none] */
export function choices(targets, chosen, none) {
  const groups = [...new Set([...targets.values()].map((one) => one.group))];
  return [
    ...(none === undefined ? [] : [el("option", { value: "" }, none)]),
    ...groups.map((label) =>
      el(
        "optgroup",
        { label },
        [...targets]
          .filter(([, one]) => one.group === label)
          .map(([value, one]) => el("option", { value, selected: value === chosen }, one.label)),
      ),
    ),
  ];
}
