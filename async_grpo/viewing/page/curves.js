/* Curves over gradient steps and rewards by number, of the samples that pass the filters. */

const CURVES = [["reward", "Mean reward"], ["num_output_tokens", "Mean length in tokens"]];
const EDGE = { left: 46, right: 10, top: 8, bottom: 20, height: 132 };  // of a chart, in pixels
const MAX_DOTS = 60, MAX_VALUES = 12, NUM_BINS = 24;

/* [step, mean, number of samples] of each step. */
function means(order, column) {
  const { step } = page.columns, size = 1 + step.reduce((a, b) => Math.max(a, b), 0);
  const totals = new Float64Array(size), counts = new Uint32Array(size);
  for (const i of order) {
    if (Number.isNaN(column[i])) continue;
    totals[step[i]] += column[i];
    counts[step[i]]++;
  }
  const found = [];
  counts.forEach((count, at) => count && found.push([at, totals[at] / count, count]));
  return found;
}

function drawCharts() {
  page.every ??= Uint32Array.from({ length: page.header.num_samples }, (_, i) => i);
  page.whole ??= new Map(CURVES.map(([name]) => [name, means(page.every.filter((i) => !isHeldOut(i) && !isGiven(i)), page.columns[name])]));
  const trained = page.passing.filter((i) => !isHeldOut(i) && !isGiven(i)), heldOut = page.passing.filter(isHeldOut);
  const width = Math.max(el("charts").clientWidth / (innerWidth > 800 ? 3 : 1.15) - 20, 240);
  el("charts").replaceChildren(...CURVES.map(([name, title]) =>
    chart(title, means(trained, page.columns[name]), page.isFiltered ? page.whole.get(name) : [],
      { width, heldOut: means(heldOut, page.columns[name]) })), histogram(width, trained.length ? trained : heldOut));
}

