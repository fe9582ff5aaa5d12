/* The page: its data, filters, curves and the list. Texts of the dump are shown as text alone. */

const el = (id) => document.getElementById(id);
const NONE = 2 ** 32 - 1;  // of a column: not known
const ROW_PX = 28, NUM_SPARE = 8;  // of the list
const SHOWN = [
  "step", "slot", "dataset_type", "fate", "reward", "advantage", "num_output_tokens", "question",
];
const CATEGORIES = ["fate", "dataset_type", "verdict", "finish_reason"];
const COLOURINGS = {
  advantage: "advantage", difference: "log-probability, trainer − engine",
  version: "version (batches behind)", weight: "weight in the gradient", "": "none",
};
const HIDDEN = new RegExp("[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u200b\\u200e\\u200f\\u202a-\\u202e"
  + "\\u2060\\u2066-\\u2069\\ufeff]|\\p{Cs}", "gu");  // control, direction, no width, lone surrogates
const page = {
  header: null, columns: {}, heads: [], blocks: new Map(), ranks: new Map(),  // of the data
  order: new Uint32Array(0), at: -1, chosen: -1, colouring: "advantage",  // of what is shown
};

function make(tag, attributes = {}, ...children) {
  const space = tag === "svg" || attributes.svg ? "2000/svg" : "1999/xhtml";
  const node = document.createElementNS(`http://www.w3.org/${space}`, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "svg" || value === false || value === undefined) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.map((child) => (typeof child === "string" ? visible(child) : child)));
  return node;
}

/* What would be invisible, or turn the order of letters around, is shown by its number. */
function visible(text) {
  return text.replace(HIDDEN, (letter) => `⟨${letter.charCodeAt(0).toString(16).padStart(4, "0")}⟩`);
}

function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value) || value === NONE) return "–";
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e5 ? String(Number(value.toPrecision(digits))) : value.toExponential(digits - 1);
}

// --- the page's data

async function inflated(id) {
  while (!el(id) && document.readyState === "loading") await new Promise((done) => setTimeout(done, 10));
  const letters = atob(el(id).textContent);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

const parsed = async (id) => JSON.parse(new TextDecoder().decode(await inflated(id)));

async function readData() {
  page.header = await parsed("header");
  const buffer = await inflated("columns");
  let start = 0;
  for (const [name, type] of page.header.columns) {
    const Kind = globalThis[type], size = Kind.BYTES_PER_ELEMENT * page.header.num_samples;
    page.columns[name] = new Kind(buffer.slice(start, start += size));
  }
  page.heads = await parsed("questions");
  page.lowered = page.heads.map((head) => head.toLowerCase());
  page.steps = new Map(page.header.steps.map((step) => [step.step, step]));
}

async function detailOf(sample) {
  const starts = page.header.blocks;
  let low = 0, high = starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= sample) low = middle; else high = middle - 1;
  }
  if (!page.blocks.has(low)) {
    if (page.blocks.size > 7) page.blocks.delete(page.blocks.keys().next().value);
    page.blocks.set(low, parsed(`block-${low}`));
  }
  return (await page.blocks.get(low))[sample - starts[low]];
}

// --- filters

function limits(name) {
  const of = (id, otherwise) => (el(id).value === "" ? otherwise : Number(el(id).value));
  return [of(`${name}-from`, -Infinity), of(`${name}-to`, Infinity)];
}

function readFilters() {
  const c = page.columns, tests = [];
  for (const [name, column] of [["step", c.step], ["reward", c.reward], ["length", c.num_output_tokens]]) {
    const [from, to] = limits(name);
    if (from > -Infinity || to < Infinity) tests.push((i) => column[i] >= from && column[i] <= to);
  }
  for (const name of CATEGORIES) {
    if (el(name).value !== "") { const wanted = Number(el(name).value); tests.push((i) => c[name][i] === wanted); }
  }
  const text = el("question").value.toLowerCase();
  if (text) {
    const has = page.lowered.map((head) => head.includes(text));
    tests.push((i) => has[c.question[i]]);
  }
  return tests;
}

