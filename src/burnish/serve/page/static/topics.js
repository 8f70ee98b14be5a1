// @ts-check
// Additional options: collapsed by topic, created on demand, searchable.
import { $, $$, el } from "./dom.js";
import { isFound } from "./fields.js";
import { t } from "./words.js";

export class Topics {
  /**
   * @param {any} found of api/form @param {Record<string, string[]>} boxes @param {Record<string, any>} declared
   * @param {(name: string) => any} make a field @param {(names: string[]) => void} made @param {() => void} shown
   */
  constructor(found, boxes, declared, make, made, shown) {
    const boxed = new Set(Object.values(boxes).flat());
    /** @type {[string, string[]][]} */
    const own = Object.entries(boxes)
      .filter(([box]) => box !== "essentials")
      .map(([box, names]) => [t(`box_${box}`), names]);
    /** @type {[string, string[]][]} */
    const groups = found.groups.map((/** @type {string} */ group) => [
      found.titles[group] ?? group,
      found.fields
        .filter((/** @type {any} */ field) => field.group === group && !boxed.has(field.name))
        .map((/** @type {any} */ field) => field.name),
    ]);
    this.nodes = [...own, ...groups]
      .filter(([, names]) => names.length)
      .map(([title, names]) => {
        const body = el("div", { class: "grid" }),
          count = el("small", {}, "");
        const node = el("details", { class: "topic" }, el("summary", {}, el("b", {}, title), " ", count), body);
        const fill = () => {
          if (body.children.length) return;
          body.append(...names.map(make)); // three hundred fields are made when they are wanted
          made(names);
        };
        node.addEventListener("toggle", () => {
          if (node.open) fill();
        });
        return Object.assign(node, { names, count, fill });
      });
    $("#topics").append(...this.nodes);
    $("#search-options").placeholder = t("search_all_options", { count: found.fields.length });
    $("#search-options").addEventListener("input", (/** @type {any} */ { target }) => {
      this.search(target.value.trim(), declared);
      if (!target.value.trim()) shown();
    });
  }
  /** @param {string} text @param {Record<string, any>} declared */
  search(text, declared) {
    for (const node of this.nodes) {
      const hits = node.names.filter((/** @type {string} */ name) => isFound(declared[name], text));
      node.hidden = Boolean(text) && !hits.length;
      if (text && hits.length) node.fill();
      node.open = Boolean(text) && hits.length > 0;
      for (const field of $$("[data-option]", node))
        field.hidden = Boolean(text) && !hits.includes(field.dataset.option);
    }
    $("#no-option").hidden = !text || this.nodes.some((node) => !node.hidden);
  }
  /** Show how many options of a topic are set. @param {Map<string, any>} values */
  count(values) {
    for (const node of this.nodes) {
      const count = node.names.filter((/** @type {string} */ name) => values.has(name)).length;
      node.count.textContent = count ? t("set_options", { count }) : "";
    }
  }
}
