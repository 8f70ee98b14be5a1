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
/** A request without a response, or with an incomplete one. */
const unreachable = () => new Failed(0, { code: "unreachable" });
/** Show why a request failed, unless the action that sent it does. @param {ErrorEvent | PromiseRejectionEvent} event */
function showFailure(event) {
  const failed = "reason" in event ? event.reason : event.error;
  if (!(failed instanceof Failed)) return;
  event.preventDefault();
  notify(failed.message);
}
addEventListener("unhandledrejection", showFailure);
addEventListener("error", showFailure);

/** Open the sign-in page, which leads back to this one. */
function signIn() {
  const depth = up.split("../").length; // parts of this page's path below the root of the web UI
  const to = location.pathname.split("/").slice(-depth).join("/") + location.search;
  location.href = `${up}sign-in?to=${encodeURIComponent(to)}`;
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
    throw unreachable();
  }
  if (response.status === 401) signIn();
  if (!response.ok) throw new Failed(response.status, (await response.json().catch(() => ({}))).error);
  return response;
}
/** @param {Response} response */
const json = (response) =>
  response.json().catch(() => {
    throw unreachable();
  });
/** @param {string} path */
export const get = async (path) => json(await api("GET", path));
/** @param {string} method @param {string} path @param {any} [body] */
export const send = async (method, path, body) => json(await api(method, path, body));

/** Parse a server-sent event. @param {string} text */
function parsed(text) {
  const event = { name: "message", data: "", id: "" };
  for (const line of text.split("\n")) {
    if (line.startsWith("event: ")) event.name = line.slice(7);
    else if (line.startsWith("data: ")) event.data = line.slice(6);
    else if (line.startsWith("id: ")) event.id = line.slice(4);
  }
  return event;
}
/**
 * Yield the server-sent events of a response as {name, data, id}. Throws Failed if the connection is lost.
 * @param {Response} response @param {() => void} [arrived] called for all data, also for comments
 */
export async function* events(response, arrived) {
  const reader = /** @type {ReadableStream} */ (response.body).pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      arrived?.();
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop() ?? "";
      for (const event of parts.map(parsed)) if (event.data) yield event;
    }
  } catch (failed) {
    throw failed instanceof Error && failed.name === "AbortError" ? failed : unreachable();
  } finally {
    reader.cancel().catch(() => {});
  }
}
/** @param {number} ms */
export const pause = (ms) =>
  new Promise((resolve) => {
    setTimeout(resolve, ms);
  });

/** A stream without data for this time is broken: the server sends a comment every 15 seconds. */
const QUIET_MS = 40_000;
/** Add the cursor of runs to another one, which keeps its place in what is not a row. @param {string} known @param {string} loaded */
function cursorAfter(known, loaded) {
  const entries = (/** @type {string} */ text) =>
    text
      .split(",")
      .filter(Boolean)
      .map((entry) => entry.split(":"));
  const all = new Map(entries(known).map((entry) => [entry[0], entry]));
  for (const [run, rows, ...rest] of entries(loaded)) all.set(run, [run, rows, ...(all.get(run)?.slice(2) ?? rest)]);
  return [...all.values()].map((entry) => entry.join(":")).join(",");
}
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
    try {
      if (name !== "hello") take(name, data);
    } catch (wrong) {
      reportError(wrong); // the next messages are delivered
    }
  };
  const connected = () => {
    if (state.lost) {
      state.lost = false;
      notify(t("connection_restored"));
    }
  };
  const failed = (/** @type {any} */ error) => {
    if (error.status === 401)
      stopped?.abort(); // api() opens the sign-in page
    else if (!state.lost) {
      state.lost = true;
      notify(error.status ? error.message : t("connection_lost"));
    }
  };
  /** @param {string} kind @param {AbortSignal} signal */
  const ask = (kind, signal) =>
    api("GET", `api/${kind}?${query()}&after=${encodeURIComponent(state.cursor)}`, undefined, signal);

  /** @param {AbortSignal} signal */
  async function poll(signal) {
    while (!signal.aborted) {
      try {
        const found = await json(await ask("poll", signal));
        if (signal.aborted) return;
        connected();
        state.cursor = found.cursor;
        for (const { event, data } of found.messages) deliver(event, data);
      } catch (error) {
        if (!signal.aborted) failed(error);
      }
      await pause(2000);
    }
  }
  /** @param {AbortSignal} signal */
  async function stream(signal) {
    while (!signal.aborted) {
      const quiet = new AbortController();
      const giveUp = () => quiet.abort();
      let timer = setTimeout(giveUp, 5000),
        isHeldBack = true;
      const arrived = () => {
        clearTimeout(timer);
        timer = setTimeout(giveUp, QUIET_MS);
        isHeldBack = false;
      };
      try {
        const response = await ask("stream", AbortSignal.any([signal, quiet.signal]));
        for await (const event of events(response, arrived)) {
          if (signal.aborted) return;
          connected();
          if (event.id) state.cursor = event.id;
          deliver(event.name, JSON.parse(event.data));
        }
      } catch (error) {
        if (!signal.aborted && !quiet.signal.aborted) failed(error);
      } finally {
        clearTimeout(timer);
      }
      if (quiet.signal.aborted && isHeldBack) return poll(signal); // a proxy buffers the stream
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
  /** Begin again, with the current query. @param {string} [loaded] cursor of the runs whose rows were loaded anew */
  const again = (loaded = "") => {
    state.cursor = cursorAfter(state.cursor, loaded);
    look();
  };
  return { again };
}
