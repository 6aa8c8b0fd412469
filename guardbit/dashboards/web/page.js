// The page of a run: a report, which holds all it draws, or a live page, which asks a server. Or
// runs side by side. `charts.js` draws.

const ASK_EVERY_MS = 1000;
const PLAY_EVERY_MS = 150;
// What is drawn beside the map, below the loss.
const STORY = ["w_q_spectral_norm", "max_logit"];

const data = JSON.parse($("data").textContent);
const view = {
  state: data.state ?? null,
  version: -1,
  // Of the map; null is the newest of a live run.
  step: null,
  head: null,
  log: true,
  playing: null,
};

async function ask(what, options) {
  if (data.is_live) return askServer(`${what}?${new URLSearchParams(options)}`);
  const { layer, head, indicator, step } = options;
  if (what === "curves") return data.curves[indicator];
  if (what === "map") return data.maps.find(({ map }) => map.step === step);
  const found = data.heads[`${layer},${head}`];
  if (found) return found;
  const kept = Object.keys(data.heads).length;
  throw new Error(
    `This report keeps the histories of ${kept} heads, and not this one’s; guardbit live shows all.`
  );
}

// --- the run ---------------------------------------------------------------------------------

async function drawRun() {
  const { run, indicators, steps, marks } = view.state;
  drawEvents();
  $("story").hidden = !steps.length;
  if (!steps.length) return;
  const answers = indicators.map((indicator) => ask("curves", { indicator }));
  const curves = (await Promise.all(answers)).map((found) => curvesOf(found.indicator, found));
  const ofRun = (name) => run[name] ? [runCurve(name)] : [];
  const story = STORY.flatMap((name) => curves.filter((curve) => curve.name === name));
  const others = curves.filter((curve) => !STORY.includes(curve.name));
  drawKey(marks);
  drawCharts($("story-charts"), [...ofRun("loss"), ...story], () => view.state.marks);
  drawCharts($("all-charts"), [...ofRun("grad_norm"), ...others], () => view.state.marks);
  await showStep(view.step);
  await drawHead();
}

function drawEvents() {
  const { events, num_events: count } = view.state;
  $("event-count").textContent = count > events.length
    ? `${events.length} of ${stepText(count)}: the newest, and all first alarms and switches`
    : "";
  const items = linesOf(events).map((line) => {
    const [event] = line;
    const item = element("li", null, event.kind);
    item.append(
      element("b", `step ${stepText(event.step)}`),
      ` ${whatHappened(event)}, ${where(line)}`,
      element("span", event.why),
    );
    return item;
  });
  // Of a run that goes on the newest come first.
  if (data.is_live) items.reverse();
  $("events").replaceChildren(...(items.length ? items : [element("li", "none so far")]));
}

// --- the map and its player ------------------------------------------------------------------

const mapSteps = () => data.is_live ? view.state.steps : data.maps.map(({ map }) => map.step);

// Shows the map nearest to a step; null is the newest.
async function showStep(step) {
  const steps = mapSteps();
  if (!steps.length || !view.state.layers) return;
  const last = steps.length - 1;
  const at = step == null ? last : nearestIndex(steps, step);
  view.step = data.is_live && at === last ? null : steps[at];
  const wanted = view.step;
  const found = await ask("map", { step: steps[at] });
  if (view.step !== wanted) return;  // another step was asked for meanwhile
  Object.assign(view.state, found);
  $("step").max = last;
  $("step").value = at;
  $("step-label").textContent = view.step == null ? "newest" : stepText(found.map.step);
  drawMap();
  drawRamp();
  drawWorst();
  document.body.dataset.step = found.map.step;
}

async function play() {
  const mine = view.playing ? null : {};
  view.playing = mine;
  $("play").textContent = mine ? "pause" : "play";
  if (mine && view.state.map.step >= mapSteps().at(-1)) await showStep(mapSteps()[0]);
  while (mine && view.playing === mine) {
    const next = mapSteps().find((step) => step > view.state.map.step);
    if (next == null) return play();
    await showStep(next);
    await new Promise((done) => setTimeout(done, PLAY_EVERY_MS));
  }
}

// The heads to watch at the step of the map.
function drawWorst() {
  const { worst, sites, map } = view.state;
  const alarmed = new Set(map.alarmed.map(String));
  // A head at its baseline is nothing to watch.
  const watched = worst.filter((head, place) => head.excess >= 1.5 || place < 3);
  const rows = watched.map(({ layer, head, indicator, value, excess }) => {
    const row = element("tr", null, alarmed.has(`${layer},${head}`) ? "alarmed" : "");
    row.append(
      element("td", nameOf(layer, head)),
      element("td", labelOf(indicator)),
      element("td", number(value), "number"),
      element("td", times(excess), "number"),
    );
    row.tabIndex = 0;
    row.title = sites[layer] ?? "";
    row.onclick = () => select({ layer, head });
    row.onkeydown = (event) => event.key === "Enter" && row.onclick();
    return row;
  });
  $("worst").tBodies[0].replaceChildren(...rows);
}

// --- one head --------------------------------------------------------------------------------

async function select(head) {
  view.head = head;
  drawMap();
  link();
  await drawHead();
  if (head) $("detail").scrollIntoView({ behavior: "smooth", block: "nearest" });
}

