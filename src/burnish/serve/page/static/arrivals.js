// @ts-check
// Runs that appeared while their list is open: their rows, cards and places in the queue, from the list as it is now.
import { $, $$ } from "./dom.js";
import { pause } from "./net.js";

/** The page of the list. Its nodes come from the server; no text is parsed here. @returns {Promise<Document | null>} */
const currentPage = () =>
  new Promise((resolve) => {
    const request = new XMLHttpRequest();
    request.responseType = "document";
    request.addEventListener("loadend", () => resolve(request.status === 200 ? request.response : null));
    request.open("GET", location.pathname);
    request.send();
  });
/** Insert the nodes that a list lacks at their places, and return them. @param {any} list @param {any} now @param {string} name */
function insertMissing(list, now, name) {
  const added = [];
  let before = null;
  for (const node of $$(`[${name}]`, now)) {
    const known = $(`[${name}="${node.getAttribute(name)}"]`, list);
    if (!known) {
      if (before) before.after(node);
      else list.prepend(node);
      added.push(node);
    }
    before = known ?? node;
  }
  return added;
}
/** Show what is new, and return the new rows. The page is loaded anew if it has no such list yet. @returns {Promise<any[]>} */
async function showArrived() {
  const page = await currentPage();
  if (!page) return []; // the next update tries again
  const lists = ["#runs tbody", "ul.jobs"].filter((list) => $(list, page));
  if (lists.some((list) => !$(list))) {
    if (!$("dialog[open]")) location.reload();
    return [];
  }
  const cards = $("#running-now"),
    queue = $$(".queue", page);
  insertMissing(cards, $("#running-now", page), "data-live");
  cards.hidden = !cards.children.length;
  if (
    queue.map((one) => one.textContent).join() !==
    $$(".queue")
      .map((one) => one.textContent)
      .join()
  ) {
    for (const one of $$(".queue")) one.remove();
    cards.before(...queue);
  }
  return lists.flatMap((list) => insertMissing($(list), $(list, page), "data-run"));
}
let isArriving = false,
  remaining = 0;
/** Show what is new: now, and again later, since the server keeps its list for 1.5 s.
 * @param {(added: any[]) => void} complete */
export async function arrive(complete) {
  remaining = 2;
  if (isArriving) return;
  isArriving = true;
  try {
    while (remaining > 0) {
      remaining -= 1;
      const added = await showArrived();
      if (added.length) complete(added);
      await pause(1600);
    }
  } finally {
    isArriving = false;
  }
}
