// The list of runs: asks every two seconds how they are doing, and draws those that are ticked.

const ASK_EVERY_MS = 2000;
const MOST_DRAWN = 4;
const data = JSON.parse($("data").textContent);
// The worst first, as a report orders them.
const WORST = [
  "lost", "learning-rate", "alarmed", "switched", "warning", "unclear", "saved", "healthy",
];
const ORDERS = {
  written: (run) => run.seconds_silent,
  name: (run) => run.name,
  outcome: (run) => run.outcome ? WORST.indexOf(run.outcome) : WORST.length,
  loss: (run) => typeof run.loss === "number" ? run.loss : Infinity,
  step: (run) => -run.last_step,
};

const view = {
  chosen: [],
  log: true,
  smoothing: 0,
  list: null,
  drawn: null,
};
const s = (count) => count > 1 ? "s" : "";

function chosenRows(runs) {
  const wanted = $("filter").value.toLowerCase();
  const key = ORDERS[$("sort").value];
  const compare = (a, b) => typeof a === "string"
    ? a.localeCompare(b, "en", { numeric: true })
    : Number(a > b) - Number(a < b);
  const isWanted = (run) => `${run.name} ${run.headline ?? ""}`.toLowerCase().includes(wanted);
  return runs.filter(isWanted).sort((a, b) => compare(key(a), key(b)));
}

function drawList({ folder, runs }) {
  const running = runs.filter((run) => stateOf(run)[0] === "alive").length;
  const alarmed = runs.filter((run) => run.first_alarm).length;
  const count = `${runs.length} run${s(runs.length)}`;
  $("title").textContent = folder;
  $("headline").textContent = runs.length
    ? `${count}: ${running} running, ${alarmed} with alarms`
    : "No run yet";
  $("runs").tBodies[0].replaceChildren(...chosenRows(runs).map(rowOf));
}

function rowOf(run) {
  const row = element("tr", null, run.first_alarm ? "has-alarm" : "");
  row.dataset.id = run.id;
  const loss = typeof run.loss === "number" ? number(run.loss) : run.loss ?? "–";
  const step = run.last_step < 0 ? "–" : stepText(run.last_step);
  row.append(
    cell([boxOf(run)]),
    cell([linkOf(run)]),
    cell(outcomeOf(run)),
    cell([sparkOf(run.losses ?? [])], "spark"),
    cell([loss], "number", "loss"),
    cell([step], "number", "last step"),
    cell(chipOf(run)),
  );
  return row;
}

function cell(parts, kind, label) {
  const made = element("td", null, kind);
  made.append(...parts);
  if (label) made.dataset.label = label;
  return made;
}

function boxOf(run) {
  const box = element("input");
  const at = view.chosen.indexOf(run.id);
  box.type = "checkbox";
  box.checked = at >= 0;
  box.disabled = !box.checked && view.chosen.length >= MOST_DRAWN;
  box.setAttribute("aria-label", `draw ${run.name}`);
  box.onchange = () => choose(run.id, box.checked);
  if (box.checked) box.style.accentColor = colourOfRun(at);
  return box;
}

function sparkOf(losses) {
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS(drawn.namespaceURI, "polyline");
  drawn.setAttribute("viewBox", "0 0 80 24");
  drawn.setAttribute("aria-hidden", "true");
  const points = sparkPoints(losses, 80, 24);
  line.setAttribute("points", points.map((point) => point.join(",")).join(" "));
  drawn.append(line);
  return drawn;
}

function linkOf(run) {
  const link = element("a");
  link.href = `run/${run.id}/`;
  const parts = run.name.split("/");
  link.append(...parts.flatMap((part, at) => at ? ["/", element("wbr"), part] : [part]));
  return link;
}

function outcomeOf(run) {
  const said = run.headline ?? (run.problem ? "–" : "reading");
  const kind = run.outcome && `outcome ${run.outcome}`;
  return [element("span", said, kind), element("small", alarmsOf(run))];
}

function chipOf(run) {
  const [kind, word, more] = stateOf(run);
  return [element("span", word, `chip ${kind}`), element("small", more)];
}

function choose(id, isWanted) {
  const others = view.chosen.filter((one) => one !== id);
  view.chosen = isWanted ? [...others, id].slice(0, MOST_DRAWN) : others;
  history.replaceState(null, "", view.chosen.length ? `#runs=${view.chosen.join(",")}` : "#");
  tick();
}

function drawTicked() {
  const runs = view.drawn?.runs ?? [];
  $("over").hidden = !runs.length;
  const count = drawOverlays(data.overlays, runs, view.smoothing);
  $("reading").hidden = count > 0;
}

async function update() {
  const list = await askServer("runs");
  const asked = `overlay?runs=${view.chosen.join(",")}`;
  view.drawn = view.chosen.length ? await askServer(asked) : null;
  view.list = list;
  drawList(list);
  drawTicked();
  showStatus("alive", `${list.runs.length} runs`);
  document.body.dataset.ready = "yes";
}

for (const control of ["filter", "sort"]) {
  $(control).addEventListener("input", () => view.list && drawList(view.list));
}
$("log").addEventListener("change", (event) => {
  view.log = event.target.checked;
  drawTicked();
});
$("smoothing").addEventListener("input", (event) => {
  view.smoothing = Number(event.target.value);
  const points = 2 * view.smoothing + 1;
  $("smoothing-label").textContent = view.smoothing ? `median of ${points}` : "none";
  drawTicked();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawTicked);
const linked = /^#runs=([\d,]+)$/.exec(location.hash);
if (linked) view.chosen = linked[1].split(",").map(Number).slice(0, MOST_DRAWN);
askEvery(ASK_EVERY_MS);
