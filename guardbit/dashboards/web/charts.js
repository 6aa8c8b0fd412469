"use strict";
// What the live page and the report draw alike: the model map, curves, the worst heads. Both have `view`,
// the state of the page, and `ask`, which answers the page's questions. Text that comes from the run
// only ever becomes text, never markup.

// Sign, height above the chart in pixels, line, and meaning of each mark.
const MARKS = {
  alarm: ["▼", 0, [5, 4], "first alarm of a head"],
  switch: ["◆", 11, [], "switch"],
  undo: ["◇", 11, [2, 3], "switched back"],
  departed: ["✕", 11, [], "the loss diverged"],
};
const DASHES = [[], [8, 4], [8, 3, 2, 3]];
const RANGE = "range";

const $ = (id) => document.getElementById(id);

const number = (x) => x == null ? "–" : Math.abs(x) > 3.4e38 ? (x < 0 ? "−∞" : "∞") : x === 0 || (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e6)
  ? Number(x.toPrecision(3)).toLocaleString("en") : x.toExponential(1).replace(/(\.0)?e\+?/, "e");
const times = (x) => x == null ? "–" : x > 1000 ? "> 1,000 ×" : `${x < 10 ? x.toPrecision(2) : Math.round(x)} ×`;
// Colours are those of the page's theme.
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const lineColour = (index) => css(`--highlight-${index}`);
const labelOf = (indicator) => view.state.catalog[indicator].label;
const nameOf = (layer, head) => `layer ${layer}, head ${head}`;

