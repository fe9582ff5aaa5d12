"use strict";
/* Two samples side by side: what is only in one of their texts is marked, by lines, then by words. */

const MAX_EDITS = 800;  // between two texts; with more, no part of them counts as the same

/* [[text, whether it is in this one alone], …] of each text. */
function differences(left, right) {
  const sides = [[], []];
  for (const [isSame, a, b] of hunks(left.match(/[^\n]*\n|[^\n]+/g) ?? [], right.match(/[^\n]*\n|[^\n]+/g) ?? [])) {
    const parts = isSame ? [[true, a, b]] : hunks(words(a.join("")), words(b.join("")));
    for (const [isEqual, x, y] of parts) {
      const isOwn = !isEqual || (parts.length > 1 && !/[\p{L}\p{N}]/u.test(x.join("")));  // a blank alone is no agreement
      if (x.length) sides[0].push([x.join(""), isOwn]);
      if (y.length) sides[1].push([y.join(""), isOwn]);
    }
  }
  return sides;
}

const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

/* [whether they are the same, items of a, items of b] in order. */
function hunks(a, b) {
  let start = 0, end = 0;
  const most = Math.min(a.length, b.length);
  while (start < most && a[start] === b[start]) start++;
  while (end < most - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const found = [];
  const add = (isSame, x, y) => (x.length || y.length) && found.push([isSame, x, y]);
  add(true, a.slice(0, start), b.slice(0, start));
  const [innerA, innerB] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  let [x, y] = [0, 0];
  for (const [fromA, fromB, size] of [...common(innerA, innerB), [innerA.length, innerB.length, 0]]) {
    add(false, innerA.slice(x, fromA), innerB.slice(y, fromB));
    add(true, innerA.slice(fromA, fromA + size), innerB.slice(fromB, fromB + size));
    [x, y] = [fromA + size, fromB + size];
  }
  add(true, a.slice(a.length - end), b.slice(b.length - end));
  return found;
}

/* [place in a, place in b, length] of the runs that a shortest edit script keeps (Myers 1986). */
function common(a, b) {
  const reach = new Int32Array(2 * MAX_EDITS + 3), middle = MAX_EDITS + 1, traces = [];
  if (!a.length || !b.length) return [];
  for (let edits = 0; edits <= MAX_EDITS; edits++) {
    traces.push(reach.slice(middle - edits - 1, middle + edits + 2));
    for (let k = -edits; k <= edits; k += 2) {
      const isDown = k === -edits || (k !== edits && reach[middle + k - 1] < reach[middle + k + 1]);
      let x = isDown ? reach[middle + k + 1] : reach[middle + k - 1] + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      reach[middle + k] = x;
      if (x >= a.length && x - k >= b.length) return walkedBack(traces, a.length, b.length);
    }
  }
  return [];
}

function walkedBack(traces, x, y) {
  const found = [];
  for (let edits = traces.length - 1; edits >= 0; edits--) {
    const at = (k) => traces[edits][k + edits + 1], k = x - y;
    const isDown = k === -edits || (k !== edits && at(k - 1) < at(k + 1));
    const beforeX = edits ? (isDown ? at(k + 1) : at(k - 1)) : 0, beforeY = edits ? beforeX - (isDown ? k + 1 : k - 1) : 0;
    const startX = edits && !isDown ? beforeX + 1 : beforeX;
    if (x > startX) found.unshift([startX, startX - k, x - startX]);
    [x, y] = [beforeX, beforeY];
  }
  return found;
}

// --- the view

/* Hold the chosen sample, beside which the next ones are shown; or let it go. */
function hold() {
  page.held = page.held < 0 ? page.chosen : -1;
  drawList();
  if (page.chosen >= 0) showSample(page.chosen);
}

async function showPair(held, i) {
  const told = await Promise.all([held, i].map(detailOf));
  if (page.chosen !== i || page.held !== held) return;
  const buttons = barButtons(["Change sides", "the other one is held", () => { page.held = i; open(held); }],
    ["One alone", "let go of the held sample (c)", hold]);
  const [first, second] = told.map((each) => each.turns), same = told[0].input === told[1].input;
  const length = Math.max(first.length, second.length);
  el("sample").replaceChildren(
    make("div", { class: "bar" }, make("h2", {}, "Two samples"), ...buttons), factsOfPair([held, i], told),
    ...Array.from({ length }, (_, n) => (n === 0 && same ? turnOfBoth(first[0]) : turnsOfPair(n, first[n], second[n]))));
  el("sample").scrollTop = 0;
  document.body.classList.add("reading");
  markFound();
}

function factsOfPair(pair, told) {
  const c = page.columns;
  const facts = [
    ["", titleOf], ["Reward", rewardInWords], ["Advantage", (i) => number(c.advantage[i])], ["Fate", (i) => labelOf("fate", i)],
    ["Verdict", (i, n) => [labelOf("verdict", i), told[n].reason].filter(Boolean).join(": ")],
    ["Tokens", (i) => `${c.num_input_tokens[i]} read, ${c.num_output_tokens[i]} written`],
    ["Ended by", (i) => labelOf("finish_reason", i)], ["Versions", (i, n) => versionsInWords(i, told[n])],
    ["Answer", (i, n) => told[n].answer ?? ""],
  ];
  const cellOf = (text, other) => make("td", { class: text === other ? "" : "other" }, text);
  return make("table", { class: "pair-facts" }, ...facts.map(([name, value]) => {
    const [a, b] = pair.map(value);
    return make("tr", {}, make("th", { scope: "row" }, name), cellOf(a, b), cellOf(b, a));
  }));
}

const roleOf = (turn, n) => ({ environment: n ? "read" : "question", model: "written", given: "given" }[turn?.role] ?? "");
const turnOfBoth = (turn) => make("article", { class: "turn read" }, make("h3", {}, "question of both"), textOf(turn.text ?? ""));

function turnsOfPair(n, ...turns) {
  const sides = page.isFormatted ? [[], []] : differences(...turns.map((turn) => turn?.text ?? ""));
  return make("div", { class: "pair" }, ...turns.map((turn, side) => {
    const parts = sides[side].map(([text, isOwn]) => (isOwn ? make("mark", { class: side ? "right" : "left" }, text) : text));
    return make("article", { class: `turn ${turn?.role === "environment" ? "read" : "written"}` },
      make("h3", {}, roleOf(turn, n) || "no such turn", make("small", {}, turn ? `${turn.num_tokens} tokens` : "")),
      textOf(page.isFormatted ? turn?.text ?? "" : parts));
  }));
}

if (typeof module !== "undefined") module.exports = { differences };