async function drawHead() {
  $("detail").hidden = !view.head;
  if (!view.head) return;
  const { layer, head } = view.head;
  const name = nameOf(layer, head);
  let found = { site: "", events: [], marks: [], indicators: {} };
  let note = "";
  try {
    found = await ask("head", { layer, head });
    note = noteOf(found.events);
  } catch (error) {
    note = error.message;
  }
  $("detail-title").textContent = found.site ? `${name}  (${found.site})` : name;
  $("detail-note").textContent = note;
  $("detail").marks = found.marks;
  const curves = Object.entries(found.indicators).map(([indicator, { low, high, typical }]) => ({
    name: indicator,
    steps: found.steps,
    lines: [
      { label: "median head", high: typical, colour: css("--context"), width: 1 },
      { label: name, low, high, colour: lineColour(0) },
    ],
  }));
  drawCharts($("detail-charts"), curves, () => $("detail").marks);
}

function noteOf(events) {
  const alarm = events.find((event) => event.kind === "alarm");
  if (!alarm) return "No alarm. Coloured: this head; grey: the median head.";
  const first = `First alarm at step ${stepText(alarm.step)}: ${alarm.why.replace(/\.$/, "")}.`;
  const last = events.findLast((event) => event.kind === "switch");
  if (!last) return first;
  return `${first} Switched to ${last.stabilizer} at step ${stepText(last.step)}.`;
}

// --- links: #step=4450&head=2.6 --------------------------------------------------------------

function link() {
  const parts = view.step == null ? [] : [`step=${view.state.map.step}`];
  if (view.head) parts.push(`head=${view.head.layer}.${view.head.head}`);
  history.replaceState(null, "", `#${parts.join("&")}`);
}

async function follow() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const { layers, heads } = view.state;
  const step = Number(wanted.get("step"));
  if (wanted.has("step") && Number.isFinite(step)) await showStep(step);
  const [, layer, head] = (/^(\d+)\.(\d+)$/.exec(wanted.get("head") ?? "") ?? []).map(Number);
  if (layer < layers && head < heads) await select({ layer, head });
  const section = document.getElementById(location.hash.slice(1))?.closest("details");
  if (section) section.open = true;
}

// --- live ------------------------------------------------------------------------------------

// A part's id -> its markup when it was last taken over.
const taken = new Map();
for (const part of document.querySelectorAll(".part")) taken.set(part.id, part.outerHTML);

// Takes over the parts of a page that have changed; what is drawn stays, and what is unfolded.
function takeOver(page) {
  const fresh = new DOMParser().parseFromString(page, "text/html").querySelectorAll(".part");
  let before = null;
  for (const part of [...fresh]) {
    const markup = part.outerHTML;
    const old = $(part.id);
    if (old && taken.get(part.id) !== markup) {
      keepUnfolded(old, part);
      old.replaceWith(part);
    }
    if (!old) before.after(part);
    taken.set(part.id, markup);
    before = $(part.id);
  }
  const ids = new Set([...fresh].map((part) => part.id));
  for (const old of document.querySelectorAll(".part")) if (!ids.has(old.id)) old.remove();
}

function keepUnfolded(old, part) {
  const nameOfFold = (fold) => fold.querySelector("h2, b")?.textContent;
  const folds = (within) => [within, ...within.querySelectorAll("details")];
  const open = new Map(folds(old).map((fold) => [nameOfFold(fold), fold.open]));
  for (const fold of folds(part)) fold.open = open.get(nameOfFold(fold)) ?? fold.open;
}

async function update() {
  const found = await askServer(`state?since=${view.version}`);
  showStatus(...statusOf(found.status));
  if (found.version === view.version) return;
  const isFirst = view.version < 0;
  view.state = found;
  takeOver(found.main);
  await drawRun();
  if (isFirst) await follow();
  view.version = found.version;  // last: after an error all is asked for once more
  document.body.dataset.version = found.version;
}

// --- the start -------------------------------------------------------------------------------

function listenToMap() {
  $("map").addEventListener("click", (event) => {
    const found = headAt(event);
    if (found) select(found);
  });
  $("map").addEventListener("mousemove", pointAt);
  $("map").addEventListener("mouseleave", () => { $("tip").hidden = true; });
  $("map").addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (!move || !view.state?.layers) return;
    event.preventDefault();
    const { layers, heads } = view.state;
    const from = view.head ?? { layer: 0, head: 0 };
    select({
      layer: Math.min(Math.max(from.layer + move[0], 0), layers - 1),
      head: Math.min(Math.max(from.head + move[1], 0), heads - 1),
    });
  });
}

function startRun() {
  listenToMap();
  $("detail-close").addEventListener("click", () => select(null));
  $("play").addEventListener("click", play);
  $("step").addEventListener("input", async (event) => {
    await showStep(mapSteps()[Number(event.target.value)]);
    link();
  });
  $("log").addEventListener("change", (event) => {
    view.log = event.target.checked;
    drawRun();
  });
  window.addEventListener("hashchange", follow);
}

function drawAgain() {
  if (data.overlays) drawOverlays(data.overlays, data.runs);
  else if (view.state) drawRun();
}

let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  for (const place of document.querySelectorAll(".charts")) forget(place);
  drawAgain();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);

if (data.overlays) {
  drawAgain();
} else if (data.is_live) {
  startRun();
  askEvery(ASK_EVERY_MS);
} else if (data.state) {
  // A report starts at the first alarm.
  view.step = data.maps.find(({ map }) => map.alarmed.length)?.map.step ?? null;
  startRun();
  drawRun().then(follow);
}
