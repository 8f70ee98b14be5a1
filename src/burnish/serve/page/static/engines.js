// @ts-check
// Loaded models: load with progress, and unload.
import { $, el } from "./dom.js";
import { visible } from "./format.js";
import { Failed, get, pause, send } from "./net.js";
import { t } from "./words.js";

export class Engines {
  /** @param {Map<string, import("./targets.js").Target>} targets @param {() => void} changed */
  constructor(targets, changed) {
    this.targets = targets;
    this.changed = changed;
    /** @type {(string | null)[]} */
    this.chosen = [null, null];
    /** @type {any[]} */
    this.running = [null, null];
    /** How often a model was selected. */
    this.loads = [0, 0];
  }
  /** @param {number} side */
  isReady(side) {
    return this.running[side]?.state === "ready";
  }
  /** Load a model and wait until it is ready. Selecting another one ends the wait. @param {number} side @param {string} value */
  async load(side, value) {
    const own = (this.loads[side] += 1);
    this.chosen[side] = value || null;
    this.running[side] = null;
    this.showState(side, null);
    this.changed();
    if (!value) return;
    try {
      const began = performance.now();
      const engine = await send("POST", "api/engines", this.targets.get(value)?.body);
      if (own !== this.loads[side]) return;
      this.running[side] = engine;
      await this.until(side, engine, began);
    } catch (failed) {
      if (own !== this.loads[side]) return;
      this.showState(side, el("p", { class: "problem" }, failed instanceof Failed ? failed.message : String(failed)));
    }
    this.changed();
  }
  /** @param {number} side @param {any} engine @param {number} began */
  async until(side, engine, began) {
    const name = this.targets.get(this.chosen[side] ?? "")?.label ?? engine.name;
    while (this.running[side] === engine) {
      const found = await get("api/engines").catch(() => null);
      if (this.running[side] !== engine) return;
      if (!found) {
        await pause(2000); // a lost connection does not end the loading
        continue;
      }
      const state = found.engines.find((/** @type {any} */ one) => one.id === engine.id);
      if (!state || state.state === "ended") {
        this.showState(
          side,
          el(
            "div",
            { class: "notice bad" },
            el("p", {}, t("engine_ended", { name })),
            el("pre", {}, visible(state?.said ?? "")),
          ),
        );
        this.running[side] = null;
        return;
      }
      if (state.state === "ready") {
        engine.state = "ready";
        this.showState(side, el("span", { class: "loaded" }, `${name} ✓`));
        return;
      }
      const share = /^(\d+)%$/.exec(state.said),
        seconds = Math.floor((performance.now() - began) / 1000);
      this.showState(
        side,
        el(
          "div",
          { class: "loading" },
          el("span", {}, t("loading_engine", { name, seconds })),
          el("progress", { max: 100, value: share ? share[1] : null, "aria-label": t("progress") }),
          share ? el("small", {}, state.said) : null,
        ),
      );
      await pause(400);
    }
  }
  /** @param {number} side @param {any} node */
  showState(side, node) {
    $(`#engine-states [data-side="${side}"]`).replaceChildren(...(node ? [node] : []));
  }
  /** Unload all models, also those that were selected before. */
  async unload() {
    for (const { id } of (await get("api/engines")).engines) await send("DELETE", `api/engines/${id}`);
  }
}