/* `points` in colour, before those `behind` of all samples; steps with an alarm stand on a ground of their own. */
function chart(title, points, behind, { width = Math.max(el("sample").clientWidth - 40, 240), range, onStep = showStep, heldOut = [] } = {}) {
  const said = make("span"), all = [...points, ...heldOut, ...behind], shown = [...points, ...heldOut];
  const key = heldOut.length ? [make("i", { class: "key held-out" }), "held out "] : [];
  const caption = make("figcaption", {}, make("b", {}, title), " ", ...key, said);
  if (!all.length) return make("figure", {}, caption, make("p", { class: "hint" }, "no numbers"));
  const [x0, x1, y0, y1] = [0, 1].flatMap((k) => (k && range) || [least(all.map((p) => p[k])), most(all.map((p) => p[k]))]);
  const x = scale(x0, x1, EDGE.left, width - EDGE.right), y = scale(y0, y1, EDGE.height - EDGE.bottom, EDGE.top);
  const mark = shape("line", { class: "mark", y1: EDGE.top, y2: EDGE.height - EDGE.bottom, x1: -9, x2: -9 });
  const away = (p, event) => Math.hypot(x(p[0]) - event.offsetX, heldOut.length ? y(p[1]) - event.offsetY : 0);
  const nearest = (event) => shown.reduce((best, p) => (away(p, event) < away(best, event) ? p : best), shown[0]);
  const say = (p) => {
    const alarms = p ? page.alarms.filter(({ from, to }) => from <= p[0] && p[0] <= to).map(({ name }) => `; alarm ${name}`) : [];
    const whose = heldOut.includes(p) ? "held-out " : "";
    said.textContent = p ? ` step ${p[0]}: ${number(p[1])} over ${p[2]} ${whose}samples${alarms.join("")}` : "";
    for (const end of ["x1", "x2"]) mark.setAttribute(end, p ? x(p[0]) : -9);
  };
  const parts = [
    ...alarmGrounds(x, x0, x1), ...[y0, y1].map((v) => shape("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(v), y2: y(v) })),
    ...[[behind, "behind"], [points, "curve"], [heldOut, "curve held-out"]].filter(([of]) => of.length).map(([of, name]) => path(of, name, x, y)),
    ...[points, heldOut].flatMap((of) => (of.length < MAX_DOTS ? of : [])).map((p) => shape("circle", { class: heldOut.includes(p) ? "dot held-out" : "dot", r: 2.5, cx: x(p[0]), cy: y(p[1]) })),
    mark, ...labelsOf([x0, x1, y0, y1], x, y, width, "step "),
  ];
  return make("figure", {}, caption, make("svg", {
    width, height: EDGE.height, role: "img", "aria-label": `${title} of steps ${x0} to ${x1}: ${number(y0)} to ${number(y1)}`,
    onmousemove: (event) => shown.length && say(nearest(event)), onmouseleave: () => say(null),
    onclick: (event) => shown.length && onStep(nearest(event)[0]),
  }, ...parts));
}

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
const shape = (tag, attributes, ...children) => make(tag, { svg: true, ...attributes }, ...children);

function scale(from, to, start, end) {
  return (value) => start + (to > from ? (value - from) / (to - from) : 0.5) * (end - start);
}

function path(points, name, x, y) {
  const places = points.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`);
  return shape("path", { class: name, d: `M${places.join("L")}` });
}

function labelsOf([x0, x1, y0, y1], x, y, width, unit) {
  const text = (content, at, down, anchor) => shape("text", { x: at, y: down, "text-anchor": anchor }, content);
  return [
    text(number(y1, 3), EDGE.left - 6, y(y1) + 4, "end"),
    ...(y1 > y0 ? [text(number(y0, 3), EDGE.left - 6, y(y0) + 4, "end")] : []),
    text(unit + number(x0, 3), x1 > x0 ? EDGE.left : x(x0) - 20, EDGE.height - 5, "start"),
    ...(x1 > x0 ? [text(number(x1, 3), width - EDGE.right, EDGE.height - 5, "end")] : []),
  ];
}

/* All steps again where only this one was shown. */
function showStep(step) {
  const isShown = ["step-from", "step-to"].every((id) => el(id).value === String(step));
  el("step-from").value = el("step-to").value = isShown ? "" : step;
  applyFilters();
}

// --- rewards by number

/* [lowest, highest] of each bar: each value where there are few, else parts of equal width. */
function binsOf(values) {
  const different = new Set();
  for (const value of values) {
    if (!Number.isNaN(value)) different.add(value);
    if (different.size > MAX_VALUES) break;
  }
  if (different.size <= MAX_VALUES) return [...different].sort((a, b) => a - b).map((value) => [value, value]);
  const known = values.filter((value) => Number.isFinite(value)), low = least(known), size = (most(known) - low) / NUM_BINS;
  return Array.from({ length: NUM_BINS }, (_, k) => [low + k * size, k + 1 < NUM_BINS ? low + (k + 1) * size : most(known)]);
}

function countsOf(order, bins) {
  const { reward } = page.columns, counts = bins.map(() => 0), low = bins[0]?.[0], size = bins[0]?.[1] - low;
  const places = new Map(bins.map(([value], k) => [value, k]));
  for (const i of order) {
    const k = size ? Math.min(Math.floor((reward[i] - low) / size), bins.length - 1) : places.get(reward[i]);
    if (k >= 0) counts[k]++;
  }
  return counts;
}

function histogram(width, order) {
  page.bins ??= binsOf(page.columns.reward);
  const { bins } = page, counts = countsOf(order, bins), said = make("span");
  const caption = make("figcaption", {}, make("b", {}, "Samples by reward"), said), top = most(counts);
  if (!(top > 0)) return make("figure", {}, caption, make("p", { class: "hint" }, "no rewards"));
  const isEven = bins[0][0] !== bins[0][1], gap = isEven ? 1 : 6;
  const x = scale(0, bins.length, EDGE.left, width - EDGE.right), y = scale(0, top, EDGE.height - EDGE.bottom, EDGE.top);
  const name = ([from, to]) => (from === to ? number(from, 3) : `${number(from, 3)} to ${number(to, 3)}`);
  const bars = bins.map((bin, k) => shape("rect", {
    class: "bar-of", x: x(k) + gap / 2, width: Math.max(Math.min(x(k + 1) - x(k) - gap, 60), 1), y: y(counts[k]),
    height: y(0) - y(counts[k]),
  }));
  const fields = bins.map((bin, k) => shape("rect", {
    class: "field", x: x(k), width: x(k + 1) - x(k), y: EDGE.top, height: y(0) - EDGE.top, onclick: () => showRewards(bin),
    onmousemove: () => { said.textContent = ` ${name(bin)}: ${counts[k].toLocaleString("en")} of ${order.length.toLocaleString("en")} samples`; },
  }));
  const labels = isEven ? labelsOf([bins[0][0], bins.at(-1)[1], 0, top], scale(bins[0][0], bins.at(-1)[1], EDGE.left, width - EDGE.right), y, width, "")
    : [...labelsOf([0, 0, 0, top], x, y, width, "").slice(0, 2), ...bins.map(([value], k) => shape("text", {
      x: x(k) + gap / 2 + Math.min((x(1) - x(0) - gap) / 2, 30), y: EDGE.height - 5, "text-anchor": "middle" }, number(value, 2)))];
  return make("figure", {}, caption, make("svg", { width, height: EDGE.height, role: "img", onmouseleave: () => { said.textContent = ""; },
    "aria-label": `Samples by reward: ${bins.map((bin, k) => `${name(bin)}: ${counts[k]}`).join(", ")}` },
  shape("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(0), y2: y(0) }), ...bars, ...fields, ...labels));
}

/* All rewards again where only these were shown. */
function showRewards(bin) {
  const isShown = ["reward-from", "reward-to"].every((id, k) => el(id).value === String(bin[k]));
  ["reward-from", "reward-to"].forEach((id, k) => { el(id).value = isShown ? "" : bin[k]; });
  applyFilters();
}

// --- alarms

/* {name, sentence, from, to} of each alarm that was raised; `to` is Infinity of one that still holds. */
function alarmsOf(events) {
  const found = [], open = new Map();
  for (const { step, alarm, event, sentence } of events) {
    const key = `${alarm} ${sentence}`;
    if (event === "raised") {
      found.push({ name: alarm.replaceAll("_", " "), sentence, from: step ?? 0, to: Infinity });
      open.set(key, found.at(-1));
    } else if (open.has(key)) open.get(key).to = step ?? Infinity;
  }
  return found;
}

function alarmGrounds(x, x0, x1) {
  const height = EDGE.height - EDGE.bottom - EDGE.top;
  return page.alarms.filter(({ from, to }) => from <= x1 && to >= x0).map(({ name, sentence, from, to }) => {
    const left = x(Math.max(from, x0)), width = Math.max(x(Math.min(to, x1)) - left, 2);
    return shape("rect", { class: "alarm", x: left, width, y: EDGE.top, height }, shape("title", {}, `${name}: ${sentence}`));
  });
}

function listAlarms() {
  const { alarms } = page, holding = alarms.filter(({ to }) => to === Infinity).length;
  el("alarms").hidden = !alarms.length;
  const lines = alarms.map(({ name, sentence, from, to }) =>
    make("li", {}, make("b", {}, name), ` from step ${from} ${to === Infinity ? "on" : `to ${to}`}: ${sentence}`));
  el("alarms").replaceChildren(make("summary", {}, make("i", { class: "key alarm" }),
    `${alarms.length} ${alarms.length === 1 ? "alarm" : "alarms"}, ${holding || "none"} still holding at the end`), make("ul", {}, ...lines));
}
