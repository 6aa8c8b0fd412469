// What pages draw: the model map, and curves with their marks. A page has `view`, which holds its
// state and whether scales are logarithmic. Text that comes from the run only ever becomes text,
// never markup.

const FONT = "system-ui, sans-serif";
// Sign, height above the chart in pixels, dashes of the line, and meaning of each mark.
const MARKS = {
  alarm: { sign: "▼", height: 0, dash: [5, 4], meaning: "first alarm of a head" },
  switch: { sign: "◆", height: 11, dash: [], meaning: "switch" },
  undo: { sign: "◇", height: 11, dash: [2, 3], meaning: "switched back" },
  departed: { sign: "✕", height: 11, dash: [], meaning: "the loss diverged" },
};
const MOST_MARKED_LINES = 8;
const DASHES = [[], [8, 4], [8, 3, 2, 3]];
// The label of a band's edges, which no legend shows.
const RANGE = "range";
const CHART_HEIGHT = 250;

const $ = (id) => document.getElementById(id);
const labelOf = (indicator) => view.state.catalog[indicator].label;
const nameOf = (layer, head) => `layer ${layer}, head ${head}`;
// Colours are those of the page's theme.
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => css("--theme") === "dark";
const lineColour = (index) => css(`--highlight-${index}`);
const colourOfRun = (run) => run < DASHES.length ? lineColour(run) : css("--ink");

