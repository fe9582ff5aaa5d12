/* Which samples are listed, in which order. */

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
  const text = el("question").value.toLowerCase(), { hits } = page.search;
  if (text) {
    const has = page.lowered.map((head) => head.includes(text));
    tests.push((i) => has[c.question[i]]);
  }
  if (hits) tests.push((i) => hits[i]);
  return tests;
}

/* `staysPut`: the list is not scrolled to its start, for nobody has asked for another. */
function applyFilters({ staysPut = false } = {}) {
  const began = performance.now(), tests = readFilters(), total = page.header.num_samples;
  const kept = new Uint32Array(total);
  let count = 0;
  for (let i = 0; i < total; i++) {
    let passes = true;
    for (let k = 0; k < tests.length && passes; k++) passes = tests[k](i);
    if (passes) kept[count++] = i;
  }
  page.passing = kept.subarray(0, count);
  page.isFiltered = tests.length > 0;
  order({ staysPut });
  drawCharts();
  page.filterMs = performance.now() - began;
}

/* Sort what passes, and draw the list. */
function order({ staysPut = false } = {}) {
  page.order = sorted(page.passing, page.sorts.samples);
  if (page.view === "questions") page.questions = sortedQuestions(byQuestion(page.passing), page.sorts.questions);
  page.at = placeOfChosen();
  showCount();
  if (!staysPut) el("scroll").scrollTop = 0;
  drawHeads();
  drawList();
}

/* By counting: comparing 100,000 samples takes many times longer. Equal ones stay as written. */
function sorted(order, { by, isFalling }) {
  if (!by) return isFalling ? order.slice().reverse() : order;
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
  const { num_samples: total, num_found: found, num_broken: broken } = page.header, { wanted, done } = page.search;
  const parts = [`${page.passing.length.toLocaleString("en")} of ${total.toLocaleString("en")} samples`];
  if (page.view === "questions") parts.unshift(`${page.questions.length.toLocaleString("en")} questions`);
  if (wanted && done < 1) parts.push(`${Math.floor(100 * done)} % of the outputs searched`);
  if (found > total + broken) parts.push(`of ${found.toLocaleString("en")} in the dump, left out evenly`);
  if (broken) parts.push(`${broken} broken lines`);
  el("count").textContent = parts.join(", ");
}

// --- search in what was written

const SEARCH_AFTER_MS = 250, REDRAW_MS = 200;

/* The outputs that contain the field's text. The list grows while their blocks are inflated. */
async function searchOutputs({ isAgain = false } = {}) {
  const began = performance.now(), wanted = el("output").value.toLowerCase(), before = page.search;
  const search = page.search = { wanted, hits: null, done: 0 }, { blocks, num_samples: total } = page.header;
  if (!wanted) return applyFilters();
  search.hits = isAgain ? before.hits : new Uint8Array(total);
  let drawn = isAgain ? Infinity : 0;
  for (let k = 0; k < blocks.length; k++) {
    const block = new TextDecoder().decode(await inflated(blockName(k)));
    if (page.search !== search) return;  // another text is searched by now
    if (mayContain(block, wanted)) JSON.parse(block).forEach((told, n) => { if (blocks[k] + n < total) search.hits[blocks[k] + n] = isIn(told, wanted); });
    search.done = (k + 1) / blocks.length;
    if (performance.now() - drawn > REDRAW_MS) { applyFilters({ staysPut: drawn > 0 }); drawn = performance.now(); }
  }
  search.done = 1;
  applyFilters({ staysPut: drawn > 0 });
  search.ms = performance.now() - began;
}

const writtenIn = (told) => [told.output, ...(told.turns ?? []).filter((turn) => turn.role !== "environment").map((turn) => turn.text)];
const isIn = (told, wanted) => writtenIn(told).some((text) => text?.toLowerCase().includes(wanted));

/* A block's JSON has plain letters as they are: most blocks need not be parsed. */
function mayContain(block, wanted) {
  return !/^[ -~]*$/.test(wanted) || /["\\]/.test(wanted) || block.toLowerCase().includes(wanted);
}

function searchSoon() {
  clearTimeout(page.searchTimer);
  page.searchTimer = setTimeout(searchOutputs, SEARCH_AFTER_MS);
}

/* Mark what was searched in the texts that are shown, without a change to their elements. */
function markFound() {
  const { wanted } = page.search, ranges = [];
  CSS.highlights?.delete("found");
  if (!wanted || !CSS.highlights) return;
  for (const text of el("sample").querySelectorAll(".written .text")) {
    const walker = document.createTreeWalker(text, NodeFilter.SHOW_TEXT), nodes = [];
    let all = "";
    while (walker.nextNode()) { nodes.push([walker.currentNode, all.length]); all += walker.currentNode.data; }
    all = all.toLowerCase();
    const place = (at) => {
      const [node, start] = nodes.findLast(([, start]) => start <= at);
      return [node, Math.min(at - start, node.length)];
    };
    for (let at = all.indexOf(wanted); at >= 0; at = all.indexOf(wanted, at + wanted.length)) {
      const range = new Range();
      range.setStart(...place(at));
      range.setEnd(...place(at + wanted.length - 1));
      range.setEnd(range.endContainer, range.endOffset + 1);
      ranges.push(range);
    }
  }
  if (!ranges.length) return;
  CSS.highlights.set("found", new Highlight(...ranges));
  ranges[0].startContainer.parentElement.scrollIntoView({ block: "center" });
}
