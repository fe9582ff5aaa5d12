/* The page: its data, and how it begins. Texts of the dump are shown as text alone. */

const el = (id) => document.getElementById(id);
const NONE = 2 ** 32 - 1;  // of a column: not known
const CATEGORIES = ["set", "fate", "dataset_type", "verdict", "finish_reason"];
const COLOURINGS = {
  advantage: "advantage", difference: "log-probability, trainer − engine",
  version: "version (batches behind)", weight: "weight in the gradient", "": "none",
};
const HIDDEN = new RegExp("[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u200b\\u200e\\u200f\\u202a-\\u202e"
  + "\\u2060\\u2066-\\u2069\\ufeff]|\\p{Cs}", "gu");  // control, direction, no width, lone surrogates
const page = {
  header: null, columns: {}, heads: [], blocks: new Map(), ranks: new Map(),  // of the data
  view: "samples", order: new Uint32Array(0), questions: [], at: -1, chosen: -1, held: -1, colouring: "advantage", isFormatted: false,  // of what is shown
  sorts: { samples: { by: "", isFalling: false }, questions: { by: "", isFalling: false } },
  search: { wanted: "", hits: null, done: 1 }, alarms: [],
};

function make(tag, attributes = {}, ...children) {
  const space = attributes.math ? "1998/Math/MathML" : tag === "svg" || attributes.svg ? "2000/svg" : "1999/xhtml";
  const node = document.createElementNS(`http://www.w3.org/${space}`, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "svg" || name === "math" || value === false || value === undefined) continue;
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

/* From the page itself, or from the server of a run that goes on. */
async function inflated(id) {
  if (page.isServed) return (await answered(id)).arrayBuffer();
  while (!el(id) && document.readyState === "loading") await new Promise((done) => setTimeout(done, 10));
  const letters = atob(el(id).textContent);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

const parsed = async (id) => JSON.parse(new TextDecoder().decode(await inflated(id)));

async function readData() {
  const header = await parsed("header"), numbers = `columns-${header.generation}-${header.num_samples}`, columns = {};
  const buffer = await inflated(page.isServed ? numbers : "columns");
  let start = 0;
  for (const [name, type] of header.columns) {
    const Kind = globalThis[type], size = Kind.BYTES_PER_ELEMENT * header.num_samples;
    columns[name] = new Kind(buffer.slice(start, start += size));
  }
  page.heads = header.heads ?? await parsed("questions");
  Object.assign(page, { header, columns });
  page.lowered = page.heads.map((head) => head.toLowerCase());
  page.steps = new Map(page.header.steps.map((step) => [step.step, step]));
  page.alarms = alarmsOf(page.header.alarms);
}

const blockName = (k) => (page.isServed ? `block-${page.header.generation}-${k}` : `block-${k}`);

async function detailOf(sample) {
  const starts = page.header.blocks;
  let low = 0, high = starts.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= sample) low = middle; else high = middle - 1;
  }
  if (!page.blocks.has(low)) {
    if (page.blocks.size > 7) page.blocks.delete(page.blocks.keys().next().value);
    page.blocks.set(low, parsed(blockName(low)));
  }
  return withTurns((await page.blocks.get(low))[sample - starts[low]], sample);
}

/* Most samples are of one turn, which the dump does not repeat. */
function withTurns(told, i) {
  const c = page.columns;
  return { ...told, turns: told.turns ?? [
    { role: "environment", row: 0, text: told.input, num_tokens: c.num_input_tokens[i] },
    { role: told.given ? "given" : "model", row: 0, text: told.output, num_tokens: c.num_output_tokens[i], finish_reason: labelOf("finish_reason", i) },
  ] };
}

// --- begin

function fillFilters() {
  const { header, columns } = page;
  for (const name of CATEGORIES) {
    const counts = new Map();
    for (const value of columns[name]) counts.set(value, (counts.get(value) ?? 0) + 1);
    const chosen = el(name).value, options = header.labels[name].map((label, value) =>
      make("option", { value }, `${label || "(none)"} (${(counts.get(value) ?? 0).toLocaleString("en")})`));
    el(name).replaceChildren(make("option", { value: "" }, "all"), ...options);
    el(name).value = chosen;
    el(name).closest("label").hidden = header.labels[name].length < 2;
  }
}

const isHeldOut = (i) => page.header.labels.set[page.columns.set[i]] !== "training";

const isGiven = (i) => page.columns.given[i] > 0;  // not sampled, though a reference answer has a reward

/* Held-out questions have a number in each evaluation. */
function addressOf(i) {
  const c = page.columns, place = `${c.ordinal[i]}.${c.attempt[i]}.${c.index[i]}`;
  return isHeldOut(i) ? `${place}.${c.set[i]}.${c.batch[i]}` : place;
}

function chosenByAddress() {
  const wanted = location.hash.slice(1);
  return /^[\d.]+$/.test(wanted) ? page.columns.ordinal.findIndex((_, i) => addressOf(i) === wanted) : -1;
}

function pageKeys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (event.key === "/") el("question").focus();
  else if (event.key === "o") el("output").focus();
  else if (event.key === "c" && page.view === "samples") hold();
  else if (event.key === "m") format();
  else if (event.key === "f" && page.isServed) setFollowing(!page.isFollowing);
  else if (event.key === "t") el("theme").click();
  else if (event.key === "q" && page.view === "questions") lookAt("samples");
  else if (event.key === "q") page.chosen < 0 ? lookAt("questions") : openQuestion(page.chosen);
  else if (event.key === "Escape") leaveSample();
  else return;
  event.preventDefault();
}

async function begin() {
  page.isServed = !el("header");
  if (page.isServed) page.version = await (await answered("version")).text();
  await readData();
  const { header } = page, config = header.config;
  el("run").textContent = visible(header.run);
  el("about").textContent = visible([config.algorithm, config.advantage && `advantage ${config.advantage}`, config.aggregation,
    config.max_staleness !== undefined && `staleness ${config.max_staleness}`].filter(Boolean).join(" · "));
  fillFilters();
  listAlarms();
  el("filters").addEventListener("input", (event) => (event.target.id === "output" ? searchSoon() : applyFilters()));
  el("filters").addEventListener("reset", () => setTimeout(searchOutputs));
  for (const view of ["samples", "questions"]) el(`view-${view}`).addEventListener("click", () => lookAt(view));
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
  page.sorts.samples.isFalling = page.isServed;  // the newest on top
  applyFilters();
  lookAt("samples");
  page.readyMs = performance.now();
  document.documentElement.dataset.state = "ready";
  const sample = chosenByAddress();
  if (sample >= 0) await choose(page.order.indexOf(sample));
  if (page.isServed) await follow();
}

if (typeof document !== "undefined") begin();
