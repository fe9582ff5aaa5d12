/* Curves of the samples that pass the filters, over gradient steps. */

const CURVES = [["reward", "Mean reward"], ["num_output_tokens", "Mean length in tokens"]];
const EDGE = { left: 46, right: 10, top: 8, bottom: 20, height: 132 };  // of a chart, in pixels
const MAX_DOTS = 60;

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
  page.whole ??= new Map(CURVES.map(([name]) => [name, means(page.every, page.columns[name])]));
  el("charts").replaceChildren(...CURVES.map(([name, title]) =>
    chart(title, means(page.order, page.columns[name]), page.isFiltered ? page.whole.get(name) : [])));
}

/* `points` in colour, before those `behind` of all samples. */
function chart(title, points, behind) {
  const said = make("span");
  const caption = make("figcaption", {}, make("b", {}, title), said);
  const all = [...points, ...behind];
  if (!all.length) return make("figure", {}, caption, make("p", { class: "hint" }, "no numbers"));
  const width = Math.max(el("charts").clientWidth / (innerWidth > 800 ? 2 : 1) - 24, 240);
  const [x0, x1, y0, y1] = [0, 1].flatMap((k) => [least(all.map((p) => p[k])), most(all.map((p) => p[k]))]);
  const x = scale(x0, x1, EDGE.left, width - EDGE.right), y = scale(y0, y1, EDGE.height - EDGE.bottom, EDGE.top);
  const mark = shape("line", { class: "mark", y1: EDGE.top, y2: EDGE.height - EDGE.bottom, x1: -9, x2: -9 });
  const nearest = (event) => points.reduce((best, p) =>
    (Math.abs(x(p[0]) - event.offsetX) < Math.abs(x(best[0]) - event.offsetX) ? p : best), points[0]);
  const say = (p) => {
    said.textContent = p ? ` step ${p[0]}: ${number(p[1])} over ${p[2]} samples` : "";
    for (const end of ["x1", "x2"]) mark.setAttribute(end, p ? x(p[0]) : -9);
  };
  const parts = [
    ...[y0, y1].map((v) => shape("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(v), y2: y(v) })),
    ...[[behind, "behind"], [points, "curve"]].filter(([of]) => of.length).map(([of, name]) => path(of, name, x, y)),
    ...(points.length < MAX_DOTS ? points : []).map((p) => shape("circle", { class: "dot", r: 2.5, cx: x(p[0]), cy: y(p[1]) })),
    mark, ...labelsOf([x0, x1, y0, y1], x, y, width),
  ];
  return make("figure", {}, caption, make("svg", {
    width, height: EDGE.height, role: "img", "aria-label": `${title} of steps ${x0} to ${x1}: ${number(y0)} to ${number(y1)}`,
    onmousemove: (event) => points.length && say(nearest(event)), onmouseleave: () => say(null),
    onclick: (event) => points.length && showStep(nearest(event)[0]),
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

function labelsOf([x0, x1, y0, y1], x, y, width) {
  const text = (content, at, down, anchor) => shape("text", { x: at, y: down, "text-anchor": anchor }, content);
  return [
    text(number(y1, 3), EDGE.left - 6, y(y1) + 4, "end"),
    ...(y1 > y0 ? [text(number(y0, 3), EDGE.left - 6, y(y0) + 4, "end")] : []),
    text(`step ${x0}`, x1 > x0 ? EDGE.left : x(x0) - 20, EDGE.height - 5, "start"),
    ...(x1 > x0 ? [text(String(x1), width - EDGE.right, EDGE.height - 5, "end")] : []),
  ];
}

/* All steps again where only this one was shown. */
function showStep(step) {
  const isShown = ["step-from", "step-to"].every((id) => el(id).value === String(step));
  el("step-from").value = el("step-to").value = isShown ? "" : step;
  applyFilters();
}
