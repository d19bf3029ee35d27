// Four charts with the same time axis. A sample is [at, accepted per second, p50, p95, in flight, lag, is paused].
// The lag is in bytes, or in records of a group member.

const SPANS = [[300, 60], [900, 180], [1800, 300]]; // seconds of the axis, and between its ticks
const LONGEST_SECONDS = 1800;
const GAP_SECONDS = 7;
const STEP_SECONDS = 2;
const CLOCK_STEP_SECONDS = 300;
const FRAME = { top: 10, right: 10, bottom: 22, left: 52, height: 168 };
const CHARTS = [
  { title: "Throughput", unit: (value) => `${short(value)}/s`, least: 9, lines: [["accepted", 1, "c0"]] },
  { title: "Latency", unit: latency, least: 0.009, lines: [["p50", 2, "c0"], ["p95", 3, "c3"]] },
  { title: "Requests in flight", unit: short, least: 3, lines: [["in flight", 4, "c2"]] },
  { title: "Lag", unit: bytes, least: 900, lines: [["lag", 5, "c1"]] },
];

let samples = [];
let pointedAt = null;
let [span, between] = SPANS[SPANS.length - 1];

/** Add samples; if the clock was set back, drop those that are now in the future. */
function addSamples(more, now) {
  const fresh = list(more).filter((sample) => Array.isArray(sample) && isTime(sample[0]));
  const latest = isTime(now) ? now + CLOCK_STEP_SECONDS : Infinity;
  const valid = [...samples, ...fresh].filter((sample) => sample[0] <= latest);
  samples = valid.filter((sample) => sample[0] >= endOfAxis(valid, now) - LONGEST_SECONDS);
}

function endOfAxis(points, now) {
  return Math.max(isTime(now) ? now : 0, points.length ? points[points.length - 1][0] : 0);
}

function makeCharts() {
  for (const chart of CHARTS) {
    chart.svg = svg("svg", { role: "img", tabindex: "0" });
    chart.readout = el("p", { class: "readout" });
    const head = el("div", { class: "charthead" }, el("h3", {}, chart.title), chart.readout);
    document.getElementById("charts").append(el("div", { class: "panel chart" }, head, chart.svg));
    for (const name of ["pointermove", "pointerdown"]) {
      chart.svg.addEventListener(name, (event) => point(timeUnder(chart, event.clientX)));
    }
    for (const name of ["pointerleave", "blur"]) chart.svg.addEventListener(name, () => point(null));
    chart.svg.addEventListener("keydown", step);
  }
}

function timeUnder(chart, clientX) {
  const box = chart.svg.getBoundingClientRect();
  const share = ((clientX - box.left) / box.width) * chart.width;
  const at = chart.start + ((share - FRAME.left) / (chart.width - FRAME.left - FRAME.right)) * span;
  return Math.min(Math.max(at, chart.start), chart.start + span);
}

/** Move along the samples with the keyboard. */
function step(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30, Home: -Infinity, End: Infinity }[event.key];
  if (event.key === "Escape") point(null);
  if (by === undefined || !samples.length) return;
  event.preventDefault();
  const from = pointedAt === null ? samples.length : samples.indexOf(nearest(pointedAt));
  point(samples[Math.min(Math.max(from + by, 0), samples.length - 1)][0]);
}

function nearest(at) {
  return samples.reduce((best, sample) => (Math.abs(sample[0] - at) < Math.abs(best[0] - at) ? sample : best));
}

function drawCharts(now) {
  const end = endOfAxis(samples, now);
  const age = samples.length ? end - samples[0][0] : LONGEST_SECONDS;
  [span, between] = SPANS.find(([seconds]) => seconds >= age) ?? SPANS[SPANS.length - 1];
  fill("minutes", `The last ${span / 60} minutes`);
  for (const chart of CHARTS) {
    chart.start = end - span;
    chart.now = end;
    draw(chart);
  }
  point(pointedAt);
}

function draw(chart) {
  const { top, right, bottom, left, height } = FRAME;
  const width = (chart.width = Math.max(240, Math.round(chart.svg.getBoundingClientRect().width)));
  const base = height - bottom;
  const values = chart.lines.flatMap(([, index]) => samples.map((sample) => sample[index]));
  const highest = Math.max(0, ...values.filter(isNumber));
  const [interval, ceiling] = scale(Math.max(highest, chart.least));
  chart.x = (at) => Number((left + ((at - chart.start) / span) * (width - left - right)).toFixed(1));
  chart.y = (value) => Number((base - (value / ceiling) * (base - top)).toFixed(1));
  chart.cross = svg("g", { class: "cross" });
  chart.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.svg.setAttribute("aria-label", `${chart.title} over the last ${span / 60} minutes, at most ${chart.unit(highest)}`);
  chart.svg.replaceChildren(
    ...pausedRuns().map(([from, to]) => {
      const x = Math.max(left, chart.x(from - STEP_SECONDS));
      return svg("rect", { class: "paused", x, y: top, width: Math.max(1, chart.x(to) - x), height: base - top });
    }),
    ...(samples.length ? ticks(chart, interval, ceiling, width) : []),
    ...chart.lines.flatMap(([, index, colour]) => drawLine(chart, index, colour, base)),
    samples.length ? chart.cross : svg("text", { class: "empty", x: width / 2, y: height / 2 }, "no samples yet"),
  );
}

