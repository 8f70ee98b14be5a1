// @ts-check
// Charts based on the bundled uPlot: shared cursor and zoom, values at the cursor, PNG and CSV export in a menu.
import { WHOLE, csv, countNonFinite, nonFinitePlaces, rangeOf } from "./curves.js";
import { $, download, el, menu } from "./dom.js";
import { axisLabels, bytes, duration, short } from "./format.js";
import { COLORS, linesOfCurve, valueNear, themeColor } from "./lines.js";
import { language, t } from "./words.js";

/** @typedef {{label: string, x: any[], y: any[], smoothing?: number, points?: boolean, color?: number}} Curve */
const Plot = () => /** @type {any} */ (globalThis).uPlot;
/** Charts by cursor group; a group shares its cursor and zoom. @type {Map<string, Set<Chart>>} */
const siblings = new Map();

export class Chart {
  /** @param {any} host @param {string} title @param {{sync: string, height?: number, large?: boolean, unit?: string, columns?: () => any}} options */
  constructor(host, title, options) {
    this.options = options;
    this.title = title;
    this.key = el("p", { class: "legend" });
    this.place = el("div", { class: "plot" });
    const items = [
      el("button", { type: "button", onclick: () => this.save() }, "PNG"),
      ...(options.columns
        ? [
            el(
              "button",
              {
                type: "button",
                onclick: () => download(new Blob([csv(options.columns?.())], { type: "text/csv" }), `${title}.csv`),
              },
              "CSV",
            ),
          ]
        : []),
      el("button", { type: "button", onclick: () => this.zoom(null, null) }, t("reset_zoom")),
    ];
    this.node = el(
      "section",
      { class: `card chart${options.large ? " large" : ""}`, "aria-label": title },
      el("div", { class: "row" }, el("h2", { class: "grow" }, title), menu(t("actions_of", { name: title }), items)),
      this.key,
      this.place,
    );
    host.append(this.node);
    this.isZoomed = false;
    siblings.set(options.sync, (siblings.get(options.sync) ?? new Set()).add(this));
    /** @type {any} */ this.plot = null;
    /** @type {any[]} */ this.lines = [];
    /** @type {{at: any[], stroke: string}[]} */ this.marks = [];
  }
  remove() {
    siblings.get(this.options.sync)?.delete(this);
    this.plot?.destroy();
    this.node.remove();
  }
  /** Merge all curves onto one sorted x axis. @param {Curve[]} curves @param {{log?: boolean, zero?: boolean, clip?: boolean, time?: boolean}} how */
  draw(curves, { log = false, zero = false, clip = false, time = false } = {}) {
    const lines = curves.flatMap((curve, index) => linesOfCurve(curve, curve.color ?? index));
    const xs = [...new Set(lines.flatMap((line) => line.x))].filter((x) => x !== null).sort((a, b) => a - b);
    const at = new Map(xs.map((x, place) => [x, place]));
    const data = [
      xs,
      ...lines.map((line) => {
        const found = new Array(xs.length).fill(null);
        line.x.forEach((/** @type {any} */ x, /** @type {number} */ place) => {
          const value = line.y[place],
            row = at.get(x);
          if (value !== null && row !== undefined && (!log || value > 0)) found[row] = value;
        });
        return found;
      }),
    ];
    const xScale = this.plot?.scales.x,
      zoomed = this.isZoomed && xScale ? [xScale.min, xScale.max] : null;
    this.lines = lines;
    this.missing = curves.reduce((sum, curve) => sum + countNonFinite(curve.y), 0);
    this.marks = lines
      .filter((line) => line.label)
      .map((line) => ({ at: nonFinitePlaces(line.x, line.given), ...line }));
    const { left = -10, top = -10 } = this.plot?.cursor ?? {};
    this.plot?.destroy();
    const ink = themeColor("muted"),
      grid = { stroke: themeColor("border"), width: 1 },
      font = "11px Inter, system-ui, sans-serif";
    const range = rangeOf(data.slice(1).flat(), { zero, clip, log });
    this.shown = this.options.unit === "bytes" ? bytes : (/** @type {any} */ value) => short(value, language);
    const xText = time ? duration : (/** @type {any} */ value) => short(value, language);
    this.xText = xText;
    this.plot = new (Plot())(
      {
        width: Math.max(200, this.place.clientWidth),
        height: this.options.height ?? 148,
        cursor: {
          sync: { key: this.options.sync, scales: ["x", null] },
          drag: { x: true, y: false },
          points: { size: 7 },
        },
        legend: { show: false },
        scales: { x: { time: false }, y: { distr: log ? 3 : 1, ...(log && !clip ? {} : { range: () => range }) } },
        axes: [
          {
            stroke: ink,
            grid: { show: false },
            ticks: { show: false },
            size: 26,
            font,
            ...(time ? {} : { incrs: WHOLE }),
            values: (/** @type {any} */ _, /** @type {any[]} */ ticks) =>
              ticks.map((tick) => (tick === null ? "" : xText(tick))),
          },
          {
            stroke: ink,
            grid,
            ticks: { show: false },
            size: 54,
            font,
            values: (/** @type {any} */ _, /** @type {any[]} */ ticks) =>
              this.options.unit === "bytes"
                ? ticks.map((tick) => (tick === null ? "" : bytes(tick)))
                : axisLabels(ticks, language),
          },
        ],
        series: [
          {},
          ...lines.map((line) => ({
            label: line.label,
            stroke: line.stroke,
            width: line.width,
            dash: line.dash,
            points: line.dots,
            fill: line.fill,
            spanGaps: true,
          })),
        ],
        hooks: {
          draw: [(/** @type {any} */ plot) => this.markNonFinite(plot)],
          setCursor: [() => this.read()],
          setSelect: [(/** @type {any} */ plot) => this.chosen(plot)],
        },
      },
      data,
      this.place,
    );
    $(".u-over", this.place).addEventListener("dblclick", () => this.zoom(null, null));
    if (zoomed) this.plot.setScale("x", { min: zoomed[0], max: zoomed[1] });
    if (left >= 0) this.plot.setCursor({ left, top });
    this.read();
  }
  /** Draw a cross on the x axis for each NaN or infinite value. @param {any} plot */
  markNonFinite({ ctx, bbox, valToPos }) {
    const size = 4 * devicePixelRatio,
      y = bbox.top + bbox.height - 1.5 * size;
    ctx.save();
    ctx.lineWidth = size / 2.5;
    for (const { at, stroke } of this.marks)
      for (const x of new Set(at.map((one) => Math.round(valToPos(one, "x", true))))) {
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.strokeStyle = stroke;
        ctx.beginPath();
        for (const way of [-size, size]) {
          ctx.moveTo(x - size, y - way);
          ctx.lineTo(x + size, y + way);
        }
        ctx.stroke();
      }
    ctx.restore();
  }
  /** @param {any} plot */
  chosen(plot) {
    if (plot.select.width > 4)
      this.zoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
  }
  /** Zoom all charts of the cursor group; null resets the zoom. @param {number | null} min @param {number | null} max */
  zoom(min, max) {
    for (const chart of siblings.get(this.options.sync) ?? []) {
      const xs = chart.plot?.data[0];
      if (!xs?.length) continue;
      chart.isZoomed = min !== null;
      chart.plot.setScale("x", { min: min ?? xs[0], max: max ?? xs.at(-1) });
    }
  }
  /** Update the legend: names of the curves, with their unsmoothed values at the cursor or their last ones. */
  read() {
    const plot = this.plot,
      place = plot?.cursor.idx;
    if (!plot) return;
    const parts = this.lines
      .map((line, index) => [line, line.isSmoothed ? index - 1 : index])
      .map(([line, index]) => [
        line,
        place === null || place === undefined
          ? this.lines[index].y.findLast((/** @type {any} */ v) => v !== null)
          : valueNear(plot.data[index + 1], place),
      ])
      .filter(([line]) => line.label);
    this.key.replaceChildren(
      ...parts.map(([line, value]) =>
        el(
          "span",
          { class: "entry" },
          el("span", { class: `swatch color-c${line.color % COLORS}${line.dots.show && !line.width ? " dot" : ""}` }),
          line.label,
          " ",
          el("b", {}, value === undefined || value === null ? "–" : this.shown?.(value)),
        ),
      ),
      el(
        "span",
        { class: "at" },
        place === null || place === undefined || !plot.data[0].length
          ? this.missing
            ? `NaN/∞ × ${this.missing}`
            : ""
          : `@ ${this.xText?.(plot.data[0][place])}`,
      ),
    );
  }
  /** Return the chart as an image on the page's background color. */
  save() {
    const drawn = this.plot?.root.querySelector("canvas");
    if (!drawn) return;
    const room = 40,
      whole = Object.assign(document.createElement("canvas"), { width: drawn.width, height: drawn.height + room });
    const pen = /** @type {CanvasRenderingContext2D} */ (whole.getContext("2d"));
    pen.fillStyle = themeColor("surface");
    pen.fillRect(0, 0, whole.width, whole.height);
    pen.fillStyle = themeColor("text");
    pen.font = "600 16px Inter, sans-serif";
    pen.fillText(this.title, 12, 26);
    pen.drawImage(drawn, 0, room);
    whole.toBlob((blob) => {
      if (blob) download(blob, `${this.title}.png`);
    });
  }
}
