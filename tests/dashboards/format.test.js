// The helpers of the pages' scripts. What is expected is written by hand.

const assert = require("node:assert/strict");
const fs = require("node:fs");
const path = require("node:path");
const { test } = require("node:test");
const vm = require("node:vm");

const FILE = path.join(__dirname, "../../guardbit/dashboards/web/format.js");
const format = vm.createContext({});
vm.runInContext(fs.readFileSync(FILE, "utf-8"), format);

// What comes from another context has other prototypes.
const plain = (value) => JSON.parse(JSON.stringify(value));
const equal = (got, wanted) => assert.deepEqual(plain(got), wanted);
const near = (got, wanted) => {
  assert.equal(got.length, wanted.length, `${got}`);
  got.forEach((value, i) => assert.ok(Math.abs(value / wanted[i] - 1) < 1e-12, `${got}`));
};

function table(name, rows) {
  test(name, () => {
    for (const [given, wanted] of rows) equal(format[name](...given), wanted);
  });
}

table("number", [
  [[null], "–"],
  [[0], "0"],
  [[1234.5], "1,230"],
  [[0.0012345], "0.001"],
  [[-12.345], "-12.3"],
  [[2.5e-5], "2.5e-5"],
  [[3e7], "3e7"],
  [[1e39], "∞"],
  [[-1e39], "−∞"],
]);

table("times", [
  [[null], "–"],
  [[1], "1.0 ×"],
  [[9.96], "10 ×"],
  [[12.3], "12 ×"],
  [[1000], "1000 ×"],
  [[1001], "> 1,000 ×"],
]);

table("ago", [
  [[0.4], "0 s ago"],
  [[89], "89 s ago"],
  [[90], "2 min ago"],
  [[5400], "2 h ago"],
  [[129600], "2 days ago"],
]);

const switched = (site, heads, step = 5) => (
  { kind: "switch", step, stabilizer: "row_max", why: "alarmed", site, heads }
);

test("a switch or refusal of several modules is one line, another step or kind is not", () => {
  const alarm = { kind: "alarm", step: 5, rule: "head_growth", site: "a", heads: [0], why: "" };
  const events = [alarm, { ...alarm }, switched("a", [0, 1]), switched("b", [2])];
  const refused = ["a", "b"].map((site) => ({ ...switched(site, [3], 6), kind: "refusal" }));
  const lines = format.linesOf([...events, switched("a", [0], 6), ...refused]);
  equal(lines.map((line) => line.length), [1, 1, 2, 1, 2]);
  equal(lines.map((line) => format.where(line)), [
    "a, head 0", "a, head 0", "2 attention modules, 3 heads", "a, head 0",
    "2 attention modules, 2 heads",
  ]);
  assert.equal(format.where([{ site: "", heads: [] }]), "the whole run");
  assert.equal(format.where([{ site: "a", heads: [1, 2] }]), "a, heads 1, 2");
});

table("whatHappened", [
  [[{ kind: "alarm", rule: "head_growth" }], "alarm: head_growth"],
  [[{ kind: "switch", stabilizer: "row_max" }], "switched to row_max"],
  [[{ kind: "undo", stabilizer: "none" }], "switched back"],
  [[{ kind: "refusal", stabilizer: "row_max" }], "not switched to row_max"],
  [[{ kind: "refusal", stabilizer: "" }], "not switched"],
  [[{ kind: "monitor_error" }], "error in the monitor"],
  [[{ kind: "advisory" }], "advisory"],
]);

const written = { problem: "", samples: true, is_reading: false, folder: "f", end: null, seconds_silent: 3 };

table("statusOf", [
  [[written], ["alive", "last written 3 s ago"]],
  [[{ ...written, seconds_silent: 121 }],
    ["silent", "nothing new: last written 2 min ago; the run hangs or was killed"]],
  [[{ ...written, end: "crashed" }], ["crashed", "the run has crashed, 3 s ago"]],
  [[{ ...written, end: "finished", seconds_silent: 600 }],
    ["finished", "the run has finished, 10 min ago"]],
  [[{ ...written, end: "interrupted" }], ["interrupted", "the run was interrupted, 3 s ago"]],
  [[{ ...written, is_reading: true }], ["alive", "reading"]],
  [[{ ...written, samples: false }], ["waiting", "waiting for the run’s first sample in f"]],
  [[{ ...written, problem: "gone" }], ["lost", "cannot read the run: gone"]],
]);

