// @ts-check
// Saved conversations: list, open, delete with undo.
import { $, el, notify } from "./dom.js";
import { ago } from "./format.js";
import { Failed, get, send } from "./net.js";
import { small } from "./turns.js";
import { language, t } from "./words.js";

const dialog = () => $("#history-dialog");

/** @param {any} one @param {string} current @param {(id: string) => void} open */
function item(one, current, open) {
  const node = el(
    "li",
    { class: "row history-entry" },
    el(
      "button",
      {
        type: "button",
        class: "quiet grow",
        "aria-current": one.id === current ? "true" : null,
        onclick: () => {
          dialog().close();
          open(one.id);
        },
      },
      el("span", {}, one.title || "…"),
      el("small", {}, ago(one.time, language)),
    ),
    small("delete", t("delete_chat", { name: one.title }), () => remove(one, node)),
  );
  return node;
}
/** @param {any} one @param {any} node */
async function remove(one, node) {
  try {
    const whole = await get(`api/chats/${one.id}`);
    await send("DELETE", `api/chats/${one.id}`);
    node.hidden = true;
    const undo = async () => {
      await send("PUT", `api/chats/${one.id}`, whole);
      node.hidden = false;
    };
    const restore = el("button", { type: "button", onclick: () => undo().then(() => line.remove()) }, t("undo"));
    const line = el(
      "li",
      { class: "row history-entry" },
      el("span", { class: "grow muted" }, t("chat_deleted")),
      restore,
    );
    node.after(line);
    restore.focus();
  } catch (failed) {
    if (!(failed instanceof Failed)) throw failed;
    notify(failed.message);
  }
}
/** Show the list of conversations when the button is clicked. @param {() => string} current @param {(id: string) => void} open */
export function history(current, open) {
  $("#history").addEventListener("click", async () => {
    const { chats } = await get("api/chats");
    $("#history-list").replaceChildren(...chats.map((/** @type {any} */ one) => item(one, current(), open)));
    $("#history-empty").hidden = chats.length > 0;
    dialog().showModal();
  });
  $("#history-close").addEventListener("click", () => dialog().close());
}
