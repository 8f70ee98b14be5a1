// @ts-check
// The list of runs: search, filters, labels, live updates, selection.
import { $, $$, el, figure, menu, notify, svg } from "./dom.js";
import { ago, duration, hasWeights, joined, short } from "./format.js";
import { Failed, follow, send, up } from "./net.js";
import { showProblem } from "./problem.js";
import { language, ready, t } from "./words.js";

await ready;
const ALIVE = ["starting", "running", "saving", "evaluating", "stopping"];
const rows = () => $$("[data-run]");
const notice = sessionStorage.getItem("notice"); // of the page before
if (notice) notify(notice);
sessionStorage.removeItem("notice");

// --- filters ----------------------------------------------------------------------------------------------------------

const tagFilter = $("#tag-filter"),
  filters = { q: $("#search"), state: $("#state-filter"), tag: tagFilter };
/** Keep the filters in the URL, for a reload and for the way back. */
function keepFilters() {
  const set = Object.entries(filters).filter(([, control]) => control.value);
  const query = new URLSearchParams(set.map(([name, control]) => [name, control.value])).toString();
  history.replaceState(null, "", query ? `?${query}` : location.pathname);
}
function filter() {
  if (!tagFilter) return;
  const words = $("#search").value.toLowerCase().split(/\s+/),
    state = $("#state-filter").value,
    tag = tagFilter.value;
  for (const row of rows()) {
    const group = ALIVE.includes(row.dataset.state)
      ? "running"
      : row.dataset.state === "died"
        ? "failed"
        : row.dataset.state;
    const isWanted = words.every((/** @type {string} */ word) => row.dataset.words.toLowerCase().includes(word));
    row.hidden =
      !isWanted || Boolean(state && group !== state) || Boolean(tag && !JSON.parse(row.dataset.tags).includes(tag));
  }
  const shown = rows().filter((row) => !row.hidden).length;
  $("#shown-count").textContent = t("runs_counted", { shown, all: rows().length });
}
/** Offer the tags of the listed runs. */
function listTags() {
  const offered = [...tagFilter.options].map((option) => option.text),
    tags = [...new Set(rows().flatMap((row) => JSON.parse(row.dataset.tags)))].sort();
  tagFilter.append(...tags.filter((tag) => !offered.includes(tag)).map((tag) => el("option", {}, tag)));
  tagFilter.parentElement.hidden = !tags.length;
}
if (tagFilter) {
  listTags();
  const before = new URLSearchParams(location.search);
  for (const [name, control] of Object.entries(filters)) {
    control.value = before.get(name) ?? "";
    if (control.selectedIndex === -1) control.value = "";
    control.addEventListener("input", () => {
      keepFilters();
      filter();
    });
  }
  filter();
}
/** Link to the comparison of the selected runs. */
function linkComparison() {
  const chosen = $$("tr[data-run] input:checked").map((box) => box.value),
    link = $("#compare");
  link.hidden = chosen.length < 2;
  link.href = `${up}compare?runs=${chosen.join(",")}`;
}
$("#runs")?.addEventListener("change", linkComparison);
addEventListener("pageshow", linkComparison); // the browser restores the selection on the way back
$("#main").addEventListener("click", async (/** @type {any} */ { target }) => {
  const number = target.closest("[data-unqueue]")?.dataset.unqueue;
  if (!number) return;
  try {
    await send("DELETE", `api/queue/${number}`);
  } catch (failed) {
    if (!(failed instanceof Failed)) throw failed;
    sessionStorage.setItem("notice", failed.message); // it may have started meanwhile
  }
  location.reload();
});

// --- names, tags, notes, deletion -------------------------------------------------------------------------------------

const dialog = $("#label-dialog");
/** @type {any} */
let labelled = null;
/** @param {any} row */
function label(row) {
  labelled = row;
  $("#label-name").value = $("a", row).textContent;
  $("#label-tags").value = JSON.parse(row.dataset.tags).join(", ");
  $("#label-notes").value = row.dataset.notes;
  $("#label-problem").textContent = "";
  dialog.showModal();
}
async function keepLabel() {
  const tags = $("#label-tags")
    .value.split(/[,，]/)
    .map((/** @type {string} */ tag) => tag.trim())
    .filter(Boolean);
  try {
    await send("PUT", `api/runs/${labelled.dataset.run}/label`, {
      name: $("#label-name").value,
      tags,
      notes: $("#label-notes").value,
    });
    location.reload();
  } catch (failed) {
    if (failed instanceof Failed) $("#label-problem").textContent = failed.message;
    else throw failed;
  }
}
$("#label-cancel").addEventListener("click", () => dialog.close());
$("#label-keep").addEventListener("click", keepLabel);
$("form", dialog).addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  void keepLabel();
});

