// @ts-check
// Converts a conversation to the messages of a chat request, and streams the response.
import { contentOf } from "./images.js";
import { Failed, api, events } from "./net.js";

/** Return a response and those that follow its tool results. @param {any} one @returns {any[]} */
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
/** Return the messages of one side of the conversation. @param {string} system @param {any[]} turns @param {number} side */
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
/** Parse the entered tools: tool declarations, or a list of functions. Throws SyntaxError. @param {string} text @returns {any[]} */
export function toolsOf(text) {
  const listed = text.trim() ? JSON.parse(text) : [];
  if (!Array.isArray(listed) || listed.some((tool) => typeof (tool ?? "") !== "object")) throw new SyntaxError();
  return listed.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
}
/**
 * Request a response and append to it while it is streamed. Yields its number of tokens; 0 while unknown.
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
        const known = one.calls[call.index] ?? one.calls.at(-1);
        if (known) known.arguments += call.function.arguments ?? "";
      }
      for (const token of part.logprobs?.content ?? []) one.pieces.push([token.token, token.logprob]);
    }
    yield tokens;
  }
}