function applyFilters() {
  const began = performance.now(), tests = readFilters(), total = page.header.num_samples;
  const kept = new Uint32Array(total);
  let count = 0;
  for (let i = 0; i < total; i++) {
    let passes = true;
    for (let k = 0; k < tests.length && passes; k++) passes = tests[k](i);
    if (passes) kept[count++] = i;
  }
  page.order = sorted(kept.subarray(0, count));
  page.isFiltered = tests.length > 0;
  page.at = page.order.indexOf(page.chosen);
  showCount();
  el("scroll").scrollTop = 0;
  drawList();
  drawCharts();
  page.filterMs = performance.now() - began;
}

/* By counting: comparing 100,000 samples takes many times longer. Equal ones stay as written. */
function sorted(order) {
  const by = el("sort").value, isFalling = el("direction").value === "-1";
  if (!by) return isFalling ? order.reverse() : order;
  const { ranks, size } = ranksOf(by), starts = new Uint32Array(size + 1), found = new Uint32Array(order.length);
  const place = (i) => (isFalling ? size - 1 - ranks[i] : ranks[i]);
  for (const i of order) starts[place(i) + 1]++;
  for (let k = 0; k < size; k++) starts[k + 1] += starts[k];
  for (const i of order) found[starts[place(i)]++] = i;
  return found;
}

/* The place of each sample's value among all values of a column; unknown ones come first. */
function ranksOf(name) {
  if (!page.ranks.has(name)) {
    const labels = page.header.labels[name];
    page.ranks.set(name, labels ? ranksOfLabels(labels, page.columns[name]) : ranksOfNumbers(page.columns[name]));
  }
  return page.ranks.get(name);
}

function ranksOfLabels(labels, column) {
  const sorted = [...labels].sort(), places = labels.map((label) => sorted.indexOf(label));
  return { ranks: Uint32Array.from(column, (value) => places[value]), size: labels.length };
}

function ranksOfNumbers(column) {
  const numbers = Float64Array.from(column, (value) => (Number.isNaN(value) ? -Infinity : value));
  const values = numbers.slice().sort().filter((value, k, all) => !k || value !== all[k - 1]);
  const ranks = numbers.map((value) => {
    let low = 0, high = values.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < value) low = middle + 1; else high = middle;
    }
    return low;
  });
  return { ranks, size: values.length };
}

function showCount() {
  const { num_samples: total, num_found: found, num_broken: broken } = page.header;
  const parts = [`${page.order.length.toLocaleString("en")} of ${total.toLocaleString("en")} samples`];
  if (found > total + broken) parts.push(`of ${found.toLocaleString("en")} in the dump, left out evenly`);
  if (broken) parts.push(`${broken} broken lines`);
  el("count").textContent = parts.join(", ");
}

// --- the list

const labelOf = (name, i) => page.header.labels[name][page.columns[name][i]].replaceAll("_", " ");

function cell(name, i) {
  const c = page.columns;
  if (name === "slot") return `${c.ordinal[i]}.${c.index[i]}` + (c.attempt[i] ? `′${c.attempt[i]}` : "");
  if (name === "question") return page.heads[c.question[i]];
  if (page.header.labels[name]) return labelOf(name, i);
  return number(c[name][i], 3);
}

function drawList() {
  const scroll = el("scroll"), room = el("room");
  room.style.height = `${page.order.length * ROW_PX}px`;
  const first = Math.max(Math.floor(scroll.scrollTop / ROW_PX) - NUM_SPARE, 0);
  const last = Math.min(first + Math.ceil(scroll.clientHeight / ROW_PX) + 2 * NUM_SPARE, page.order.length);
  const lines = [];
  for (let at = first; at < last; at++) {
    const i = page.order[at];
    const line = make("div", { class: "line", role: "option", id: `line-${at}`, "aria-selected": String(at === page.at),
      "aria-setsize": page.order.length, "aria-posinset": at + 1, onclick: () => choose(at) },
      ...page.shown.map((name) => make("span", { class: name }, cell(name, i))));
    line.style.top = `${at * ROW_PX}px`;
    lines.push(line);
  }
  room.replaceChildren(...lines);
  if (page.at >= first && page.at < last) scroll.setAttribute("aria-activedescendant", `line-${page.at}`);
  else scroll.removeAttribute("aria-activedescendant");
}