function element(tag, text, kind) {
  const made = document.createElement(tag);
  if (text != null) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

// --- the model map ---------------------------------------------------------------------------

function heatOf(excess) {
  const { heat, heat_dark: heatDark, most } = view.state.palette;
  return rampColour(isDark() ? heatDark : heat, Math.log(excess) / Math.log(most));
}

// Where cells lie: the first at `left` and `top`, layers upwards.
function geometry() {
  const { layers, heads } = view.state;
  const left = 34;
  const width = $("map").parentElement.clientWidth - left;
  const cell = {
    width: Math.max(Math.min(Math.floor(width / heads), 64), 4),
    height: Math.max(Math.min(Math.floor(560 / layers), 40), 6),
  };
  return { left, top: 1, bottom: 20, cell, layers, heads };
}

function drawMap() {
  const { map } = view.state;
  const { left, top, bottom, cell, layers, heads } = geometry();
  const canvas = $("map");
  const width = left + heads * cell.width;
  const height = layers * cell.height + bottom + 2 * top;
  const dots = window.devicePixelRatio || 1;
  canvas.width = width * dots;
  canvas.height = height * dots;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(dots, dots);
  const gap = Math.min(cell.width, cell.height) > 8 ? 1 : 0.5;
  const at = (layer, head) => [left + head * cell.width, top + (layers - 1 - layer) * cell.height];

  map.excess.forEach((excess, index) => {
    if (excess == null) return;
    const [x, y] = at(Math.floor(index / heads), index % heads);
    pen.fillStyle = heatOf(excess);
    pen.fillRect(x, y, cell.width - gap, cell.height - gap);
  });

  pen.strokeStyle = css("--ink");
  pen.lineWidth = 2;
  for (const [layer, head] of map.alarmed) {
    const [x, y] = at(layer, head);
    pen.strokeRect(x - gap / 2, y - gap / 2, cell.width, cell.height);
  }

  pen.fillStyle = css("--paper");
  pen.lineWidth = 1;
  for (const [layer, head] of map.stabilized) {
    const [x, y] = at(layer, head);
    const radius = Math.max(Math.min(cell.width, cell.height) / 12, 1.5);
    pen.beginPath();
    pen.arc(x + cell.width / 2, y + cell.height / 2, radius, 0, 2 * Math.PI);
    pen.fill();
    pen.stroke();
  }

  if (view.head) {
    const [x, y] = at(view.head.layer, view.head.head);
    pen.strokeStyle = lineColour(1);
    pen.lineWidth = 3;
    pen.strokeRect(x - 1.5, y - 1.5, cell.width + 2, cell.height + 2);
  }

  pen.fillStyle = css("--quiet");
  pen.font = `11px ${FONT}`;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (let layer = 0; layer < layers; layer += Math.ceil(14 / cell.height)) {
    pen.fillText(layer, left - 6, at(layer, 0)[1] + cell.height / 2);
  }
  pen.textAlign = "center";
  pen.textBaseline = "top";
  for (let head = 0; head < heads; head += Math.ceil(24 / cell.width)) {
    pen.fillText(head, at(0, head)[0] + cell.width / 2, height - bottom + 5);
  }

  canvas.dataset.cells = map.excess.filter((excess) => excess != null).length;
  const size = `${layers} layers of ${heads} heads`;
  canvas.setAttribute("aria-label", `Model map at step ${map.step}: ${size}`);
  $("map-step").textContent = map.step < 0 ? "" : `at step ${stepText(map.step)}`;
}

function drawRamp() {
  const pen = $("ramp").getContext("2d");
  const { width } = $("ramp");
  const { most } = view.state.palette;
  for (let x = 0; x < width; x++) {
    pen.fillStyle = heatOf(Math.pow(most, x / (width - 1)));
    pen.fillRect(x, 0, 1, 10);
  }
  $("ramp-labels").textContent = `1 × to ${most} × its baseline or more; blank: not measured`;
}

function headAt(event) {
  if (!view.state?.layers) return null;
  const { left, top, cell, layers, heads } = geometry();
  const box = $("map").getBoundingClientRect();
  const head = Math.floor((event.clientX - box.left - left) / cell.width);
  const layer = layers - 1 - Math.floor((event.clientY - box.top - top) / cell.height);
  const isCell = head >= 0 && head < heads && layer >= 0 && layer < layers;
  return isCell ? { layer, head } : null;
}

function pointAt(event) {
  const found = headAt(event);
  const tip = $("tip");
  tip.hidden = !found;
  if (!found) return;
  const { map, heads } = view.state;
  const index = found.layer * heads + found.head;
  const excess = map.excess[index];
  const said = excess == null
    ? "not measured"
    : `${times(excess)} its baseline (${labelOf(map.names[map.which[index]])})`;
  tip.textContent = `${nameOf(found.layer, found.head)}: ${said}`;
  const box = $("map").parentElement.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX - box.left + 14, Math.max(box.width - 330, 0))}px`;
  tip.style.top = `${event.clientY - box.top + 16}px`;
}

// --- marks -----------------------------------------------------------------------------------

// Where a page has several runs, marks have the colour of their run.
function colourOfMark({ kind, run }) {
  if (run != null) return colourOfRun(run);
  return css(kind === "departed" ? "--bad" : "--ink");
}

// What the signs in use stand for.
function drawKey(marks) {
  const used = new Set(marks.map(({ kind }) => kind));
  const kinds = Object.keys(MARKS).filter((kind) => used.has(kind));
  const meanings = kinds.map((kind) => `${MARKS[kind].sign}\u00a0${MARKS[kind].meaning}`);
  $("key").textContent = meanings.join(" · ");
}

// The same marks as in the figures: a line at the step, a sign above the panel, as long as signs of
// one kind do not touch.
function eventMarks(marks) {
  const draw = (plot) => {
    const pen = plot.ctx;
    const dots = window.devicePixelRatio || 1;
    const { top, height } = plot.bbox;
    const { min, max } = plot.scales.x;
    const last = {};
    let lines = 0;
    plot.drawnMarks = [];
    pen.save();
    pen.lineWidth = dots;
    pen.textAlign = "center";
    pen.textBaseline = "bottom";
    for (const mark of marks()) {
      const { kind, step, run } = mark;
      const { sign, height: above, dash } = MARKS[kind];
      const row = `${kind}${run ?? ""}`;
      if (step < min || step > max) continue;
      const x = plot.valToPos(step, "x", true);
      if (x - (last[row] ?? -Infinity) < 9 * dots) continue;
      last[row] = x;
      pen.strokeStyle = pen.fillStyle = colourOfMark(mark);
      lines += 1;
      if (lines <= MOST_MARKED_LINES || kind === "departed") {
        pen.setLineDash(dash.map((length) => length * dots));
        pen.beginPath();
        pen.moveTo(x, top);
        pen.lineTo(x, top + height);
        pen.stroke();
      }
      pen.font = kind === "departed" ? `bold ${14 * dots}px ${FONT}` : `${11 * dots}px ${FONT}`;
      pen.fillText(sign, x, top - above * dots);
      plot.drawnMarks.push({ kind, step });
    }
    pen.restore();
  };
  return { hooks: { draw: [draw] } };
}

// --- how a chart looks and moves -------------------------------------------------------------

// Ctrl + wheel zooms (the wheel alone scrolls the page), shift + drag pans; dragging alone zooms
// into what was dragged over (uPlot's own).
function wheelAndPan() {
  const zoom = (plot, event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const { min, max } = plot.scales.x;
    const middle = plot.posToVal(event.offsetX, "x");
    const factor = event.deltaY < 0 ? 0.8 : 1.25;
    const edges = { min: middle - (middle - min) * factor, max: middle + (max - middle) * factor };
    plot.setScale("x", edges);
  };
  const pan = (plot, event) => {
    if (!event.shiftKey) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    const { min, max } = plot.scales.x;
    const perPixel = (max - min) / plot.over.clientWidth;
    const move = (moved) => {
      const by = (moved.clientX - event.clientX) * perPixel;
      plot.setScale("x", { min: min - by, max: max - by });
    };
    const up = () => {
      document.removeEventListener("mousemove", move);
      document.removeEventListener("mouseup", up);
    };
    document.addEventListener("mousemove", move);
    document.addEventListener("mouseup", up);
  };
  const ready = (plot) => {
    plot.over.addEventListener("wheel", (event) => zoom(plot, event), { passive: false });
    plot.over.addEventListener("mousedown", (event) => pan(plot, event), true);
  };
  return { hooks: { ready: [ready] } };
}

// Indicators are sampled at steps of their own: each line shows its sample nearest to the pointer,
// and the step is the nearest at which any line of the chart has one.
function nearest(plot, series, hovered, at) {
  const [steps, ...lines] = plot.data;
  const shown = series > 0 ? [plot.data[series]] : lines;
  const has = (index) => shown.some((values) => values[index] != null);
  const distance = (index) => Math.abs(steps[index] - at);
  let found = hovered;
  for (let index = 0; index < steps.length; index++) {
    if (has(index) && (!has(found) || distance(index) < distance(found))) found = index;
  }
  return found;
}

// The range of the values in view. What comes after the loss has diverged is no measure of heads:
// one that exploded would press all else flat. A loss is measured once it has left that of an
// untrained model.
function visibleRange(plot, isLog, isLoss) {
  const [steps, ...lines] = plot.data;
  let from = plot.scales.x.min ?? steps[0];
  let to = plot.scales.x.max ?? steps.at(-1);
  if (isLoss && steps.length >= 20 && from <= steps[0]) {
    from = Math.min(steps[Math.floor(steps.length / 10)], to);
  }
  const departed = view.state?.departed ?? Infinity;
  if (!isLoss && departed > from) to = Math.min(to, departed);
  return rangeOf(steps, lines, from, to, isLog);
}

function axisOf(label) {
  const lines = { stroke: css("--line"), width: 1 };
  const font = `12px ${FONT}`;
  const stroke = css("--quiet");
  return { label, labelSize: 18, labelGap: 2, labelFont: font, stroke, grid: lines, ticks: lines };
}

function stepAxis() {
  const values = (_, ticks) => ticks.map((tick) => Number.isInteger(tick) ? stepText(tick) : "");
  return { ...axisOf("optimizer step"), space: 58, size: 28, values };
}

function valueAxis(label, isLog) {
  const axis = { ...axisOf(label), size: 62, values: (_, ticks) => tickLabels(ticks) };
  if (!isLog) return axis;
  const splits = (plot, _, min, max) => logTicks(min, max);
  // uPlot hides an axis longer than its own increments, which end at 1e32: hence one that fits any.
  return { ...axis, splits, filter: (_, ticks) => ticks, incrs: [1e300] };
}

// --- charts ----------------------------------------------------------------------------------

// A curve of the whole run.
function runCurve(name) {
  const { steps, run } = view.state;
  const line = { label: labelOf(name), ...run[name], colour: css("--ink"), width: 1.5 };
  return { name, steps, lines: [line] };
}

// An indicator of heads: the range of all, and those that matter most.
function curvesOf(name, found) {
  const grey = css("--context");
  const heads = found.heads.map(({ layer, head, low, high }, index) => (
    { label: nameOf(layer, head), low, high, colour: lineColour(index), dash: DASHES[index] }
  ));
  const lines = [
    { low: found.typical_low, high: found.typical_high, colour: grey, isBand: true },
    { label: "median head", high: found.typical, colour: grey, width: 1 },
    ...heads,
  ];
  return { name, steps: found.steps, lines };
}

const positive = (values) => values.map((value) => value != null && value > 0 ? value : null);
const middle = (low, high) => high.map((value, i) => value == null ? null : (value + low[i]) / 2);
const textOf = (show) => (_, value) => value == null ? "" : show(value);

// Lines {label, low?, high, colour, dash?, width?} as uPlot takes them; low and high differ only
// where a bucket of a long run holds several samples, and then a band shows the range.
function prepared({ name, title, axis, steps, lines }, isLog) {
  const ready = (values) => isLog ? positive(values) : values;
  const series = [{ label: "step", value: textOf(stepText) }];
  const data = [steps];
  const bands = [];
  for (const line of lines) {
    const low = line.low ?? line.high;
    if (low.some((value, i) => value !== line.high[i])) {
      bands.push({ series: [series.length, series.length + 1], fill: `${line.colour}33` });
      for (const edge of [line.high, low]) {
        const unseen = { stroke: "transparent", width: 0, points: { show: false } };
        series.push({ label: RANGE, ...unseen, spanGaps: true });
        data.push(ready(edge));
      }
    }
    if (line.isBand) continue;
    series.push({
      label: line.label,
      stroke: line.colour,
      width: line.width ?? 2,
      dash: line.dash,
      spanGaps: true,
      points: { show: steps.length < 3 },
      value: textOf(number),
    });
    data.push(ready(middle(low, line.high)));
  }
  const label = title ?? labelOf(name);
  const unit = /\((.*)\)$/.exec(label)?.[1];
  const heading = label.replace(/ \(.*\)$/, "");
  return {
    heading,
    // The heading above has the name.
    up: [axis ?? unit, isLog ? "log scale" : null].filter(Boolean).join(", "),
    isLoss: name.endsWith("loss"),
    isOne: lines.length === 1,
    isLog,
    series,
    data,
    bands,
    key: JSON.stringify([heading, series.map((one) => one.label), isLog, isDark()]),
  };
}

function chart(place, wanted, marks) {
  const { heading, up, isLoss, isOne, isLog, series, data, bands, key } = wanted;
  const box = element("div", null, isOne ? "chart one" : "chart");
  box.append(element("h3", heading));
  place.append(box);
  const dashOf = (plot, index) => plot.series[index].dash?.length ? "dashed" : "solid";
  const plot = new uPlot({
    width: Math.max(box.clientWidth, 280),
    height: CHART_HEIGHT,
    series,
    bands,
    padding: [24, 32, 0, 0],
    legend: { markers: { dash: dashOf } },
    cursor: {
      dataIdx: nearest,
      sync: { key: "steps", setSeries: false },
      drag: { x: true, y: false },
    },
    scales: {
      x: { time: false },
      y: { distr: isLog ? 3 : 1, range: (plot) => visibleRange(plot, isLog, isLoss) },
    },
    axes: [stepAxis(), valueAxis(up, isLog)],
    plugins: [eventMarks(marks), wheelAndPan()],
  }, data, box);
  for (const row of box.querySelectorAll(".u-legend .u-series")) {
    if (row.querySelector(".u-label").textContent === RANGE) row.style.display = "none";
  }
  return { plot, key, box };
}

// Where only data has changed a chart keeps its element, and in any case its zoom.
function drawCharts(place, wanted, marks) {
  const kept = place.charts ?? [];
  const zoomed = kept.find(({ plot }) => isZoomed(plot));
  const zoom = zoomed && { min: zoomed.plot.scales.x.min, max: zoomed.plot.scales.x.max };
  const drawn = wanted.map((one) => {
    const next = prepared(one, view.log && !view.state?.catalog[one.name].is_signed);
    const old = kept.find(({ key }) => key === next.key);
    if (!old) return chart(place, next, marks);
    old.plot.setData(next.data, !zoom);
    place.append(old.box);
    return old;
  });
  remove(kept.filter((old) => !drawn.includes(old)));
  if (zoom) for (const { plot } of drawn) plot.setScale("x", zoom);
  place.charts = drawn;
}

function remove(charts) {
  for (const { plot, box } of charts) {
    plot.destroy();
    box.remove();
  }
}

// So that the next drawing makes all charts anew, as where their width has changed.
function forget(place) {
  remove(place.charts ?? []);
  place.charts = [];
}

function isZoomed(plot) {
  const [steps] = plot.data;
  const { min, max } = plot.scales.x;
  return steps.length > 1 && (min > steps[0] + 1e-9 || max < steps.at(-1) - 1e-9);
}

// --- runs over one another -------------------------------------------------------------------

// One line a run. Overlays are [indicator, title, label of the axis]; runs have `lines` of them.
function drawOverlays(overlays, runs, smoothing = 0) {
  const wanted = [];
  for (const [name, title, axis] of overlays) {
    const { steps, columns } = onOneAxis(runs, name, smoothing);
    const lines = runs.map((run, at) => (
      { label: run.name, high: columns[at], colour: colourOfRun(at), dash: DASHES[at] ?? [2, 3] }
    ));
    const drawn = lines.filter((_, at) => runs[at].lines[name]);
    if (steps.length) wanted.push({ name, title, axis, steps, lines: drawn });
  }
  const marks = runs.flatMap((run, at) => run.marks.map((mark) => ({ ...mark, run: at })));
  drawKey(marks);
  $("overlays").marks = marks;
  drawCharts($("overlays"), wanted, () => $("overlays").marks);
  return wanted.length;
}