/** Return a round interval and the top of the axis, two to four intervals up. */
function scale(highest) {
  const power = 10 ** Math.floor(Math.log10(highest / 4));
  const interval = power * [1, 2, 5, 10].find((factor) => factor * power * 4 >= highest);
  return [interval, interval * Math.ceil(highest / interval - 1e-9)];
}

function ticks(chart, interval, ceiling, width) {
  const marks = [];
  for (let value = 0; value <= ceiling + interval / 2; value += interval) {
    const y = chart.y(value);
    marks.push(svg("line", { class: value ? "grid" : "zero", x1: FRAME.left, x2: width - FRAME.right, y1: y, y2: y }));
    marks.push(svg("text", { class: "left", x: FRAME.left - 8, y: y + 4 }, value ? chart.unit(value) : "0"));
  }
  const every = width > 420 ? between : 2 * between;
  for (let at = Math.ceil(chart.start / every) * every; at <= chart.start + span; at += every) {
    const x = chart.x(at);
    marks.push(svg("line", { class: "zero", x1: x, x2: x, y1: chart.y(0), y2: chart.y(0) + 4 }));
    marks.push(svg("text", { class: "below", x, y: FRAME.height - 4 }, minute(at)));
  }
  return marks;
}

/** Draw the runs between gaps; a run of a single sample is a dot. */
function drawLine(chart, index, colour, base) {
  const runs = [];
  let last = -Infinity;
  for (const sample of samples) {
    if (!isNumber(sample[index])) continue;
    if (sample[0] - last > GAP_SECONDS) runs.push([]);
    runs[runs.length - 1].push(`${chart.x(sample[0])} ${chart.y(sample[index])}`);
    last = sample[0];
  }
  const line = runs.map((run) => `M${run.join("L")}`).join("");
  const area = runs.map((run) => `M${run.join("L")}V${base}H${run[0].split(" ")[0]}Z`).join("");
  const under = chart.lines.length === 1 ? [svg("path", { class: `area ${colour}`, d: area })] : [];
  const single = runs.filter((run) => run.length === 1).map(([position]) => position.split(" "));
  const dots = single.map(([cx, cy]) => svg("circle", { class: `dot ${colour}`, cx, cy, r: 3 }));
  return [...under, svg("path", { class: `line ${colour}`, d: line }), ...dots];
}

function pausedRuns() {
  const runs = [];
  for (const [at, , , , , , isPaused] of samples) {
    const run = runs[runs.length - 1];
    if (isPaused && run && at - run[1] <= GAP_SECONDS) run[1] = at;
    else if (isPaused) runs.push([at, at]);
  }
  return runs;
}

/** Show the time and values of a sample in all charts, with a vertical line; null = the newest one, without a line. */
function point(at) {
  pointedAt = at;
  const closest = samples.length ? nearest(at ?? samples[samples.length - 1][0]) : null;
  const shown = closest && (at === null || Math.abs(closest[0] - at) <= GAP_SECONDS) ? closest : null;
  for (const chart of CHARTS) {
    const when = at === null ? "now" : shown ? clock(shown[0], chart.now) : `${clock(at, chart.now)}, no sample`;
    const values = chart.lines.map((line) => readValue(chart, line, shown));
    chart.readout.replaceChildren(el("span", { class: "when" }, shown || at !== null ? when : ""), ...values);
    mark(chart, shown && at !== null ? shown[0] : at, shown);
  }
}

function readValue(chart, [name, index, colour], shown) {
  const value = el("b", {}, shown && isNumber(shown[index]) ? chart.unit(shown[index]) : NONE);
  return chart.lines.length === 1 ? value : el("span", {}, el("i", { class: `swatch ${colour}` }), `${name} `, value);
}

function mark(chart, at, shown) {
  if (at === null) return chart.cross.replaceChildren();
  const x = chart.x(at);
  const dots = chart.lines.filter(([, index]) => shown && isNumber(shown[index]));
  return chart.cross.replaceChildren(
    svg("line", { x1: x, x2: x, y1: FRAME.top, y2: chart.y(0) }),
    ...dots.map(([, index, colour]) => svg("circle", { class: colour, cx: x, cy: chart.y(shown[index]), r: 4 })),
  );
}
