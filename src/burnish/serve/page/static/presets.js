// @ts-check
// Presets of the form, and pasted YAML.
import { $, el, notify } from "./dom.js";
import { Failed, send } from "./net.js";
import { t } from "./words.js";

const KEPT_ASIDE = ["output_dir", "overwrite_output_dir", "resume_from_checkpoint"]; // of one run, and of no other
/** Numbers and switches, which every version of YAML reads in the same way. */
const PLAIN = /^(-?(0|[1-9]\d*)(\.\d+)?(e[+-]?\d+)?|true|false)$/i;
/** Values of the form as YAML. Text is quoted as in JSON, which is valid YAML. @param {Record<string, any>} values */
const yamlOf = (values) =>
  Object.entries(values)
    .filter(([name]) => !KEPT_ASIDE.includes(name))
    .map(
      ([name, value]) => `${name}: ${typeof value !== "object" && PLAIN.test(value) ? value : JSON.stringify(value)}\n`,
    )
    .join("");

/**
 * @param {any} found of api/form @param {(values: Record<string, any>) => void} take
 * @param {() => Record<string, any>} current the values of the form
 */
export function presets(found, take, current) {
  /** Values of the preset or the YAML that was taken last. @type {Record<string, any>} */
  let taken = {};
  /** Take other values instead of those taken last, of which changed ones are kept. @param {Record<string, any>} values */
  function replace(values) {
    const now = current();
    const left = Object.keys(taken).filter((name) => !(name in values) && String(now[name]) === String(taken[name]));
    taken = values;
    take({ ...Object.fromEntries(left.map((name) => [name, ""])), ...values });
  }
  const own = new Set(Object.keys(found.own_presets)),
    allPresets = { ...found.presets, ...found.own_presets };
  /** @param {string} chosen */
  function show(chosen) {
    const listed = (/** @type {string[]} */ names, /** @type {string} */ label) =>
      names.length
        ? [
            el(
              "optgroup",
              { label },
              names.map((name) => el("option", { value: name, selected: name === chosen }, name)),
            ),
          ]
        : [];
    $("#preset").replaceChildren(
      el("option", { value: "" }, "–"),
      ...listed(Object.keys(found.presets), t("presets_builtin")),
      ...listed([...own], t("presets_own")),
    );
    $("#drop-preset").hidden = !own.has(chosen);
  }
  show("");
  $("#preset").addEventListener("change", (/** @type {any} */ { target }) => {
    $("#drop-preset").hidden = !own.has(target.value);
    replace(allPresets[target.value] ?? {});
  });
  const dialog = $("#preset-dialog");
  $("#save-preset").addEventListener("click", () => {
    $("#preset-name").value = own.has($("#preset").value) ? $("#preset").value : "";
    $("#preset-problem").textContent = "";
    dialog.showModal();
  });
  $("#preset-cancel").addEventListener("click", () => dialog.close());
  const keep = async () => {
    const name = $("#preset-name").value,
      text = yamlOf(current());
    try {
      await send("PUT", `api/presets/${encodeURIComponent(name)}`, { text });
      own.add(name);
      allPresets[name] = (await send("POST", "api/yaml", { text })).values;
      show(name);
      dialog.close();
      notify(t("preset_kept", { name }));
    } catch (failed) {
      if (failed instanceof Failed) $("#preset-problem").textContent = failed.message;
      else throw failed;
    }
  };
  $("#preset-keep").addEventListener("click", keep);
  $("form", dialog).addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    void keep();
  });
  $("#drop-preset").addEventListener("click", async () => {
    const name = $("#preset").value;
    await send("DELETE", `api/presets/${encodeURIComponent(name)}`);
    own.delete(name);
    allPresets[name] = found.presets[name]; // one that it replaced
    show("");
  });
  $("#load-yaml").addEventListener("click", () => $("#yaml-dialog").showModal());
  $("#yaml-cancel").addEventListener("click", () => $("#yaml-dialog").close());
  $("#yaml-take").addEventListener("click", async () => {
    const failed = (/** @type {Failed} */ { message }) => ({ values: {}, problems: [message] });
    const { values, problems } = await send("POST", "api/yaml", { text: $("#yaml-text").value }).catch(failed);
    $("#yaml-problems").replaceChildren(
      ...problems.map((/** @type {string} */ sentence) => el("p", { lang: "en" }, sentence)),
    );
    if (problems.length) {
      $("#yaml-text").focus();
      return;
    }
    $("#yaml-dialog").close();
    replace(values);
  });
}
