/* Questions instead of samples: how often each is solved, over the run. */

const MAX_STEPS_SHOWN = 100;  // of one question, as rewards to choose from
const TREND = { width: 92, height: 20, edge: 3 };  // in pixels

const solvedFrom = () => (el("solved").value === "" ? 1 : Number(el("solved").value));

/* A row for each question of these samples, as written, with its solve rate at each step. */
function byQuestion(order) {
  const { question, reward, step } = page.columns, least = solvedFrom(), rows = new Map();
  for (const i of order) {
    let row = rows.get(question[i]);
    if (!row) rows.set(question[i], row = { question: question[i], members: [], steps: new Map() });
    row.members.push(i);
    if (Number.isNaN(reward[i]) || isGiven(i)) continue;
    const seen = row.steps.get(step[i]);
    if (seen) { seen[0] += reward[i] >= least; seen[1]++; } else row.steps.set(step[i], [Number(reward[i] >= least), 1]);
  }
  for (const row of rows.values()) {
    const steps = [...row.steps].sort(([a], [b]) => a - b);
    row.points = steps.map(([at, [solved, count]]) => [at, solved / count, count]);
    const [solved, count] = steps.reduce(([a, b], [, [c, d]]) => [a + c, b + d], [0, 0]);
    row.samples = row.members.length;
    row.solved = count ? solved / count : NaN;
    row.first = row.points[0]?.[1] ?? NaN;
    row.last = row.points.at(-1)?.[1] ?? NaN;
    row.change = row.last - row.first;
  }
  return [...rows.values()];
}

function sortedQuestions(rows, { by, isFalling }) {
  if (!by) return isFalling ? rows.reverse() : rows;
  const value = (row) => (Number.isNaN(row[by]) ? -Infinity : row[by]), sign = isFalling ? -1 : 1;
  return rows.sort((a, b) => (value(a) === value(b) ? 0 : sign * (value(a) < value(b) ? -1 : 1)));
}

const percent = (share) => (Number.isNaN(share) ? "–" : `${Math.round(100 * share)} %`);

function questionCell(name, row) {
  if (name === "question") return page.heads[row.question];
  if (name === "samples") return row.samples.toLocaleString("en");
  if (name === "trend") return trend(row.points);
  return (name === "change" && row.change > 0 ? "+" : "") + percent(row[name]);
}

/* The solve rate from 0 to 1, where in the run it was measured. */
function trend(points) {
  const { width, height, edge } = TREND;
  page.lastStep ??= most(page.columns.step);
  const x = scale(0, page.lastStep, edge, width - edge), y = scale(0, 1, height - edge, edge);
  const dots = points.length > 30 ? [] : points;
  return make("svg", { width, height, "aria-hidden": "true" },
    ...(points.length > 1 ? [path(points, "curve", x, y)] : []),
    ...dots.map((p) => shape("circle", { class: "dot", r: 1.8, cx: x(p[0]), cy: y(p[1]) })));
}

async function showQuestion(row) {
  const told = await detailOf(row.members[0]);
  if (page.chosenQuestion !== row.question || page.view !== "questions") return;
  const facts = [
    ["Solved", `${percent(row.solved)} of ${row.samples.toLocaleString("en")} samples, with a reward of at least ${number(solvedFrom())}`],
    ["Over time", `${percent(row.first)} at step ${row.points[0]?.[0] ?? "–"}, ${percent(row.last)} at step ${row.points.at(-1)?.[0] ?? "–"}`],
    ["Answer", told.answer ?? ""],
  ].filter(([, value]) => value !== "");
  el("sample").replaceChildren(
    make("div", { class: "bar" }, make("h2", {}, `A question asked in ${row.points.length.toLocaleString("en")} steps`), ...barButtons()),
    definitions(facts),
    chart("Solve rate", row.points, [], { range: [0, 1], onStep: (step) => open(row.members.find((i) => page.columns.step[i] === step)) }),
    make("article", { class: "turn read" }, make("h3", {}, "question"), textOf(told.input ?? "")),
    make("h3", {}, "Rewards at each step"), ...rewardsOf(row));
  el("sample").scrollTop = 0;
  document.body.classList.add("reading");
}

function rewardsOf(row) {
  const steps = Map.groupBy(row.members, (i) => page.columns.step[i]);
  const shown = [...steps].sort(([a], [b]) => b - a).slice(0, MAX_STEPS_SHOWN);
  const lines = shown.map(([step, members]) =>
    make("nav", { class: "group", "aria-label": `Step ${step}` }, make("span", {}, `step ${step}`), ...members.map(rewardButton)));
  const rest = steps.size - shown.length;
  return rest ? [...lines, make("p", { class: "hint" }, `and ${rest.toLocaleString("en")} earlier steps: choose them by the field Step`)] : lines;
}
