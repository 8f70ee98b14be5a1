// Curves: uPlot (bundled) with one cursor through all, smoothing, and marks for what is no number.
import { $, bytes, el, short, t } from "./base.js";

/* global uPlot */
const COLORS = ["#2f7fd6", "#d6662f", "#2fa56a", "#a94fc4", "#c43d5f", "#8a7a1f", "#1f8f9a", "#777f8a"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [4, 4], [12, 4], [6, 2, 2, 2], [3, 6]];
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const resolved = (name) => {
  const probe = el("span"); // light-dark() is resolved by a color, not by a variable
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color || style(name);
};

/** An exponential mean that begins at the first value: Kingma & Ba 2015, section 3, for its correction of the start. */
export function smoothed(values, weight) {
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (typeof value !== "number") return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}
const numbers = (values) => values.map((value) => (typeof value === "number" ? value : null));
const odd = (values) => values.filter((value) => typeof value === "string").length;

/** What stands on the x axis: steps, tokens, or seconds since the first row. */
export function across(columns, kind) {
  if (kind === "tokens" && columns.tokens) return numbers(columns.tokens);
  if (kind === "time" && columns.time) return columns.time.map((time) => time - columns.time[0]);
  return columns.step;
}

export class Chart {
  /** curves: [{label, x, y, smoothing, points, faint}]; all are laid over one sorted x. */
  constructor(host, title, sync) {
    this.text = el("p");
    this.place = el("div");
    const save = el("button", { type: "button", class: "quiet", "aria-label": `${title}: PNG`, onclick: () => this.save(title) }, "PNG");
    this.node = el("section", { class: "chart", "aria-label": title }, el("div", { class: "row" }, el("h2", {}, title), el("span", { class: "grow" }), save), this.place, this.text);
    host.append(this.node);
    this.sync = sync;
    this.isBytes = false;
  }

  draw(curves, { log = false } = {}) {
    const lines = [];
    for (const [index, curve] of curves.entries()) {
      const color = COLORS[(curve.color ?? index) % COLORS.length], dash = DASHES[(curve.color ?? 0) % DASHES.length];
      if (curve.points) lines.push({ ...curve, y: numbers(curve.y), stroke: color, width: 0, points: { show: true, size: 8, fill: color } });
      else if (curve.smoothing > 0) {
        lines.push({ ...curve, label: "", y: numbers(curve.y), stroke: `${color}55`, width: 1, points: { show: false } });
        lines.push({ ...curve, y: smoothed(curve.y, curve.smoothing), stroke: color, width: 2, dash, points: { show: false } });
      } else lines.push({ ...curve, y: numbers(curve.y), stroke: color, width: 2, dash, points: { show: curve.y.length < 3, size: 6 } });
    }
    const xs = [...new Set(lines.flatMap((line) => line.x))].filter((x) => x !== null).sort((a, b) => a - b);
    const at = new Map(xs.map((x, place) => [x, place]));
    const data = [xs, ...lines.map((line) => {
      const found = new Array(xs.length).fill(null);
      line.x.forEach((x, place) => { if (line.y[place] !== null && at.has(x)) found[at.get(x)] = line.y[place]; });
      return found;
    })];
    if (log) for (const column of data.slice(1)) column.forEach((value, place) => { if (value !== null && value <= 0) column[place] = null; });
    const missing = curves.reduce((sum, curve) => sum + odd(curve.y), 0);
    this.summary = missing ? `NaN/∞ × ${missing}` : "";
    this.plot?.destroy();
    const ink = resolved("--dim"), grid = { stroke: resolved("--line"), width: 1 };
    const shown = this.isBytes ? (value) => bytes(value) : short;
    this.plot = new uPlot({
      width: Math.max(240, this.node.clientWidth - 18), height: 220,
      cursor: { sync: { key: this.sync }, drag: { x: true, y: false } },
      legend: { show: false },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: [{ stroke: ink, grid, size: 32 }, { stroke: ink, grid, size: 64, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : shown(tick))) }],
      series: [{}, ...lines.map((line) => ({ label: line.label, stroke: line.stroke, width: line.width, dash: line.dash, points: line.points, spanGaps: true }))],
      hooks: { setCursor: [(plot) => this.read(plot, lines, shown)] },
    }, data, this.place);
    this.text.textContent = this.summary;
    this.lines = lines;
  }

  /** The chart as a picture, on the page's own background. */
  save(title) {
    const drawn = this.plot?.root.querySelector("canvas");
    if (!drawn) return;
    const whole = Object.assign(document.createElement("canvas"), { width: drawn.width, height: drawn.height });
    const pen = whole.getContext("2d");
    pen.fillStyle = getComputedStyle(document.body).backgroundColor;
    pen.fillRect(0, 0, whole.width, whole.height);
    pen.drawImage(drawn, 0, 0);
    whole.toBlob((blob) => {
      const link = el("a", { href: URL.createObjectURL(blob), download: `${title}.png` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
  }

  read(plot, lines, shown) {
    const place = plot.cursor.idx;
    if (place === null || place === undefined) { this.text.textContent = this.summary; return; }
    const parts = lines.map((line, index) => [line.label, plot.data[index + 1][place]]).filter(([label, value]) => label && value !== null);
    this.text.textContent = `${short(plot.data[0][place])}: ${parts.map(([label, value]) => `${label} ${shown(value)}`).join("  ")}`;
  }
}

/** Columns as a table that reads without a picture: at most some hundred rows. */
export function table(columns) {
  const names = Object.keys(columns), step = Math.max(1, Math.ceil(columns.step.length / 300));
  const body = columns.step.map((_, place) => place).filter((place) => place % step === 0 || place === columns.step.length - 1);
  return el("table", {}, el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col", class: "number" }, t(name))))),
    el("tbody", {}, body.map((place) => el("tr", {}, names.map((name) => el("td", { class: "number" }, name === "memory_bytes" && columns[name][place] ? bytes(columns[name][place]) : short(columns[name][place])))))));
}
export const csv = (columns) => {
  const names = Object.keys(columns);
  return [names.join(","), ...columns.step.map((_, place) => names.map((name) => columns[name][place] ?? "").join(","))].join("\n");
};
export const redrawn = (draw) => {
  document.addEventListener("theme", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
};
export { $ };
