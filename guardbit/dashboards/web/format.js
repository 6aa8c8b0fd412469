"use strict";
// Words, numbers, ticks and ranges: functions of their arguments alone, which node tests.

const SILENT_AFTER_SECONDS = 120;

// --- numbers ---------------------------------------------------------------------------------

// Three significant digits, without an exponent where that stays short.
function number(x) {
  if (x == null) return "–";
  if (Math.abs(x) > 3.4e38) return x < 0 ? "−∞" : "∞";
  if (x === 0 || (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e6)) {
    return Number(x.toPrecision(3)).toLocaleString("en");
  }
  return x.toExponential(1).replace(/(\.0)?e\+?/, "e");
}

// An excess as a factor; beyond 1,000 its size says nothing more.
function times(x) {
  if (x == null) return "–";
  if (x > 1000) return "> 1,000 ×";
  return `${x < 10 ? x.toPrecision(2) : Math.round(x)} ×`;
}

function stepText(step) {
  return step.toLocaleString("en");
}

function ago(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

// --- events ----------------------------------------------------------------------------------

// A switch of the whole model is one event for each attention module: events that differ in their
// heads alone become one line.
function linesOf(events) {
  const lines = [];
  for (const event of events) {
    const before = lines.at(-1)?.[0];
    const isOfMany = ["switch", "undo", "refusal"].includes(event.kind);
    const same = ["kind", "step", "stabilizer", "why"];
    if (before && isOfMany && same.every((key) => event[key] === before[key])) {
      lines.at(-1).push(event);
    } else {
      lines.push([event]);
    }
  }
  return lines;
}

function where(line) {
  const [{ site, heads }] = line;
  if (line.length > 1) {
    const count = line.reduce((sum, event) => sum + event.heads.length, 0);
    return `${line.length} attention modules, ${count} heads`;
  }
  if (!site) return "the whole run";
  if (!heads.length) return site;
  return `${site}, head${heads.length > 1 ? "s" : ""} ${heads.join(", ")}`;
}

function whatHappened({ kind, rule, stabilizer }) {
  if (kind === "alarm") return `alarm: ${rule}`;
  if (kind === "switch") return `switched to ${stabilizer}`;
  if (kind === "undo") return "switched back";
  if (kind === "refusal") return `not switched${stabilizer && ` to ${stabilizer}`}`;
  if (kind === "monitor_error") return "error in the monitor";
  return kind;
}

// --- how a run is doing ----------------------------------------------------------------------

// Kind, text and details of a run's state in the list: how it ended, or whether it still writes.
function stateOf(run) {
  if (run.problem) return ["lost", "cannot be read", run.problem];
  if (run.end) return [run.end, run.end, ago(run.seconds_silent)];
  const written = `last written ${ago(run.seconds_silent)}`;
  if (run.seconds_silent > SILENT_AFTER_SECONDS) {
    return ["silent", "silent", `${written}; it hangs or was killed`];
  }
  return ["alive", "running", written];
}

// Kind and text of the status of a page.
function statusOf({ problem, samples, is_reading, folder, end, seconds_silent }) {
  const silent = seconds_silent ?? 0;
  const ends = {
    finished: "the run has finished",
    interrupted: "the run was interrupted",
    crashed: "the run has crashed",
  };
  if (problem) return ["lost", `cannot read the run: ${problem}`];
  if (is_reading) return ["alive", "reading"];
  if (!samples) return ["waiting", `waiting for the run’s first sample in ${folder}`];
  if (end) return [end, `${ends[end] ?? "the run has ended"}, ${ago(silent)}`];
  const written = `last written ${ago(silent)}`;
  if (silent > SILENT_AFTER_SECONDS) {
    return ["silent", `nothing new: ${written}; the run hangs or was killed`];
  }
  return ["alive", written];
}

function alarmsOf(run) {
  const { first_alarm: first, alarms } = run;
  if (!first) return "";
  const more = alarms > 1 ? `, and ${alarms - 1} more` : "";
  return `first alarm at step ${stepText(first.step)}: ${where([first])}${more}`;
}

// --- curves ----------------------------------------------------------------------------------

// A running median over `width` points on either side: one bad batch does not bend it.
function smoothed(values, width) {
  if (!width) return values;
  return values.map((value, at) => {
    if (value == null) return null;
    const near = values.slice(Math.max(at - width, 0), at + width + 1);
    const known = near.filter((one) => one != null).sort((a, b) => a - b);
    return known[known.length >> 1];
  });
}

// Runs have steps of their own: all of them on one axis, each line with its own points.
function onOneAxis(runs, name, width) {
  const at = new Map();
  runs.forEach((run, index) => {
    if (!run.lines[name]) return;
    const values = smoothed(run.lines[name], width);
    run.steps.forEach((step, point) => {
      if (values[point] == null) return;
      if (!at.has(step)) at.set(step, Array(runs.length).fill(null));
      at.get(step)[index] = values[point];
    });
  });
  const steps = [...at.keys()].sort((a, b) => a - b);
  return { steps, columns: runs.map((_, index) => steps.map((step) => at.get(step)[index])) };
}

function nearestIndex(steps, wanted) {
  let found = 0;
  steps.forEach((step, index) => {
    if (Math.abs(step - wanted) < Math.abs(steps[found] - wanted)) found = index;
  });
  return found;
}

// The range of the values between two steps, with some room around them.
function rangeOf(steps, lines, from, to, isLog) {
  let low = Infinity;
  let high = -Infinity;
  for (const values of lines) {
    values.forEach((value, index) => {
      if (value == null || steps[index] < from || steps[index] > to) return;
      low = Math.min(low, value);
      high = Math.max(high, value);
    });
  }
  if (low > high) return isLog ? [1, 10] : [0, 1];
  if (isLog) return [low / 1.15, high * 1.15];
  const span = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low < high / 2 ? 0 : low - span, high + span];
}

