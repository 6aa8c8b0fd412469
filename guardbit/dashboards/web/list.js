"use strict";
// The list of runs: asks every two seconds how they are doing, and draws those that are ticked.

const ASK_EVERY = 2000, MOST = 4;
// Of each indicator that is drawn its title and what its axis is called.
const TITLES = {
  loss: ["Training loss", "loss"],
  w_q_spectral_norm: ["Largest W_Q spectral norm", "largest singular value"],
  max_logit: ["Largest max logit", "largest logit"],
  multiple_maxima_bf16: ["Largest share of rows with several maxima, BF16", "share of rows"],
};
const view = { chosen: [], log: true, smoothing: 0, drawn: null, state: { catalog: {} } };

// What the store knows: how the run ended; of one without an end, whether it still writes.
function stateOf(run) {
  if (run.problem) return ["lost", "cannot be read", run.problem];
  if (run.end) return [run.end, run.end, ago(run.seconds_silent)];
  if (run.seconds_silent > SILENT_AFTER) return ["silent", "silent", `last written ${ago(run.seconds_silent)}; it hangs or was killed`];
  return ["alive", "running", `last written ${ago(run.seconds_silent)}`];
}

function alarmsOf(run) {
  if (run.first_alarm == null) return "";
  const heads = run.heads.length ? `, head${run.heads.length > 1 ? "s" : ""} ${run.heads.join(", ")}` : "";
  const more = run.alarms > 1 ? `, and ${run.alarms - 1} more` : "";
  return `first alarm at step ${run.first_alarm.toLocaleString("en")}: ${run.where || "the whole run"}${heads}${more}`;
}

// The worst first, as a report orders them.
const WORST = ["lost", "learning-rate", "alarmed", "switched", "warning", "unclear", "saved", "healthy"];
const ORDERS = {
  written: (run) => run.seconds_silent,
  name: (run) => run.name,
  outcome: (run) => run.outcome ? WORST.indexOf(run.outcome) : WORST.length,
  loss: (run) => typeof run.loss === "number" ? run.loss : Infinity,
  step: (run) => -run.last_step,
};

function chosenRows(runs) {
  const wanted = $("filter").value.toLowerCase(), key = ORDERS[$("sort").value];
  const compare = (a, b) => typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a < b ? -1 : a > b ? 1 : 0;
  return runs.filter((run) => `${run.name} ${run.headline ?? ""}`.toLowerCase().includes(wanted)).sort((a, b) => compare(key(a), key(b)));
}

function drawList({ folder, runs }) {
  $("title").textContent = folder;
  const running = runs.filter((run) => stateOf(run)[0] === "alive").length, alarmed = runs.filter((run) => run.first_alarm != null).length;
  $("headline").textContent = runs.length ? `${runs.length} run${runs.length > 1 ? "s" : ""}: ${running} running, ${alarmed} with alarms` : "No run yet";
  $("runs").tBodies[0].replaceChildren(...chosenRows(runs).map((run) => {
    const row = element("tr"), box = element("input"), tick = element("td"), name = element("td"), state = element("td"), link = element("a"), outcome = element("td");
    box.type = "checkbox"; box.checked = view.chosen.includes(run.id);
    box.disabled = !box.checked && view.chosen.length >= MOST;
    box.setAttribute("aria-label", `draw ${run.name}`);
    box.onchange = () => choose(run.id, box.checked);
    const at = view.chosen.indexOf(run.id);
    if (at >= 0) box.style.accentColor = colourOf(at);
    tick.append(box);
    link.href = `run/${run.id}/`;
    link.append(...run.name.split("/").flatMap((part, at) => at ? ["/", element("wbr"), part] : [part]));
    name.append(link);
    const [kind, word, more] = stateOf(run);
    state.append(element("span", word, `chip ${kind}`), element("small", more));
    outcome.append(element("span", run.headline ?? (run.problem ? "–" : "reading"), run.outcome && `outcome ${run.outcome}`), element("small", alarmsOf(run)));
    const loss = element("td", typeof run.loss === "number" ? number(run.loss) : run.loss ?? "–", "number"), step = element("td", run.last_step < 0 ? "–" : run.last_step.toLocaleString("en"), "number");
    loss.dataset.label = "loss"; step.dataset.label = "last step";
    row.append(tick, name, outcome, loss, step, state);
    row.dataset.id = run.id; row.className = run.first_alarm == null ? "" : "has-alarm";
    return row;
  }));
}

function choose(id, wanted) {
  view.chosen = wanted ? [...view.chosen, id].slice(0, MOST) : view.chosen.filter((one) => one !== id);
  history.replaceState(null, "", view.chosen.length ? `#runs=${view.chosen.join(",")}` : "#");
  tick();
}

// A running median over so many points on either side: one bad batch does not bend it.
function smoothed(values, width) {
  if (!width) return values;
  return values.map((value, at) => {
    if (value == null) return null;
    const near = values.slice(Math.max(at - width, 0), at + width + 1).filter((one) => one != null).sort((a, b) => a - b);
    return near[near.length >> 1];
  });
}

// Runs have steps of their own: all of them on one axis, each line with its own points.
function together(runs, name) {
  const at = new Map();
  runs.forEach((run, index) => {
    if (!run.lines[name]) return;
    const values = smoothed(run.lines[name], view.smoothing);
    run.steps.forEach((place, point) => {
      if (!at.has(place)) at.set(place, Array(runs.length).fill(null));
      at.get(place)[index] = values[point];
    });
  });
  const places = [...at.keys()].sort((a, b) => a - b);
  return { steps: places, columns: runs.map((_, index) => places.map((place) => at.get(place)[index])) };
}

function drawOverlays() {
  const runs = view.drawn?.runs ?? [], wanted = [];
  $("over").hidden = !runs.length;
  for (const [name, [title, axis]] of Object.entries(TITLES)) {
    if (!runs.some((run) => run.lines[name])) continue;
    view.state.catalog[name] = { label: title, is_signed: false };
    const { steps, columns } = together(runs, name);
    if (!steps.length) continue;
    wanted.push({ name, title, axis, steps, lines: runs.map((run, index) => ({ label: run.name, high: columns[index], colour: colourOf(index), dash: DASHES[index] ?? [2, 3] })) });
  }
  $("reading").hidden = wanted.length > 0;
  const marks = () => (view.drawn?.runs ?? []).flatMap((run, index) => run.marks.map((mark) => ({ ...mark, run: index })));
  drawKey(marks());
  drawCharts($("overlays"), wanted, marks);
}

async function update() {
  const list = await ask("runs");
  if (view.chosen.length) view.drawn = await ask(`overlay?runs=${view.chosen.join(",")}`);
  else view.drawn = null;
  view.list = list;
  drawList(list);
  drawOverlays();
  $("status").textContent = `${list.runs.length} runs`; $("status").className = "alive";
  document.body.dataset.ready = "yes";
}

for (const control of ["filter", "sort"]) $(control).addEventListener("input", () => view.list && drawList(view.list));
$("log").addEventListener("change", (event) => { view.log = event.target.checked; drawOverlays(); });
$("smoothing").addEventListener("input", (event) => {
  view.smoothing = Number(event.target.value);
  $("smoothing-label").textContent = view.smoothing ? `median of ${2 * view.smoothing + 1}` : "none";
  drawOverlays();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawOverlays);
const linked = /^#runs=([\d,]+)$/.exec(location.hash);
if (linked) view.chosen = linked[1].split(",").map(Number).slice(0, MOST);
tick();
setInterval(tick, ASK_EVERY);
