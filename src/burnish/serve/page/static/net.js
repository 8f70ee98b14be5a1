// @ts-check
// HTTP requests, and the event stream with updates.
import { notify } from "./dom.js";
import { optionalText, t } from "./words.js";

export const up = document.documentElement.dataset.up || "";

export class Failed extends Error {
  /** @param {number} status @param {any} error */
  constructor(status, error) {
    super(optionalText(`error_${error?.code}`) ?? error?.message ?? t("error_status", { status }));
    this.status = status;
    this.option = error?.option ?? "";
    this.code = error?.code ?? "";
  }
}
/**
 * Send a request with a JSON or binary body. Throws Failed for an error response.
 * @param {string} method @param {string} path @param {any} [body] @param {AbortSignal} [signal]
 */
export async function api(method, path, body, signal) {
  const isBytes = body instanceof Blob;
  const request =
    body === undefined
      ? {}
      : {
          body: isBytes ? body : JSON.stringify(body),
          headers: { "Content-Type": isBytes ? "application/octet-stream" : "application/json" },
        };
  /** @type {Response} */
  let response;
  try {
    response = await fetch(up + path, { method, credentials: "same-origin", signal, ...request });
  } catch (failed) {
    if (signal?.aborted) throw failed;
    throw new Failed(0, { message: t("connection_lost") });
  }
  if (response.status === 401)
    location.href = `${up}sign-in?to=${location.pathname.split("/").slice(-2).filter(Boolean).join("/")}`;
  if (!response.ok) throw new Failed(response.status, (await response.json().catch(() => ({}))).error);
  return response;
}
/** @param {string} path */
export const get = async (path) => (await api("GET", path)).json();
/** @param {string} method @param {string} path @param {any} [body] */
export const send = async (method, path, body) => (await api(method, path, body)).json();

/** Yield the server-sent events of a response as {name, data}. @param {Response} response */
export async function* events(response) {
  const reader = /** @type {ReadableStream} */ (response.body).pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop() ?? "";
    for (const part of parts) {
      const event = { name: "message", data: "", id: "" };
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        else if (line.startsWith("data: ")) event.data = line.slice(6);
        else if (line.startsWith("id: ")) event.id = line.slice(4);
      }
      if (event.data) yield event;
    }
  }
}
/** @param {number} ms */
export const pause = (ms) =>
  new Promise((resolve) => {
    setTimeout(resolve, ms);
  });

/**
 * Receive updates. Browsers limit connections per origin, so only one window opens a stream: the visible window that
 * holds a lock. Other visible windows poll every two seconds with the same cursor; hidden windows do not poll.
 * @param {() => string} query @param {string} cursor @param {(name: string, data: any) => void} take
 */
export function follow(query, cursor, take) {
  /** @type {AbortController | null} */
  let stopped = null;
  const state = { cursor, lost: false };
  const deliver = (/** @type {string} */ name, /** @type {any} */ data) => {
    if (name !== "hello") take(name, data);
  };
  const connected = () => {
    if (state.lost) {
      state.lost = false;
      notify(t("connection_restored"));
    }
  };
  const failed = () => {
    if (!state.lost) {
      state.lost = true;
      notify(t("connection_lost"));
    }
  };
  const path = (/** @type {string} */ kind) => `${up}api/${kind}?${query()}&after=${encodeURIComponent(state.cursor)}`;

  /** @param {AbortSignal} signal */
  async function poll(signal) {
    while (!signal.aborted) {
      try {
        const found = await (await fetch(path("poll"), { signal })).json();
        connected();
        for (const { event, data } of found.messages) deliver(event, data);
        state.cursor = found.cursor;
      } catch {
        if (!signal.aborted) failed();
      }
      await pause(2000);
    }
  }
  /** @param {AbortSignal} signal */
  async function stream(signal) {
    while (!signal.aborted) {
      const quiet = new AbortController();
      const timer = setTimeout(() => quiet.abort(), 5000);
      try {
        const response = await fetch(path("stream"), { signal: AbortSignal.any([signal, quiet.signal]) });
        for await (const event of events(response)) {
          clearTimeout(timer);
          connected();
          if (event.id) state.cursor = event.id;
          deliver(event.name, JSON.parse(event.data));
        }
      } catch {
        clearTimeout(timer);
        if (!signal.aborted && !quiet.signal.aborted) failed();
      }
      if (quiet.signal.aborted) return poll(signal); // a proxy holds the stream back
      if (!signal.aborted) await pause(1000);
    }
  }
  function begin() {
    const stop = new AbortController();
    stopped = stop;
    if (!navigator.locks) return void poll(stop.signal);
    const polling = new AbortController();
    stop.signal.addEventListener("abort", () => polling.abort());
    const waiting = setTimeout(() => {
      void poll(AbortSignal.any([stop.signal, polling.signal]));
    }, 300);
    navigator.locks
      .request("burnish-stream", { signal: stop.signal }, () => {
        clearTimeout(waiting);
        polling.abort();
        return stream(stop.signal);
      })
      .catch(() => {});
    stop.signal.addEventListener("abort", () => clearTimeout(waiting));
  }
  const look = () => {
    stopped?.abort();
    stopped = null;
    if (!document.hidden) begin();
  };
  document.addEventListener("visibilitychange", look);
  look();
  return { again: look };
}
