// @ts-check
// The columns of a data set that is a file without an entry in dataset_info.json: asked for when such a file is chosen.
import { $ } from "./dom.js";
import { get } from "./net.js";

/** The mapping below the field of the data set, for a file that has no entry. */
export class Columns {
  /** @param {(values: Record<string, any>) => void} change @param {() => Promise<void>} described */
  constructor(change, described) {
    this.change = change;
    this.described = described;
    this.file = "";
  }
  /** @param {Map<string, any>} values @param {any[]} datasets */
  async ask(values, datasets) {
    const file = String(values.get("dataset") ?? "").trim();
    if (file === this.file) return;
    this.file = file;
    $("#columns")?.remove();
    if (!/\.\w+$/.test(file) || datasets.some((one) => one.name === file && one.folder)) return;
    const found = await get(`api/datasets/columns?file=${encodeURIComponent(file)}`).catch(() => null);
    const { mapping } = await import("./mapping.js");
    if (!found || file !== this.file) return;
    const kept = async (/** @type {{name: string, folder: string}} */ one) => {
      await this.described();
      this.change({ dataset: one.name, dataset_dir: one.folder, formatting: "", columns: "" });
    };
    $("#essentials [data-option=dataset]").after(mapping(file, found, values, this.change, kept));
  }
}
