/* The list of samples or questions, of which only the lines in sight are elements. */

const ROW_PX = 28, NUM_SPARE = 8;
const SHOWN = {
  samples: ["step", "slot", "set", "dataset_type", "fate", "reward", "advantage", "num_output_tokens", "question"],
  questions: ["samples", "solved", "first", "last", "change", "trend", "question"],
};
const TITLES = { num_output_tokens: "length", dataset_type: "type" };
const SORT_KEYS = { slot: "", trend: "change" };  // of columns whose key is not their name

const labelOf = (name, i) => page.header.labels[name][page.columns[name][i]].replaceAll("_", " ");
const items = () => (page.view === "questions" ? page.questions : page.order);
const placeOfChosen = () => (page.view === "questions"
  ? page.questions.findIndex((row) => row.question === page.chosenQuestion) : page.order.indexOf(page.chosen));

function shownColumns() {
  const { dataset_type: types, set } = page.header.labels;  // a fate says whether a sample was held out
  const isShown = (name) => (name === "dataset_type" ? types.length > 1 : name !== "set" || set.length > 2);
  return SHOWN[page.view].filter(isShown);
}

function slotOf(i) {
  const c = page.columns;
  return `${c.ordinal[i]}.${c.index[i]}` + (c.attempt[i] ? `′${c.attempt[i]}` : "");
}

function cell(name, item) {
  if (page.view === "questions") return questionCell(name, item);
  if (name === "slot") return slotOf(item);
  if (name === "question") return page.heads[page.columns.question[item]];
  return page.header.labels[name] ? labelOf(name, item) : number(page.columns[name][item], 3);
}

/* Each head sorts: at first the largest on top, then the smallest, then as written. */
function drawHeads() {
  const sort = page.sorts[page.view];
  el("columns-head").replaceChildren(...shownColumns().map((name) => {
    const key = SORT_KEYS[name] ?? name, title = TITLES[name] ?? name, isSorted = sort.by === key && (key || sort.isFalling);
    return make("button", { type: "button", class: name, "aria-pressed": String(Boolean(isSorted)), title: `sort by ${title}`,
      onclick: () => sortBy(key) }, title + (isSorted && name !== "trend" ? (sort.isFalling ? " ▼" : " ▲") : ""));
  }));
}

function sortBy(key) {
  const sort = page.sorts[page.view];
  if (sort.by !== key) Object.assign(sort, { by: key, isFalling: Boolean(key) });
  else if (sort.isFalling === Boolean(key)) sort.isFalling = !key;
  else Object.assign(sort, { by: "", isFalling: false });
  const focused = [...el("columns-head").children].indexOf(document.activeElement);
  order();
  el("columns-head").children[focused]?.focus();
}

function drawList() {
  const scroll = el("scroll"), room = el("room"), all = items(), names = shownColumns();
  room.style.height = `${all.length * ROW_PX}px`;
  const first = Math.max(Math.floor(scroll.scrollTop / ROW_PX) - NUM_SPARE, 0);
  const last = Math.min(first + Math.ceil(scroll.clientHeight / ROW_PX) + 2 * NUM_SPARE, all.length);
  const lines = [];
  for (let at = first; at < last; at++) {
    const line = make("div", { class: page.view === "samples" && all[at] === page.held ? "line held" : "line", role: "option", id: `line-${at}`, "aria-selected": String(at === page.at),
      "aria-setsize": all.length, "aria-posinset": at + 1, onclick: () => choose(at) },
      ...names.map((name) => make("span", { class: name }, cell(name, all[at]))));
    line.style.top = `${at * ROW_PX}px`;
    lines.push(line);
  }
  room.replaceChildren(...lines);
  if (page.at >= first && page.at < last) scroll.setAttribute("aria-activedescendant", `line-${page.at}`);
  else scroll.removeAttribute("aria-activedescendant");
}

async function choose(at) {
  const all = items();
  if (!all.length) return;
  page.at = Math.min(Math.max(at, 0), all.length - 1);
  const scroll = el("scroll"), top = page.at * ROW_PX;
  if (top < scroll.scrollTop) scroll.scrollTop = top;
  if (top + ROW_PX > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = top + ROW_PX - scroll.clientHeight;
  if (page.view === "questions") {
    page.chosenQuestion = all[page.at].question;
    drawList();
    await showQuestion(all[page.at]);
  } else {
    page.chosen = all[page.at];
    drawList();
    await showSample(page.chosen);
  }
}

/* Show a sample that may not be among those listed. */
async function open(i) {
  page.chosen = i;
  page.at = placeOfChosen();
  drawList();
  await showSample(i);
}

function listKeys(event) {
  const rows = Math.max(Math.floor(el("scroll").clientHeight / ROW_PX) - 1, 1);
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: rows, PageUp: -rows, Home: -Infinity, End: Infinity };
  if (event.key === "Enter") el("sample").focus();
  else if (!(event.key in moves) || event.ctrlKey || event.metaKey) return;
  else choose(page.at < 0 ? 0 : page.at + moves[event.key]);
  event.preventDefault();
}

/* Between samples and questions. */
function lookAt(view) {
  page.view = view;
  for (const name of ["samples", "questions"]) el(`view-${name}`).setAttribute("aria-pressed", String(name === view));
  document.body.dataset.view = view;
  order();
}