// Points [x, y] of a small line in a box, y downwards. A tenth of the values lies above it: a run
// begins far above all that it comes to.
function sparkPoints(values, width, height) {
  const known = values.filter((value) => value != null).sort((a, b) => a - b);
  const low = known[0];
  const high = known[Math.floor(0.9 * (known.length - 1))];
  const place = (value) => high > low ? Math.min((value - low) / (high - low), 1) : 0.5;
  return values.flatMap((value, at) => {
    if (value == null) return [];
    const x = values.length > 1 ? (at / (values.length - 1)) * width : width;
    return [[Math.round(x), Math.round((1 - place(value)) * height)]];
  });
}

// A few round numbers of a log axis: more would be grey stripes. Within half a decade they are
// evenly spaced.
function logTicks(min, max) {
  const decades = Math.log10(max / min);
  const ticks = [];
  if (decades < 0.5) {
    const power = 10 ** Math.floor(Math.log10((max - min) / 3));
    const every = [5, 2.5, 2, 1].find((part) => part * power * 3 <= max - min) * power;
    for (let tick = Math.ceil(min / every); tick * every <= max; tick++) ticks.push(tick * every);
    return ticks;
  }
  let parts = [1, 1.5, 2, 3, 5, 7];
  if (decades > 1.3) parts = [1, 2, 5];
  if (decades > 2) parts = [1, 3];
  if (decades > 4) parts = [1];
  const powers = Math.max(Math.ceil(decades / 6), 1);
  for (let power = Math.floor(Math.log10(min)); power <= Math.ceil(Math.log10(max)); power++) {
    if (decades > 6 && power % powers) continue;
    for (const part of parts) {
      const tick = part * 10 ** power;
      if (tick >= min && tick <= max) ticks.push(tick);
    }
  }
  return ticks;
}

// Evenly spaced ticks have as many digits as it takes to tell neighbours apart, and fit the axis.
function tickLabels(ticks) {
  const known = ticks.filter((tick) => tick != null);
  const every = known[1] - known[0] || 1;
  const span = known.at(-1) - known[0];
  const largest = Math.max(...known.map(Math.abs));
  const areEven = Math.abs(span - every * (known.length - 1)) < every / 2 && largest < 1e6;
  const digits = Math.max(0, 1 + Math.ceil(-Math.log10(every) - 1e-9));
  return ticks.map((tick) => {
    if (tick == null) return "";
    if (areEven && largest < 0.01) {
      return tick ? Number(tick.toPrecision(6)).toExponential() : "0";
    }
    if (areEven) return tick.toLocaleString("en", { maximumFractionDigits: Math.min(digits, 20) });
    return tick >= 1e5 ? tick.toExponential().replace("+", "") : number(tick);
  });
}

// --- colours ---------------------------------------------------------------------------------

// The colour between the stops "#rrggbb" of a ramp, at a place from 0 to 1.
function rampColour(stops, place) {
  const at = Math.min(Math.max(place, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  const part = at - low;
  const channel = (stop, i) => parseInt(stops[stop].slice(1 + 2 * i, 3 + 2 * i), 16);
  const mixed = [0, 1, 2].map((i) => channel(low, i) * (1 - part) + channel(low + 1, i) * part);
  return `rgb(${mixed.map(Math.round)})`;
}