/** @param {any} row @param {string} name */
async function remove(row, name) {
  if (ALIVE.includes(row.dataset.state)) {
    notify(t("delete_running"));
    return;
  }
  const { entry } = await send("DELETE", `api/runs/${row.dataset.run}`);
  const next = row.nextElementSibling ?? row.previousElementSibling;
  row.remove();
  if (next) $("summary", next)?.focus();
  filter();
  linkComparison();
  notify(t("deleted", { name }), [
    t("undo"),
    async () => {
      await send("POST", `api/trash/${entry}`, {});
      location.reload();
    },
  ]);
}
/** Complete a row of the server. @param {any} row */
function complete(row) {
  const started = $("[data-started]", row),
    place = $("[data-menu]", row),
    problem = $(".problem", row);
  if (started)
    started.textContent = Number(started.dataset.started) ? ago(Number(started.dataset.started), language) : "–";
  if (problem) showProblem(row, problem.title);
  if (!place) return;
  const name = place.dataset.menu,
    id = row.dataset.run;
  place.append(
    menu(t("actions_of", { name }), [
      el("button", { type: "button", onclick: () => label(row) }, t("label_title")),
      el("a", { class: "button", href: `${up}new?from=${id}` }, t("duplicate_run")),
      el(
        "a",
        { class: "button to-chat", href: `${up}chat?target=${id}`, hidden: !("weights" in row.dataset) },
        t("nav_chat"),
      ),
      el("a", { class: "button", href: `${up}api/runs/${id}/report`, download: "" }, t("report")),
      el("button", { type: "button", class: "danger", onclick: () => remove(row, name) }, t("delete")),
    ]),
  );
}
rows().forEach(complete);

/** Draw the loss curve of a run in its row or its card. @param {any} place @param {string} points */
function drawCurve(place, points) {
  if (!points) return;
  const line = $(".spark polyline", place);
  if (line) return void line.setAttribute("points", points);
  const look = { class: "spark", viewBox: "0 0 120 28", preserveAspectRatio: "none", role: "img" };
  const curve = svg("svg", { ...look, "aria-label": t("curve") }, svg("polyline", { points }));
  const skeleton = $(".skeleton.spark", place);
  if (skeleton) skeleton.replaceWith(curve);
  else $("[data-is=curve]", place)?.replaceChildren(curve);
}

// --- updates ----------------------------------------------------------------------------------------------------------

/** Remove a run that has ended from the running ones. @param {any} card */
function removeCard(card) {
  card.remove();
  $("#running-now").hidden = !$("[data-live]");
}
const arrive = async () =>
  (await import("./arrivals.js")).arrive((added) => {
    added.forEach(complete);
    listTags();
    filter();
  });
follow(
  () => "list=1",
  "",
  (name, run) => {
    if (name === "gone") {
      for (const node of $$(`[data-run="${run.run}"]`)) node.remove();
      for (const node of $$(`[data-live="${run.run}"]`)) removeCard(node);
      filter();
      linkComparison();
      return;
    }
    if (name !== "run") return;
    const row = $(`[data-run="${run.id}"]`),
      card = $(`[data-live="${run.id}"]`);
    if (!row || (ALIVE.includes(run.state) && !card)) void arrive();
    if (!row) return;
    row.dataset.state = run.state;
    showProblem(row, ["failed", "died", "unreadable"].includes(run.state) ? joined(run.sentence, run.remedy) : "");
    const chat = $(".to-chat", row);
    if (chat) chat.hidden = !hasWeights(run);
    for (const place of [row, card]) {
      if (!place) continue;
      const state = $(".state", place);
      state.className = `state ${run.state}`;
      state.textContent = t(`state_${run.state}`);
      /** @param {string} column @param {string} text */
      const put = (column, text) => {
        const cell = $(`[data-is=${column}]`, place);
        if (cell) cell.textContent = text;
      };
      const cell = $("[data-is=step]", place),
        [done, total] = [run.step, run.total].map((steps) => short(steps, language));
      if (cell && place === card) cell.textContent = run.total ? `${done} / ${total}` : "–";
      else cell?.replaceChildren(...(run.total ? [`${done}/`, el("wbr", {}), total] : [done]));
      for (const column of ["loss", "eval_loss", "tokens_per_s"])
        $(`[data-is=${column}]`, place)?.replaceChildren(figure(run[column]));
      drawCurve(place, run.curve);
      put("left_s", ALIVE.includes(run.state) && run.left_s ? t("left_is", { time: duration(run.left_s) }) : "");
    }
    if (card && !ALIVE.includes(run.state)) removeCard(card);
    else if (card) Object.assign($("progress", card), { max: run.total || 1, value: run.step });
    filter();
  },
);