table("stateOf", [
  [[{ seconds_silent: 3 }], ["alive", "running", "last written 3 s ago"]],
  [[{ seconds_silent: 200 }],
    ["silent", "silent", "last written 3 min ago; it hangs or was killed"]],
  [[{ seconds_silent: 200, end: "finished" }], ["finished", "finished", "3 min ago"]],
  [[{ seconds_silent: 0, problem: "gone" }], ["lost", "cannot be read", "gone"]],
]);

table("alarmsOf", [
  [[{ first_alarm: null }], ""],
  [[{ first_alarm: { step: 1200, site: "a", heads: [3] }, alarms: 1 }],
    "first alarm at step 1,200: a, head 3"],
  [[{ first_alarm: { step: 7, site: "", heads: [] }, alarms: 3 }],
    "first alarm at step 7: the whole run, and 2 more"],
]);

table("smoothed", [
  [[[1, 9, 2], 0], [1, 9, 2]],
  [[[1, 9, 2, 3, 4], 1], [9, 2, 3, 3, 4]],
  [[[1, null, 2, 8, 3], 1], [1, null, 8, 3, 8]],
]);

test("runs with steps of their own lie on one axis", () => {
  const one = { steps: [0, 10], lines: { loss: [3, 2] } };
  const other = { steps: [5, 10], lines: { loss: [4, 1] } };
  equal(format.onOneAxis([one, other, { steps: [7], lines: {} }], "loss", 0), {
    steps: [0, 5, 10],
    columns: [[3, null, 2], [null, 4, 1], [null, null, null]],
  });
});

table("nearestIndex", [
  [[[0, 10, 20], 14], 1],
  [[[0, 10, 20], 999], 2],
  [[[0, 10, 20], 5], 0],
]);

test("a range holds the values in view, from 0 where that is near", () => {
  const steps = [0, 1, 2, 3];
  near(format.rangeOf(steps, [[1, 5, 7, 100]], 1, 2, false), [5 - 0.12, 7 + 0.12]);
  near(format.rangeOf(steps, [[1, 4, 10, 100]], 1, 2, false).slice(1), [10 + 0.36]);
  assert.equal(format.rangeOf(steps, [[1, 4, 10, 100]], 1, 2, false)[0], 0);
  near(format.rangeOf(steps, [[1, null, 2, 3], [8, 8, 8, 8]], 0, 3, true), [1 / 1.15, 8 * 1.15]);
  equal(format.rangeOf(steps, [[null, null, 2, 3]], 0, 1, true), [1, 10]);
  near(format.rangeOf(steps, [[2, 2, 2, 2]], 0, 3, false), [2 - 0.12, 2 + 0.12]);
});

test("a small line leaves out what lies far above the rest", () => {
  const losses = [90, 2, 1.5, 1, 1, 1, 1, 1, 1, null, 1, 1.2];
  const points = plain(format.sparkPoints(losses, 110, 20));
  assert.deepEqual(points.map(([x]) => x), [0, 10, 20, 30, 40, 50, 60, 70, 80, 100, 110]);
  assert.deepEqual(points.map(([, y]) => y), [0, 0, 10, 20, 20, 20, 20, 20, 20, 20, 16]);
  equal(format.sparkPoints([3, 3], 80, 24), [[0, 12], [80, 12]]);
  equal(format.sparkPoints([3], 80, 24), [[80, 12]]);
  equal(format.sparkPoints([], 80, 24), []);
});

test("ticks of a log axis are few and round", () => {
  near(format.logTicks(1, 2), [1, 1.25, 1.5, 1.75, 2]);
  near(format.logTicks(1, 10), [1, 1.5, 2, 3, 5, 7, 10]);
  near(format.logTicks(1, 50), [1, 2, 5, 10, 20, 50]);
  near(format.logTicks(1, 1000), [1, 3, 10, 30, 100, 300, 1000]);
  near(format.logTicks(1, 1e5), [1, 10, 100, 1e3, 1e4, 1e5]);
  assert.ok(format.logTicks(1e-30, 1e30).length < 10);
});

table("tickLabels", [
  [[[0, 0.5, 1]], ["0", "0.5", "1"]],
  [[[1000, 1500, 2000]], ["1,000", "1,500", "2,000"]],
  [[[0, 0.001, 0.002]], ["0", "1e-3", "2e-3"]],
  [[[1, 10, null, 100000]], ["1", "10", "", "1e5"]],
]);

table("rampColour", [
  [[["#000000", "#ffffff"], 0], "rgb(0,0,0)"],
  [[["#000000", "#ffffff"], 7], "rgb(255,255,255)"],
  [[["#000000", "#102030", "#ffffff"], 0.25], "rgb(8,16,24)"],
]);
