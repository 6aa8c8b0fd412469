"use strict";
// The live page: asks the server every second what is new, and draws it (`charts.js`).

const ENDS = { finished: "the run has finished", interrupted: "the run was interrupted", crashed: "the run has crashed" };
const ASK_EVERY = 1000;
const view = { state: null, version: -1, step: null, head: null, indicator: null, log: true };

function select(head) {
  view.head = head;
  drawMap();
  drawHead().then(() => head && $("detail").scrollIntoView({ behavior: "smooth", block: "nearest" }));
}

// --- words -----------------------------------------------------------------------------------

// What has become of the run is final once it has ended, or has been silent for long.
function drawHeadline(status) {
  const { headline, headline_running, outcome } = view.state;
  $("headline").textContent = status.end || status.seconds_silent > SILENT_AFTER ? headline : headline_running;
  $("headline").className = `outcome ${outcome}`;
}

function drawWords() {
  const { events, num_events, advice } = view.state;
  const alarms = events.filter((event) => event.kind === "alarm"), lines = together(events);
  const switches = lines.filter(([event]) => event.kind === "switch");
  const sentences = [];
  if (alarms.length) {
    sentences.push(`First alarm at step ${alarms[0].step.toLocaleString("en")} in ${where([alarms[0]])}: ${alarms[0].why}.`);
  }
  if (switches.length) {
    const [last] = switches.at(-1);
    sentences.push(`Last switch at step ${last.step.toLocaleString("en")}: ${where(switches.at(-1))} to ${last.stabilizer}.`);
  }
  if (advice) sentences.push(advice);
  $("lede").textContent = sentences.join(" ").replaceAll("..", ".");
  $("event-count").textContent = num_events > events.length ? `${events.length} of ${num_events.toLocaleString("en")}: the newest, and all first alarms and switches` : "";
  drawEvents(lines.toReversed());
}

function drawStatus(status) {
  const chip = $("status"), silent = status.seconds_silent ?? 0;
  let text, kind;
  if (status.problem) [text, kind] = [`cannot read the run: ${status.problem}`, "lost"];
  else if (!status.samples && status.read >= 1) [text, kind] = [`waiting for the run’s first sample in ${status.folder}`, "waiting"];
  else if (status.read < 1) [text, kind] = [`reading ${Math.round(100 * status.read)} %`, "alive"];
  else if (status.end) [text, kind] = [`${ENDS[status.end] ?? "the run has ended"}, ${ago(silent)}`, status.end];
  else if (silent > SILENT_AFTER) [text, kind] = [`nothing new: last written ${ago(silent)}; the run hangs or was killed`, "silent"];
  else [text, kind] = [`last written ${ago(silent)}`, "alive"];
  chip.textContent = text; chip.className = kind;
}

async function drawRun() {
  const { run, indicators } = view.state, wanted = ["loss", "grad_norm"].filter((name) => run[name]).map(runCurve);
  if (indicators.length) {
    if (!indicators.includes(view.indicator)) view.indicator = indicators.includes("max_logit") ? "max_logit" : indicators[0];
    const select = $("indicator");
    if (select.options.length !== indicators.length) {
      select.replaceChildren(...indicators.map((name) => { const option = element("option", labelOf(name)); option.value = name; return option; }));
    }
    select.value = view.indicator;
    for (const name of new Set(["w_q_spectral_norm", view.indicator].filter((name) => indicators.includes(name)))) {
      wanted.push(curvesOf(name, await ask(`curves?indicator=${name}`)));
    }
  }
  drawKey(view.state.marks);
  drawCharts($("run-charts"), wanted, () => view.state.marks);
}

// --- the loop --------------------------------------------------------------------------------

function drawSlider() {
  const slider = $("step"), { steps, map } = view.state;
  slider.max = Math.max(steps.length - 1, 0);
  // While a long run goes on, steps are gathered: the same step moves to the left.
  slider.value = view.step == null ? slider.max : Math.max(steps.findLastIndex((step) => step <= map.step), 0);
  $("step-label").textContent = view.step == null ? "newest" : map.step.toLocaleString("en");
}

async function update() {
  const since = view.step == null ? view.version : -1;
  const state = await ask(`state?since=${since}` + (view.step == null ? "" : `&step=${view.step}`));
  drawStatus(state.status);
  if (!state.map && view.state) drawHeadline(state.status);
  if (!state.map) return;
  const changed = state.version !== view.version;
  view.state = state; view.version = state.version;
  document.title = `${state.title} · GuardBit live`;
  $("title").textContent = state.title;
  drawSlider();
  if (state.layers) { drawMap(); drawRamp(); }
  drawWorst();
  drawHeadline(state.status);
  if (!changed) return;
  drawWords();
  await drawRun();
  await drawHead();
  document.body.dataset.version = state.version;
}

listenToMap();
$("detail-close").addEventListener("click", () => select(null));
$("log").addEventListener("change", async (event) => { view.log = event.target.checked; await drawRun(); await drawHead(); });
$("indicator").addEventListener("change", (event) => { view.indicator = event.target.value; drawRun(); });
$("step").addEventListener("input", (event) => {
  const index = Number(event.target.value), { steps } = view.state;
  view.step = index >= steps.length - 1 ? null : steps[index];
  if (view.step == null) view.version = -1;
  tick();
});
window.addEventListener("resize", () => { if (view.state?.layers) drawMap(); });
tick();
setInterval(tick, ASK_EVERY);
