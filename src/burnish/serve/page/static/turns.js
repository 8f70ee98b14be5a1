// @ts-check
// Renders a conversation: messages, reasoning, tool calls and their results, tokens.
import { $, copy, el, icon } from "./dom.js";
import { visible } from "./format.js";
import { thumbs } from "./images.js";
import { nodes, update } from "./md.js";
import { chain } from "./messages.js";
import { t } from "./words.js";

/** @param {any} one */
export const waits = (one) =>
  chain(one).some((part) => part.figures && part.calls?.some((/** @type {any} */ call) => call.result === undefined));

/** Create an icon button. @param {string} name @param {string} label @param {() => void} onclick */
export const small = (name, label, onclick) =>
  el("button", { type: "button", class: "quiet square", "aria-label": label, title: label, onclick }, icon(name));

/** @param {string} role @param {number | string} side @param {string} name */
export function turnNode(role, side, name) {
  const text = el("div", { class: "text" }),
    reasoning = el(
      "details",
      { class: "reasoning", hidden: true },
      el("summary", {}, t("reasoning")),
      el("div", { class: "reasoning-text" }),
    );
  const tokens = el("details", { class: "tokens", hidden: true }, el("summary", {}, t("response_tokens"))),
    figures = el("div", { class: "figures" }, el("span"), tokens),
    tools = el("div", { class: "turn-tools" });
  const node = el(
    "article",
    { class: `turn ${role}` },
    el("h2", {}, name),
    reasoning,
    el("div", { class: "bubble" }, text),
    el("div", { class: "row caption" }, figures, tools),
  );
  $(`.side[data-side="${side}"]`).append(node);
  return { node, text, reasoning, figures, tokens, tools, extras: /** @type {any[]} */ ([]) };
}
/** Render a tool call with its result, or with a field to enter one. @param {any} call @param {any} one @param {(() => void) | undefined} onResult */
function callNode(call, one, onResult) {
  const shown = el("pre", { class: "call" }, visible(`${call.name}(${call.arguments})`));
  if (call.result !== undefined) return [shown, el("pre", { class: "result" }, visible(call.result))];
  if (!one.figures || !onResult) return [shown]; // it is still being written
  const field = el("textarea", {
    rows: 2,
    "aria-label": t("result_of", { name: call.name }),
    placeholder: t("result_of", { name: call.name }),
  });
  const give = (/** @type {Event} */ event) => {
    event.preventDefault();
    call.result = field.value;
    onResult();
  };
  return [shown, el("form", { class: "row result-form", onsubmit: give }, field, el("button", {}, t("submit_result")))];
}
/**
 * Show an answer, also while it is being written: what did not change keeps its nodes.
 * @param {any} node of turnNode @param {any} one the answer @param {() => void} [onResult] after a result was entered
 */
export function fill(node, one, onResult) {
  for (const extra of node.extras) extra.remove();
  update(node.text, one.text, Boolean(one.figures));
  node.extras = (one.calls ?? []).flatMap((/** @type {any} */ call) => callNode(call, one, onResult));
  if (!one.figures && !one.text && !one.reasoning)
    node.extras.unshift(el("span", { class: "typing", role: "img", "aria-label": t("writing") }));
  node.text.append(...node.extras);
  node.reasoning.hidden = !one.reasoning;
  $(".reasoning-text", node.reasoning).textContent = visible(one.reasoning ?? "");
  const added = (one.pieces ?? []).slice(node.tokens.children.length - 1); // after the summary
  node.tokens.append(
    ...added.map((/** @type {any[]} */ [piece, logprob]) =>
      el("span", { class: "piece", title: `${(100 * Math.exp(logprob)).toFixed(1)} %` }, visible(piece)),
    ),
  );
  node.tokens.hidden = !one.pieces?.length;
  $("span", node.figures).textContent = one.figures ?? "";
}
const scroll = $("#chat-scroll");
export const toEnd = () => scroll.scrollTo(0, scroll.scrollHeight);
/** Draw, and stay at the end of the conversation. @param {() => void} draw */
export function following(draw) {
  const isNearEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
  draw();
  if (isNearEnd) toEnd();
}
/** Draw what is being written at most once per frame, however many tokens arrive. @param {() => void} draw */
export function oncePerFrame(draw) {
  let frame = 0;
  const drawn = () => {
    frame = 0;
    following(draw);
  };
  return {
    request: () => {
      frame ||= requestAnimationFrame(drawn);
    },
    cancel: () => cancelAnimationFrame(frame),
  };
}
/** Render the prompt of a turn, and the earlier messages of its record. @param {any} turn @param {number} side @param {((text: string) => void) | undefined} edited */
export function promptNode(turn, side, edited) {
  for (const { role, content, images, tool_calls: calls } of turn.before ?? [])
    turnNode(role, side, role).text.replaceChildren(
      ...thumbs(images ?? []),
      ...nodes(
        content ||
          (calls ?? [])
            .map((/** @type {any} */ call) => `${call.function.name}(${call.function.arguments})`)
            .join("\n"),
      ),
    );
  const node = turnNode("user", side, t("you"));
  node.text.replaceChildren(...thumbs(turn.images ?? []), ...nodes(turn.user));
  node.tools.append(small("copy", t("copy"), () => copy(turn.user)));
  if (edited) node.tools.append(small("edit", t("edit"), () => edit(node, turn.user, edited)));
}
/** Render the reference response of a validation example. @param {any} turn */
export function referenceNode({ reference, place }) {
  const node = turnNode("assistant", "reference", t("reference_response"));
  node.text.replaceChildren(...nodes(reference));
  node.figures.textContent = visible(place);
}
/** @param {any} node @param {string} text @param {(text: string) => void} edited */
function edit(node, text, edited) {
  const field = el("textarea", { rows: 3, "aria-label": t("edit") });
  field.value = text;
  const before = [...node.text.childNodes]; // with its images
  const restore = () => {
    node.text.replaceChildren(...before);
    node.tools.hidden = false;
    $("button:last-child", node.tools).focus();
  };
  const cancel = el("button", { type: "button", onclick: restore }, t("cancel"));
  field.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Escape") restore();
  });
  node.tools.hidden = true;
  node.text.replaceChildren(
    el(
      "form",
      {
        class: "edit",
        onsubmit: (/** @type {Event} */ event) => {
          event.preventDefault();
          if (field.value.trim()) edited(field.value);
        },
      },
      field,
      el("div", { class: "row" }, cancel, el("button", { class: "main" }, t("send"))),
    ),
  );
  field.focus();
}
