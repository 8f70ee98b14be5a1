// @ts-check
// Sign-out, trash, and the times of started commands.
import { $, $$, askToConfirm, el } from "./dom.js";
import { bytes, clock, visible } from "./format.js";
import { get, send } from "./net.js";
import { language, ready, t } from "./words.js";

await ready;
for (const node of $$("#commands [data-time]")) node.textContent = clock(Number(node.dataset.time), language);
$("#sign-out")?.addEventListener("click", async () => {
  await send("POST", "sign-out", {});
  location.href = "sign-in";
});

async function showTrash() {
  const { runs } = await get("api/trash");
  /** @param {any} run */
  const line = (run) => {
    const back = async () => {
      try {
        await send("POST", `api/trash/${run.id}`, {});
      } finally {
        await showTrash(); // after an error too: another window may have restored it
      }
    };
    return el(
      "li",
      { class: "row" },
      el("b", {}, visible(run.name)),
      el("small", { class: "grow" }, `${visible(run.folder)} · ${bytes(run.bytes)}`),
      el("button", { type: "button", onclick: back }, t("restore")),
    );
  };
  $("#trash").replaceChildren(...(runs.length ? runs.map(line) : [el("li", { class: "hint" }, t("trash_empty"))]));
  $("#empty-trash").hidden = !runs.length;
}
$("#empty-trash").addEventListener("click", async () => {
  if (!(await askToConfirm(t("empty_trash_sure"), t("empty_trash")))) return;
  await send("DELETE", "api/trash", {});
  await showTrash();
});
await showTrash();
