// What every screen shares: words, requests, nodes, theme, language, and the connection that brings what is new.
// Nothing here makes HTML of text: nodes are built, and text is text.

const root = document.documentElement;
export const up = root.dataset.up || "";
export const language = root.lang;
let words = {};
export const ready = fetch(root.dataset.words).then((r) => r.json()).then((found) => { words = found; });

/** A text of the page, its {names} filled in. */
export function t(key, values = {}) {
  return Object.entries(values).reduce((text, [name, value]) => text.replaceAll(`{${name}}`, String(value)), words[key] ?? key);
}

/** A node: tag, attributes (on… are listeners), children that are nodes or text. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const $ = (selector, within = document) => within.querySelector(selector);
export const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

/** Say something once to whoever looks or listens. */
export function say(text) {
  const place = $("#said");
  place.textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { place.textContent = ""; }, 5000);
}

export class Failed extends Error {
  constructor(status, error) {
    super(error?.message ?? t("error_status", { status }));
    this.status = status;
    this.option = error?.option ?? "";
    this.code = error?.code ?? "";
  }
}

/** A request with JSON; what is refused is thrown as Failed. */
export async function api(method, path, body, signal) {
  const given = body === undefined ? {} : { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } };
  const response = await fetch(up + path, { method, credentials: "same-origin", signal, ...given });
  if (response.status === 401) location.href = `${up}sign-in?to=${location.pathname.split("/").slice(-2).filter(Boolean).join("/")}`;
  if (!response.ok) throw new Failed(response.status, (await response.json().catch(() => ({}))).error);
  return response;
}

export const get = async (path) => (await api("GET", path)).json();
export const send = async (method, path, body) => (await api(method, path, body)).json();

/** The events of a response, one by one, as {name, data}. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
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

/**
 * Follow what is new. A browser gives an origin few connections, so at most one window streams: the visible one that
 * holds a lock. All others that are visible ask every two seconds with the same cursor; hidden ones ask nothing.
 */
export function follow(query, cursor, take) {
  let stopped = null;
  const state = { cursor, lost: false };
  const told = (name, data) => { if (name !== "hello") take(name, data); };
  const heard = () => { if (state.lost) { state.lost = false; say(t("back")); } };
  const failed = () => { if (!state.lost) { state.lost = true; say(t("lost")); } };
  const path = (kind) => `${up}api/${kind}?${query()}&after=${encodeURIComponent(state.cursor)}`;

  async function poll(signal) {
    while (!signal.aborted) {
      try {
        const found = await (await fetch(path("poll"), { signal })).json();
        heard();
        for (const { event, data } of found.messages) told(event, data);
        state.cursor = found.cursor;
      } catch { if (!signal.aborted) failed(); }
      await new Promise((resolve) => { setTimeout(resolve, 2000); });
    }
  }

  async function stream(signal) {
    while (!signal.aborted) {
      const quiet = new AbortController();
      const timer = setTimeout(() => quiet.abort(), 5000);
      try {
        const response = await fetch(path("stream"), { signal: AbortSignal.any([signal, quiet.signal]) });
        for await (const event of events(response)) {
          clearTimeout(timer);
          heard();
          if (event.id) state.cursor = event.id;
          told(event.name, JSON.parse(event.data));
        }
      } catch { clearTimeout(timer); if (!signal.aborted) failed(); }
      if (quiet.signal.aborted) return poll(signal); // a proxy holds the stream back
      if (!signal.aborted) await new Promise((resolve) => { setTimeout(resolve, 1000); });
    }
  }

  function begin() {
    const stop = new AbortController();
    stopped = stop;
    if (!navigator.locks) return void poll(stop.signal);
    const polling = new AbortController();
    stop.signal.addEventListener("abort", () => polling.abort());
    const waiting = setTimeout(() => { void poll(AbortSignal.any([stop.signal, polling.signal])); }, 300);
    navigator.locks.request("burnish-stream", { signal: stop.signal }, () => {
      clearTimeout(waiting);
      polling.abort();
      return stream(stop.signal);
    }).catch(() => {});
    stop.signal.addEventListener("abort", () => clearTimeout(waiting));
  }
  const look = () => { stopped?.abort(); stopped = null; if (!document.hidden) begin(); };
  document.addEventListener("visibilitychange", look);
  look();
  return { again: look, set cursor(value) { state.cursor = value; } };
}

// --- figures ----------------------------------------------------------------------------------------------------------

export const short = (value) => {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (Math.abs(value) >= 1000) return Intl.NumberFormat(language, { notation: "compact", maximumFractionDigits: 2 }).format(value);
  return String(Number(value.toPrecision(4)));
};
export const bytes = (value) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; value >= 1000 && unit < 4; unit += 1) value /= 1000;
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
};
export const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.max(0, Math.round(seconds)), pad = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(whole / 3600);
  return hours ? `${hours}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}` : `${Math.floor(whole / 60)}:${pad(whole % 60)}`;
};
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString(language);

/** Text with what cannot be seen, or would turn the line around, made visible. */
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (letter) => `⟨U+${letter.codePointAt(0).toString(16).padStart(4, "0").toUpperCase()}⟩`);
}
/** What a terminal's colors would be is left out. */
export const plain = (text) => visible(text.replace(/\u001b\[[0-9;?]*[A-Za-z]/g, "").replace(/[^\n]*\r(?!\n)/g, ""));

/** Copy, also where the page is not served over https. */
export async function copy(text) {
  try { await navigator.clipboard.writeText(text); } catch {
    const area = el("textarea", { class: "hidden" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say(t("copied"));
}

// --- the head ---------------------------------------------------------------------------------------------------------

const keep = (name, value) => { document.cookie = `${name}=${value}; path=/; max-age=31536000; samesite=strict`; };
$("#theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  keep("theme", root.dataset.theme);
  document.dispatchEvent(new Event("theme"));
});
$("#language").addEventListener("click", () => { keep("language", language === "en" ? "zh" : "en"); location.reload(); });

/** The use of the machine, as far as it can be told; asked while somebody looks. */
async function showMachine() {
  const { cpu, memory, gpus } = await (await fetch(`${up}api/machine`)).json();
  const percent = (share) => Math.round(100 * share), pair = ([used, total]) => ({ used: bytes(used), total: bytes(total) });
  $("#machine").textContent = [
    ...(typeof cpu === "number" ? [t("machine_cpu", { share: percent(cpu) })] : []),
    ...(memory ? [t("machine_memory", pair(memory))] : []),
    ...gpus.map((gpu) => t("machine_gpu", { index: gpu.index, ...pair(gpu.memory) }) + (gpu.use === null ? "" : ` ${percent(gpu.use)}%`)),
  ].join(" · ");
}
if ($("#machine")) {
  const look = () => { if (!document.hidden) showMachine().catch(() => {}); }; // a server that is gone is said by who follows it
  void ready.then(look);
  setInterval(look, 5000);
}
