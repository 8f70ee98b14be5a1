// @ts-check
// A conversation as messages of a chat request, and the answer to it as it comes.
import { contentOf } from "./images.js";
import { Failed, api, events } from "./net.js";

/** An answer, and those that followed the results of its calls. @param {any} one @returns {any[]} */
export const chain = (one) => (one ? [one, ...chain(one.next)] : []);

/** @param {any} answer */
const said = ({ text, calls = [] }) => [
  {
    role: "assistant",
    content: text,
    ...(calls.length
      ? {
          tool_calls: calls.map((/** @type {any} */ call) => ({
            id: call.id,
            type: "function",
            function: { name: call.name, arguments: call.arguments },
          })),
        }
      : {}),
  },
  ...calls.map((/** @type {any} */ call) => ({ role: "tool", tool_call_id: call.id, content: call.result ?? "" })),
];
/** The messages of one side. @param {string} system @param {any[]} turns @param {number} side */
export const conversation = (system, turns, side) => [
  ...(system ? [{ role: "system", content: system }] : []),
  ...turns.flatMap((turn) => [
    ...(turn.before ?? []).map((/** @type {any} */ { images, ...message }) =>
      images ? { ...message, content: contentOf(message.content, images) } : message,
    ),
    { role: "user", content: contentOf(turn.user, turn.images) },
    ...chain(turn.answers[side])
      .filter((one) => one.text || one.calls?.length)
      .flatMap(said),
  ]),
];
/** The tools as they were typed: their declarations, or a list of functions alone. @param {string} text */
export function toolsOf(text) {
  const listed = text.trim() ? JSON.parse(text) : [];
  if (!Array.isArray(listed)) throw new SyntaxError();
  return listed.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
}
/**
 * Ask an engine, and fill the answer as it comes; yields the tokens of it, 0 as long as they are not known.
 * @param {string} engine @param {any} body @param {any} one @param {AbortSignal} signal
 */
export async function* answers(engine, body, one, signal) {
  let tokens = 0;
  const response = await api(
    "POST",
    `api/chat/${engine}`,
    { ...body, stream: true, stream_options: { include_usage: true }, logprobs: true },
    signal,
  );
  for await (const event of events(response)) {
    if (event.data === "[DONE]") return;
    const chunk = JSON.parse(event.data);
    if (chunk.error) throw new Failed(500, chunk.error);
    if (chunk.usage) tokens = chunk.usage.completion_tokens;
    const part = chunk.choices[0];
    if (part) {
      one.text += part.delta.content ?? "";
      one.reasoning += part.delta.reasoning_content ?? "";
      for (const call of part.delta.tool_calls ?? []) {
        if (call.function.name) one.calls.push({ id: call.id, name: call.function.name, arguments: "" });
        one.calls.at(-1).arguments += call.function.arguments ?? "";
      }
      for (const token of part.logprobs?.content ?? []) one.pieces.push([token.token, token.logprob]);
    }
    yield tokens;
  }
}