function element(tag, text, kind) {
  const made = document.createElement(tag);
  if (text != null) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

// --- the model map ---------------------------------------------------------------------------

const isDark = () => css("--theme") === "dark";

// A colour of the ramp; on dark paper it brightens instead.
function ramp(palette, excess) {
  const heat = isDark() ? palette.heat_dark : palette.heat;
  const place = Math.min(Math.max(Math.log(excess) / Math.log(palette.most), 0), 1) * (heat.length - 1);
  const low = Math.min(Math.floor(place), heat.length - 2), part = place - low;
  const channel = (stop, i) => parseInt(heat[stop].slice(1 + 2 * i, 3 + 2 * i), 16);
  return `rgb(${[0, 1, 2].map((i) => Math.round(channel(low, i) * (1 - part) + channel(low + 1, i) * part))})`;
}

function geometry() {
  const { layers, heads } = view.state, left = 34, bottom = 20;
  const width = $("map").parentElement.clientWidth - left;
  const cell = {
    width: Math.max(Math.min(Math.floor(width / heads), 64), 4),
    height: Math.max(Math.min(Math.floor(560 / layers), 40), 6),
  };
  return { left, bottom, cell, layers, heads };
}

function drawMap() {
  const canvas = $("map"), { palette, map } = view.state, { left, bottom, cell, layers, heads } = geometry();
  const width = left + heads * cell.width, height = layers * cell.height + bottom + 2;
  const dots = window.devicePixelRatio || 1;
  canvas.width = width * dots; canvas.height = height * dots;
  canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(dots, dots);
  const gap = Math.min(cell.width, cell.height) > 8 ? 1 : 0.5;
  const at = (layer, head) => [left + head * cell.width, 1 + (layers - 1 - layer) * cell.height];
  map.excess.forEach((excess, index) => {
    if (excess == null) return;
    const [x, y] = at(Math.floor(index / heads), index % heads);
    pen.fillStyle = ramp(palette, excess);
    pen.fillRect(x, y, cell.width - gap, cell.height - gap);
  });
  pen.strokeStyle = css("--ink"); pen.lineWidth = 2;
  for (const [layer, head] of map.alarmed) {
    const [x, y] = at(layer, head);
    pen.strokeRect(x - gap / 2, y - gap / 2, cell.width, cell.height);
  }
  for (const [layer, head] of map.stabilized) {
    const [x, y] = at(layer, head), radius = Math.max(Math.min(cell.width, cell.height) / 12, 1.5);
    pen.beginPath();
    pen.arc(x + cell.width / 2, y + cell.height / 2, radius, 0, 2 * Math.PI);
    pen.fillStyle = css("--paper"); pen.fill(); pen.lineWidth = 1; pen.stroke();
  }
  if (view.head) {
    const [x, y] = at(view.head.layer, view.head.head);
    pen.strokeStyle = lineColour(1); pen.lineWidth = 3;
    pen.strokeRect(x - 1.5, y - 1.5, cell.width + 2, cell.height + 2);
  }
  pen.fillStyle = css("--quiet"); pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "right"; pen.textBaseline = "middle";
  const rows = Math.ceil(14 / cell.height), columns = Math.ceil(24 / cell.width);
  for (let layer = 0; layer < layers; layer += rows) pen.fillText(layer, left - 6, at(layer, 0)[1] + cell.height / 2);
  pen.textAlign = "center"; pen.textBaseline = "top";
  for (let head = 0; head < heads; head += columns) pen.fillText(head, at(0, head)[0] + cell.width / 2, height - bottom + 5);
  canvas.dataset.cells = map.excess.filter((excess) => excess != null).length;
  canvas.setAttribute("aria-label", `Model map at step ${map.step}: ${layers} layers of ${heads} heads`);
  $("map-step").textContent = map.step < 0 ? "" : `at step ${map.step.toLocaleString("en")}`;
}

function drawRamp() {
  const pen = $("ramp").getContext("2d"), { palette } = view.state, { width } = $("ramp");
  for (let x = 0; x < width; x++) {
    pen.fillStyle = ramp(palette, Math.pow(palette.most, x / (width - 1)));
    pen.fillRect(x, 0, 1, 10);
  }
  $("ramp-labels").textContent = `1 × to ${palette.most} × its baseline or more; blank: not measured`;
}

function headAt(event) {
  const { left, cell, layers, heads } = geometry(), box = $("map").getBoundingClientRect();
  const head = Math.floor((event.clientX - box.left - left) / cell.width);
  const layer = layers - 1 - Math.floor((event.clientY - box.top - 1) / cell.height);
  return head >= 0 && head < heads && layer >= 0 && layer < layers ? { layer, head } : null;
}

function pointAt(event) {
  const found = view.state?.layers ? headAt(event) : null, tip = $("tip");
  tip.hidden = !found;
  if (!found) return;
  const { map, heads } = view.state, index = found.layer * heads + found.head, excess = map.excess[index];
  tip.textContent = excess == null ? `${nameOf(found.layer, found.head)}: not measured`
    : `${nameOf(found.layer, found.head)}: ${times(excess)} its baseline (${labelOf(map.names[map.which[index]])})`;
  const box = $("map").parentElement.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX - box.left + 14, Math.max(box.width - 330, 0))}px`;
  tip.style.top = `${event.clientY - box.top + 16}px`;
}

// --- curves ----------------------------------------------------------------------------------

// Ctrl + wheel zooms (the wheel alone scrolls the page), shift + drag pans; dragging alone zooms into
// what was dragged over (uPlot's own).
function wheelAndPan() {
  const set = (plot, min, max) => plot.setScale("x", { min, max });
  return { hooks: { ready: [(plot) => {
    plot.over.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const { min, max } = plot.scales.x, middle = plot.posToVal(event.offsetX, "x");
      const factor = event.deltaY < 0 ? 0.8 : 1.25;
      set(plot, middle - (middle - min) * factor, middle + (max - middle) * factor);
    }, { passive: false });
    plot.over.addEventListener("mousedown", (event) => {
      if (!event.shiftKey) return;
      event.preventDefault(); event.stopImmediatePropagation();
      const { min, max } = plot.scales.x, start = event.clientX, perPixel = (max - min) / plot.over.clientWidth;
      const move = (moved) => set(plot, min - (moved.clientX - start) * perPixel, max - (moved.clientX - start) * perPixel);
      const up = () => { document.removeEventListener("mousemove", move); document.removeEventListener("mouseup", up); };
      document.addEventListener("mousemove", move); document.addEventListener("mouseup", up);
    }, true);
  }] } };
}

// Where a page has several runs, marks have the colour of their run.
const colourOf = (run) => run < 3 ? lineColour(run) : css("--ink");
const markColour = ({ kind, run }) => run != null ? colourOf(run) : css(kind === "departed" ? "--bad" : "--ink");

// What the signs in use stand for.
function drawKey(marks) {
  const used = new Set(marks.map(({ kind }) => kind));
  $("key").textContent = Object.entries(MARKS).filter(([kind]) => used.has(kind)).map(([, [sign, , , name]]) => `${sign}\u00a0${name}`).join(" · ");
}

// The same marks as in the figures: a line at the step, a sign above the panel, as long as signs of
// one kind do not touch.
function eventMarks(marks) {
  return { hooks: { draw: [(plot) => {
    const pen = plot.ctx, dots = window.devicePixelRatio || 1, last = {};
    let lines = 0;
    plot.drawnMarks = [];
    pen.save();
    pen.lineWidth = dots;
    pen.textAlign = "center"; pen.textBaseline = "bottom";
    for (const mark of marks()) {
      const { kind, step, run } = mark, [sign, height, line] = MARKS[kind], row = `${kind}${run ?? ""}`;
      if (step < plot.scales.x.min || step > plot.scales.x.max) continue;
      const x = plot.valToPos(step, "x", true);
      if (x - (last[row] ?? -Infinity) < 9 * dots) continue;
      last[row] = x;
      pen.strokeStyle = pen.fillStyle = markColour(mark);
      if (++lines <= 8 || kind === "departed") {
        pen.setLineDash(line.map((length) => length * dots));
        pen.beginPath(); pen.moveTo(x, plot.bbox.top); pen.lineTo(x, plot.bbox.top + plot.bbox.height); pen.stroke();
      }
      pen.font = `${kind === "departed" ? `bold ${14 * dots}` : 11 * dots}px system-ui, sans-serif`;
      pen.fillText(sign, x, plot.bbox.top - height * dots);
      plot.drawnMarks.push({ kind, step });
    }
    pen.restore();
  }] } };
}

// Indicators are sampled at steps of their own: each line shows its sample nearest to the pointer, and
// the step is the nearest at which any line of the chart has one.
function nearest(plot, series, hovered, at) {
  const steps = plot.data[0], distance = (index) => Math.abs(steps[index] - at);
  const has = series > 0 ? (index) => plot.data[series][index] != null
    : (index) => plot.data.slice(1).some((values) => values[index] != null);
  let found = hovered;
  for (let index = 0; index < steps.length; index++) {
    if (has(index) && (!has(found) || distance(index) < distance(found))) found = index;
  }
  return found;
}

const axisColours = (label) => ({ label, labelSize: 18, labelGap: 2, labelFont: "12px system-ui, sans-serif", stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } });

// The range of the values in view. What comes after the loss has diverged is no measure of heads: one
// that exploded would press all else flat. A loss is measured once it has left that of an untrained model.
function visibleRange(plot, log, isLoss) {
  const steps = plot.data[0], departed = isLoss ? Infinity : view.state.departed ?? Infinity;
  let min = plot.scales.x.min ?? steps[0];
  const max = plot.scales.x.max ?? steps[steps.length - 1], end = departed > min ? Math.min(max, departed) : max;
  if (isLoss && steps.length >= 20 && min <= steps[0]) min = Math.min(steps[Math.floor(steps.length / 10)], max);
  let low = Infinity, high = -Infinity;
  plot.data.slice(1).forEach((values) => values.forEach((value, index) => {
    const step = steps[index];
    if (value == null || step < min || step > end) return;
    low = Math.min(low, value); high = Math.max(high, value);
  }));
  if (low > high) return log ? [1, 10] : [0, 1];
  if (log) return [low / 1.15, high * 1.15];
  const span = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low < high / 2 ? 0 : low - span, high + span];
}

// A few round numbers of a log axis: more would be grey stripes. Within half a decade they are evenly spaced.
// uPlot hides an axis longer than its own increments, which end at 1e32: hence one that fits any.
function logTicks(plot, axis, min, max) {
  const decades = Math.log10(max / min), ticks = [];
  if (decades < 0.5) {
    const power = 10 ** Math.floor(Math.log10((max - min) / 3)), every = [5, 2.5, 2, 1].find((part) => part * power * 3 <= max - min) * power;
    for (let tick = Math.ceil(min / every); tick * every <= max; tick++) ticks.push(tick * every);
    return ticks;
  }
  const parts = decades > 4 ? [1] : decades > 2 ? [1, 3] : decades > 1.3 ? [1, 2, 5] : [1, 1.5, 2, 3, 5, 7], powers = Math.max(Math.ceil(decades / 6), 1);
  for (let power = Math.floor(Math.log10(min)); power <= Math.ceil(Math.log10(max)); power++) {
    if (decades > 6 && power % powers) continue;
    for (const part of parts) if (part * 10 ** power >= min && part * 10 ** power <= max) ticks.push(part * 10 ** power);
  }
  return ticks;
}

// Evenly spaced ticks have as many digits as it takes to tell neighbours apart, and fit the axis.
function tickLabels(ticks) {
  const known = ticks.filter((tick) => tick != null), every = known[1] - known[0] || 1, span = known.at(-1) - known[0];
  const largest = Math.max(...known.map(Math.abs));
  const areEven = Math.abs(span - every * (known.length - 1)) < every / 2 && largest < 1e6;
  const options = { maximumFractionDigits: Math.min(Math.max(0, 1 + Math.ceil(-Math.log10(every) - 1e-9)), 20) };
  const small = (tick) => tick ? Number(tick.toPrecision(6)).toExponential() : "0";
  return ticks.map((tick) => tick == null ? "" : areEven && largest < 0.01 ? small(tick) : areEven ? tick.toLocaleString("en", options) : tick >= 1e5 ? tick.toExponential().replace("+", "") : number(tick));
}

const positive = (values) => values.map((value) => value != null && value > 0 ? value : null);
const middle = (low, high) => high.map((value, i) => value == null ? null : (value + low[i]) / 2);

// Lines {label, low?, high, colour, dash?, width?} as uPlot takes them; low and high differ only
// where a bucket of a long run holds several samples, and then a band shows the range.
function prepared({ name, title, axis, steps, lines }, log) {
  const isLoss = name.endsWith("loss"), label = labelOf(name), unit = /\((.*)\)$/.exec(label)?.[1];
  const series = [{ label: "step", value: (_, step) => step == null ? "" : step.toLocaleString("en") }];
  const data = [steps], bands = [], ready = (values) => log ? positive(values) : values;
  for (const line of lines) {
    const low = line.low ?? line.high;
    if (low.some((value, i) => value !== line.high[i])) {
      bands.push({ series: [series.length, series.length + 1], fill: line.colour + "33" });
      for (const edge of [line.high, low]) {
        series.push({ label: RANGE, stroke: "transparent", width: 0, points: { show: false }, spanGaps: true });
        data.push(ready(edge));
      }
    }
    if (line.bandOnly) continue;
    series.push({ label: line.label, stroke: line.colour, width: line.width ?? 2, dash: line.dash, spanGaps: true,
      points: { show: steps.length < 3 }, value: (_, value) => value == null ? "" : number(value) });
    data.push(ready(middle(low, line.high)));
  }
  const heading = title ?? label.replace(/ \(.*\)$/, ""), up = (axis ?? unit ?? label) + (log ? ", log scale" : "");
  return { heading, up, isLoss, isOne: lines.length === 1, series, data, bands, log, key: JSON.stringify([heading, series.map((one) => one.label), log, isDark()]) };
}

function chart(place, { heading, up, isLoss, isOne, series, data, bands, log, key }, marks, height = 250) {
  const box = element("div", null, isOne ? "chart one" : "chart");
  box.append(element("h3", heading));
  place.append(box);
  const plot = new uPlot({
    width: Math.max(box.clientWidth, 280), height, series, bands, padding: [24, 32, 0, 0],
    legend: { markers: { dash: (plot, index) => plot.series[index].dash?.length ? "dashed" : "solid" } },
    cursor: { dataIdx: nearest, sync: { key: "steps", setSeries: false }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: (plot) => visibleRange(plot, log, isLoss) } },
    axes: [
      { ...axisColours("optimizer step"), space: 58, size: 28, values: (_, ticks) => ticks.map((tick) => Number.isInteger(tick) ? tick.toLocaleString("en") : "") },
      { ...axisColours(up), size: 62, ...(log ? { splits: logTicks, filter: (_, ticks) => ticks, incrs: [1e300] } : {}), values: (_, ticks) => tickLabels(ticks) },
    ],
    plugins: [eventMarks(marks), wheelAndPan()],
  }, data, box);
  for (const row of box.querySelectorAll(".u-legend .u-series")) {
    if (row.querySelector(".u-label").textContent === RANGE) row.style.display = "none";
  }
  return { plot, key, box };
}

// Where only data has changed a chart keeps its element, and in any case its zoom.
function drawCharts(place, wanted, marks, height) {
  const kept = place.charts ?? [], zoom = kept.map(({ plot }) => isZoomed(plot) ? { ...plot.scales.x } : null).find(Boolean);
  const drawn = wanted.map((one) => {
    const next = prepared(one, view.log && !view.state.catalog[one.name].is_signed), old = kept.find((one) => one.key === next.key);
    if (!old) return chart(place, next, marks, height);
    old.plot.setData(next.data, !zoom);
    place.append(old.box);
    return old;
  });
  for (const old of kept) if (!drawn.includes(old)) { old.plot.destroy(); old.box.remove(); }
  if (zoom) for (const { plot } of drawn) plot.setScale("x", { min: zoom.min, max: zoom.max });
  place.charts = drawn;
}

// So that the next drawing makes all charts anew, as where their width has changed.
function forget(place) {
  for (const { plot, box } of place.charts ?? []) { plot.destroy(); box.remove(); }
  place.charts = [];
}

function isZoomed(plot) {
  const steps = plot.data[0], { min, max } = plot.scales.x;
  return steps.length > 1 && (min > steps[0] + 1e-9 || max < steps[steps.length - 1] - 1e-9);
}

const runCurve = (name) => ({ name, steps: view.state.steps, lines: [{ label: labelOf(name), ...view.state.run[name], colour: css("--ink"), width: 1.5 }] });

// An indicator as the page asks for it: the range of all heads, and those that matter most.
function curvesOf(name, found) {
  return { name, steps: found.steps, lines: [
    { low: found.typical_low, high: found.typical_high, colour: css("--context"), bandOnly: true },
    { label: "median head", high: found.typical, colour: css("--context"), width: 1 },
    ...found.heads.map(({ layer, head, low, high }, index) => ({ label: nameOf(layer, head), low, high, colour: lineColour(index), dash: DASHES[index] })) ] };
}

async function drawHead() {
  $("detail").hidden = !view.head;
  if (!view.head) return;
  const { layer, head } = view.head, found = await ask(`head?layer=${layer}&head=${head}`);
  $("detail-title").textContent = `${nameOf(layer, head)}  (${found.site})`;
  const alarms = found.events.filter((event) => event.kind === "alarm"), switched = found.events.filter((event) => event.kind === "switch");
  $("detail-note").textContent = alarms.length
    ? `First alarm at step ${alarms[0].step.toLocaleString("en")}: ${alarms[0].why.replace(/\.$/, "")}.` + (switched.length ? ` Switched to ${switched.at(-1).stabilizer} at step ${switched.at(-1).step.toLocaleString("en")}.` : "")
    : "No alarm. Coloured: this head; grey: the median head.";
  $("detail").marks = found.marks;
  drawCharts($("detail-charts"), Object.entries(found.indicators).map(([name, values]) => ({
    name, steps: found.steps, lines: [
      { label: "median head", high: values.typical, colour: css("--context"), width: 1 },
      { label: nameOf(layer, head), low: values.low, high: values.high, colour: lineColour(0) },
    ],
  })), () => $("detail").marks);
}

function listenToMap() {
  $("map").addEventListener("click", (event) => { const found = view.state?.layers && headAt(event); if (found) select(found); });
  $("map").addEventListener("mousemove", pointAt);
  $("map").addEventListener("mouseleave", () => { $("tip").hidden = true; });
  $("map").addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }, move = moves[event.key];
    if (!move || !view.state?.layers) return;
    event.preventDefault();
    const from = view.head ?? { layer: 0, head: 0 }, { layers, heads } = view.state;
    select({ layer: Math.min(Math.max(from.layer + move[0], 0), layers - 1), head: Math.min(Math.max(from.head + move[1], 0), heads - 1) });
  });
}

// The heads to watch at the step of the map.
function drawWorst() {
  const { worst, sites, map } = view.state;
  const alarmed = new Set(map.alarmed.map(String));
  // A head at its baseline is nothing to watch.
  const watched = worst.filter((head, place) => head.excess >= 1.5 || place < 3);
  $("worst").tBodies[0].replaceChildren(...watched.map((head) => {
    const row = element("tr", null, alarmed.has(`${head.layer},${head.head}`) ? "alarmed" : "");
    row.tabIndex = 0;
    row.append(element("td", nameOf(head.layer, head.head)), element("td", labelOf(head.indicator)),
      element("td", number(head.value), "number"), element("td", times(head.excess), "number"));
    row.title = sites[head.layer] ?? "";
    row.onclick = () => select({ layer: head.layer, head: head.head });
    row.onkeydown = (event) => event.key === "Enter" && row.onclick();
    return row;
  }));
}


// --- events ----------------------------------------------------------------------------------

// A switch of the whole model is one event for each attention module: those that differ in their heads alone are one line.
function together(events) {
  const lines = [];
  for (const event of events) {
    const before = lines.at(-1)?.[0];
    const alike = before && ["switch", "undo", "refusal"].includes(event.kind) && ["kind", "step", "stabilizer", "why"].every((key) => event[key] === before[key]);
    if (alike) lines.at(-1).push(event);
    else lines.push([event]);
  }
  return lines;
}

function where(line) {
  const [{ site, heads }] = line;
  if (line.length > 1) return `${line.length} attention modules, ${line.reduce((sum, event) => sum + event.heads.length, 0)} heads`;
  return site ? `${site}${heads.length ? `, head${heads.length > 1 ? "s" : ""} ${heads.join(", ")}` : ""}` : "the whole run";
}

function drawEvents(lines) {
  $("events").replaceChildren(...lines.map((line) => {
    const [event] = line, item = element("li", null, event.kind);
    const what = { alarm: `alarm: ${event.rule}`, switch: `switched to ${event.stabilizer}`, undo: "switched back", refusal: `not switched${event.stabilizer && ` to ${event.stabilizer}`}`, monitor_error: "error in the monitor" }[event.kind] ?? event.kind;
    item.append(element("b", `step ${event.step.toLocaleString("en")}`), document.createTextNode(` ${what}, ${where(line)}`), element("span", event.why));
    return item;
  }));
  if (!lines.length) $("events").append(element("li", "none so far"));
}
