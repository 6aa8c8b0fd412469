// The report: answers are in the page, and the map has a player. `charts.js` draws.
const data = JSON.parse($("data").textContent);
const view = { state: data.state ?? null, step: null, head: null, indicator: null, log: true, at: data.start };
const PLAY_EVERY = 150;

async function ask(question) {
  const [what, options] = question.split("?"), wanted = new URLSearchParams(options);
  const found = what === "head" ? data.heads[`${wanted.get("layer")},${wanted.get("head")}`] : data.curves[wanted.get("indicator")];
  if (!found) throw new Error("not in this report");
  return found;
}

// The story: what happened to the loss, and below it the heads that matter.
function drawStory() {
  const { run, indicators, marks } = view.state, wanted = run.loss ? [runCurve("loss")] : [];
  drawKey(marks);
  for (const name of ["w_q_spectral_norm", "max_logit"]) if (indicators.includes(name)) wanted.push(curvesOf(name, data.curves[name]));
  drawCharts($("story-charts"), wanted, () => view.state.marks, 250);
}

function drawAll() {
  const { run, indicators } = view.state, told = ["w_q_spectral_norm", "max_logit"];
  const wanted = run.grad_norm ? [runCurve("grad_norm")] : [];
  for (const name of indicators) if (!told.includes(name)) wanted.push(curvesOf(name, data.curves[name]));
  drawCharts($("all-charts"), wanted, () => view.state.marks);
}

function showStep(at) {
  view.at = Math.min(Math.max(at, 0), data.maps.length - 1);
  Object.assign(view.state, data.maps[view.at]);
  $("step").max = data.maps.length - 1;
  $("step").value = view.at;
  $("step-label").textContent = view.state.map.step.toLocaleString("en");
  drawMap(); drawRamp(); drawWorst();
  document.body.dataset.step = view.state.map.step;
}

async function select(head) {
  view.head = head;
  drawMap();
  link();
  try {
    await drawHead();
  } catch {
    $("detail").hidden = false;
    $("detail-title").textContent = nameOf(head.layer, head.head);
    $("detail-note").textContent = `This report keeps the histories of ${Object.keys(data.heads).length} heads, and not this one’s; guardbit live shows all.`;
    drawCharts($("detail-charts"), [], () => []);
  }
  if (head) $("detail").scrollIntoView({ behavior: "smooth", block: "nearest" });
}

// Links: #step=4450&head=2.6
function link() {
  const parts = [`step=${view.state.map.step}`, ...(view.head ? [`head=${view.head.layer}.${view.head.head}`] : [])];
  history.replaceState(null, "", `#${parts.join("&")}`);
}

function follow() {
  const wanted = new URLSearchParams(location.hash.slice(1)), step = Number(wanted.get("step"));
  if (wanted.has("step") && Number.isFinite(step)) {
    const distances = data.maps.map(({ map }) => Math.abs(map.step - step));
    showStep(distances.indexOf(Math.min(...distances)));
  }
  const [, layer, head] = /^(\d+)\.(\d+)$/.exec(wanted.get("head") ?? "") ?? [];
  if (layer != null && Number(layer) < view.state.layers && Number(head) < view.state.heads) select({ layer: Number(layer), head: Number(head) });
  else if (location.hash.length > 1 && !wanted.has("step")) document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", "");
}

// A fold is filled when it is opened.
document.addEventListener("toggle", ({ target }) => {
  if ($("events") && target.contains($("events")) && data.state) {
    const { events, num_events } = data.state;
    $("event-count").textContent = num_events > events.length ? `${num_events - events.length} later alarms not shown.` : "";
    drawEvents(together(events));
  }
  for (const place of target.querySelectorAll(":scope > [data-fold]")) place.outerHTML = data.folds[place.dataset.fold];
}, true);

let playing = null;
function play() {
  if (playing) { clearInterval(playing); playing = null; }
  else {
    if (view.at === data.maps.length - 1) showStep(0);
    playing = setInterval(() => { showStep(view.at + 1); if (view.at === data.maps.length - 1) play(); }, PLAY_EVERY);
  }
  $("play").textContent = playing ? "pause" : "play";
}

function drawEverything() {
  drawStory();
  drawAll();
  if (data.maps.length) showStep(view.at);
  if (view.head) select(view.head);
}

function startRun() {
  drawEverything();
  listenToMap();
  $("detail-close").addEventListener("click", () => select(null));
  $("step").addEventListener("input", (event) => { showStep(Number(event.target.value)); link(); });
  $("play").addEventListener("click", play);
  window.addEventListener("hashchange", follow);
  follow();
}

// Runs side by side: one line a run.
function drawOverlays() {
  drawKey(data.marks);
  drawCharts($("overlays"), data.overlays.map((one) => ({ ...one,
    lines: one.lines.map(({ label, values, run }) => ({ label, high: values, colour: colourOf(run), dash: DASHES[run] ?? [2, 3] })) })), () => data.marks);
}

const draw = data.overlays ? drawOverlays : drawEverything;
if (data.overlays) { view.state = { catalog: data.catalog }; drawOverlays(); } else if (data.state) startRun();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
let width = window.innerWidth;
window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; for (const place of document.querySelectorAll(".charts")) forget(place); draw(); } });
