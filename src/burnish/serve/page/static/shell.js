// @ts-check
// Elements of every page: theme, language, machine usage.
import { $, el } from "./dom.js";
import { bytes } from "./format.js";
import { up } from "./net.js";
import { language, ready, t } from "./words.js";

const root = document.documentElement;
/** @param {string} name @param {string} value */
const keep = (name, value) => {
  document.cookie = `${name}=${value}; path=/; max-age=31536000; samesite=strict`;
};
$("#theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  keep("theme", root.dataset.theme);
  document.dispatchEvent(new Event("theme"));
});
$("#language").addEventListener("click", () => {
  keep("language", language === "en" ? "zh" : "en");
  location.reload();
});

async function showMachine() {
  const { cpu, memory, gpus } = await (await fetch(`${up}api/machine`)).json();
  /** @param {string} text @param {number} share */
  const line = (text, share) => el("div", {}, text, el("progress", { max: 1, value: share, "aria-label": text }));
  const pair = (/** @type {number[]} */ [used, total]) => ({ used: bytes(used), total: bytes(total) });
  $("#machine").replaceChildren(
    ...(typeof cpu === "number" ? [line(t("machine_cpu", { share: Math.round(100 * cpu) }), cpu)] : []),
    ...(memory ? [line(t("machine_memory", pair(memory)), memory[0] / memory[1])] : []),
    ...gpus.map((/** @type {any} */ gpu) =>
      line(
        t("machine_gpu", { index: gpu.index, ...pair(gpu.memory) }) +
          (gpu.use === null ? "" : ` ${Math.round(100 * gpu.use)}%`),
        gpu.memory[0] / gpu.memory[1],
      ),
    ),
  );
}
if ($("#machine")) {
  const look = () => {
    if (!document.hidden) showMachine().catch(() => {});
  }; // a server that is gone is said by who follows it
  void ready.then(look);
  setInterval(look, 5000);
}
