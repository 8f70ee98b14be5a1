// @ts-check
// Saved conversations: list, open, delete with undo.
import { $, el, notify } from "./dom.js";
import { ago } from "./format.js";
import { get, send } from "./net.js";
import { small } from "./turns.js";
import { language, t } from "./words.js";

const dialog = () => $("#history-dialog");
let saved = Promise.resolve();
/** Save a conversation, after those that are being saved. @param {string} id @param {any} chat */
export function save(id, chat) {
  saved = saved.then(() => send("PUT", `api/chats/${id}`, chat)).catch((failed) => notify(failed.message));
}

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
  const whole = await get(`api/chats/${one.id}`);
  await send("DELETE", `api/chats/${one.id}`);
  node.hidden = true;
  const undo = async () => {
    await send("PUT", `api/chats/${one.id}`, whole);
    node.hidden = false;
    line.remove();
    $("button", node).focus();
  };
  const restore = el("button", { type: "button", onclick: undo }, t("undo"));
  const line = el(
    "li",
    { class: "row history-entry" },
    el("span", { class: "grow muted" }, t("chat_deleted")),
    restore,
  );
  node.after(line);
  restore.focus();
}
/** Show the list of conversations when the button is clicked. @param {() => string} current @param {(id: string) => void} open */
export function history(current, open) {
  $("#history").addEventListener("click", async () => {
    const { chats } = await get("api/chats");
    $("#history-list").replaceChildren(...chats.map((/** @type {any} */ one) => item(one, current(), open)));
    $("#history-empty").hidden = chats.length > 0;
    if (!dialog().open) dialog().showModal();
  });
  $("#history-close").addEventListener("click", () => dialog().close());
}
