// @ts-check
// Column mapping for a selected data file that has no entry in dataset_info.json.
import { $ } from "./dom.js";
import { get } from "./net.js";

/** Shows the column mapping below the dataset field. */
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
    if (!found?.columns.length || file !== this.file) return;
    const onSaved = async (/** @type {{name: string, folder: string}} */ one) => {
      await this.described();
      this.change({ dataset: one.name, dataset_dir: one.folder, formatting: "", columns: "" });
    };
    $("#essentials [data-option=dataset]").after(mapping(file, found, values, this.change, onSaved));
  }
}