async function choose(at) {
  if (!page.order.length) return;
  page.at = Math.min(Math.max(at, 0), page.order.length - 1);
  page.chosen = page.order[page.at];
  const scroll = el("scroll"), top = page.at * ROW_PX;
  if (top < scroll.scrollTop) scroll.scrollTop = top;
  if (top + ROW_PX > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = top + ROW_PX - scroll.clientHeight;
  drawList();
  await showSample(page.chosen);
}

function listKeys(event) {
  const rows = Math.max(Math.floor(el("scroll").clientHeight / ROW_PX) - 1, 1);
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: rows, PageUp: -rows, Home: -Infinity, End: Infinity };
  if (event.key === "Enter") el("sample").focus();
  else if (!(event.key in moves) || event.ctrlKey || event.metaKey) return;
  else choose(page.at < 0 ? 0 : page.at + moves[event.key]);
  event.preventDefault();
}

// --- begin

function fillFilters() {
  const { header, columns } = page;
  for (const name of CATEGORIES) {
    const counts = new Map();
    for (const value of columns[name]) counts.set(value, (counts.get(value) ?? 0) + 1);
    const options = header.labels[name].map((label, value) =>
      make("option", { value }, `${label || "(none)"} (${(counts.get(value) ?? 0).toLocaleString("en")})`));
    el(name).replaceChildren(make("option", { value: "" }, "all"), ...options);
    el(name).closest("label").hidden = header.labels[name].length < 2;
  }
  page.shown = SHOWN.filter((name) => name !== "dataset_type" || header.labels.dataset_type.length > 1);
  const titles = { num_output_tokens: "length", dataset_type: "type" };
  el("columns-head").replaceChildren(...page.shown.map((name) => make("span", { class: name }, titles[name] ?? name)));
}

function chosenByAddress() {
  const wanted = location.hash.slice(1).split(".").map(Number);
  if (wanted.length !== 3) return -1;
  const { ordinal, attempt, index } = page.columns;
  return ordinal.findIndex((value, i) => value === wanted[0] && attempt[i] === wanted[1] && index[i] === wanted[2]);
}

function pageKeys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (event.key === "/") el("question").focus();
  else if (event.key === "t") el("theme").click();
  else if (event.key === "Escape") leaveSample();
  else return;
  event.preventDefault();
}

async function begin() {
  await readData();
  const { header } = page, config = header.config;
  el("run").textContent = visible(header.run);
  el("about").textContent = visible([config.algorithm, config.advantage && `advantage ${config.advantage}`, config.aggregation,
    config.max_staleness !== undefined && `staleness ${config.max_staleness}`].filter(Boolean).join(" · "));
  fillFilters();
  el("filters").addEventListener("input", applyFilters);
  el("filters").addEventListener("reset", () => setTimeout(applyFilters));
  el("filters").addEventListener("submit", (event) => event.preventDefault());
  el("scroll").addEventListener("scroll", drawList, { passive: true });
  el("scroll").addEventListener("keydown", listKeys);
  el("sample").addEventListener("keydown", tokenKeys);
  document.addEventListener("keydown", pageKeys);
  el("theme").addEventListener("click", () => {
    const isDark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
    document.documentElement.dataset.theme = isDark ? "light" : "dark";
  });
  addEventListener("resize", () => { drawList(); drawCharts(); });
  applyFilters();
  page.readyMs = performance.now();
  document.documentElement.dataset.state = "ready";
  const sample = chosenByAddress();
  if (sample >= 0) await choose(page.order.indexOf(sample));
}

if (typeof document !== "undefined") begin();
