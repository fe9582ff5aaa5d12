/* One sample: its facts, its group, its turns and their tokens. */

async function showSample(i) {
  if (page.held >= 0 && page.held !== i) return showPair(page.held, i);
  const told = await detailOf(i);
  if (page.chosen !== i) return;  // another was chosen meanwhile
  const rows = (told.rows || []).map((row, number) => withWeights(i, told, row, number));
  history.replaceState(null, "", `#${addressOf(i)}`);
  const hint = isHeldOut(i) ? "Held-out answers are dumped without their tokens: nothing was trained on them."
    : page.isFormatted && rows.length ? "Tokens are shown with texts as they are (m)." : rows.length
    ? "Choose a token, by a click or with the arrow keys, to see how its weight came about."
    : "A run with --dump-token-columns dumps its tokens: then each has a colour and a provenance here.";
  el("sample").replaceChildren(headOf(i), factsOf(i, told), groupOf(i), ...coloursOf(page.isFormatted ? [] : rows), ...turnsOf(i, told, rows),
    make("section", { id: "provenance", "aria-live": "polite" }, make("p", { class: "hint" }, hint)));
  el("sample").scrollTop = 0;
  document.body.classList.add("reading");
  if (!page.isFormatted) colour(rows);
  markFound();
}

function titleOf(i) {
  const c = page.columns, attempt = c.attempt[i] ? `, attempt ${c.attempt[i] + 1}` : "";
  if (isHeldOut(i)) return `After step ${c.step[i]}, ${labelOf("set", i)} question ${c.ordinal[i]}, member ${c.index[i]}`;
  return `Step ${c.step[i]}, slot ${c.ordinal[i]}, member ${c.index[i]}${attempt}`;
}

function headOf(i) {
  return make("div", { class: "bar" }, make("h2", {}, titleOf(i)),
    ...barButtons([page.held === i ? "Held: choose another" : "Compare", "hold it, and show the next one beside it (c)", hold],
      ["Its question", "the question's solve rate over time (q)", () => openQuestion(i)]));
}

function barButtons(...buttons) {
  const isOn = String(page.isFormatted);
  return [make("span", { class: "buttons" },
    make("button", { type: "button", title: "markdown and LaTeX, or the texts as they are (m)", "aria-pressed": isOn, onclick: format }, "Formatted"),
    ...buttons.map(([text, title, onclick]) => make("button", { type: "button", title, onclick }, text)),
    make("button", { type: "button", class: "close", onclick: leaveSample }, "Back"))];
}

async function openQuestion(i) {
  page.chosenQuestion = page.columns.question[i];
  lookAt("questions");
  if (page.at >= 0) await choose(page.at);
  else await showQuestion(byQuestion(page.every).find((row) => row.question === page.chosenQuestion));
}

function leaveSample() {
  document.body.classList.remove("reading");
  el("scroll").focus();
}

function factsOf(i, told) {
  const c = page.columns;
  const facts = [
    ["Fate", labelOf("fate", i)],
    ["Verdict", [labelOf("verdict", i), told.reason].filter(Boolean).join(": ")],
    ["Reward", rewardInWords(i)],
    ["Graded by", page.header.labels.adapter[c.adapter[i]]],
    ["Advantage", number(c.advantage[i])],
    ["Type", page.header.labels.dataset_type[c.dataset_type[i]]],
    ["Tokens", `${c.num_input_tokens[i]} read, ${c.num_output_tokens[i]} written`],
    ["Ended by", labelOf("finish_reason", i)],
    ["Worker", (told.workers || []).join(", ")],
    ["Versions", versionsInWords(i, told)],
    ["Trained in", placeInWords(i)],
    ["Answer", told.answer ?? ""],
  ].filter(([, value]) => value !== "" && value !== "–");
  return definitions(facts);
}

function definitions(facts) {
  return make("dl", { class: "facts" },
    ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

function rewardInWords(i) {
  const c = page.columns, parts = [number(c.reward[i])];
  for (const name of ["overlong_penalty", "kl_penalty"]) {
    if (c[name][i]) parts.push(`− ${number(c[name][i])} (${name.replace("_", " ")})`);
  }
  const format = Number.isNaN(c.format_reward[i]) ? "" : `; format ${number(c.format_reward[i])}`;
  return parts.join(" ") + (parts.length > 1 ? ` = ${number(shaped(i))}` : "") + format;
}

const shaped = (i) => page.columns.reward[i] - page.columns.overlong_penalty[i] - page.columns.kl_penalty[i];

function versionsInWords(i, told) {
  const parts = told.spans.map(([version, from, to]) => `${batchOf(version)} (tokens ${from}–${to - 1})`);
  return parts.length ? `${parts.join(", ")}; of batch ${page.columns.batch[i]}` : "";
}

function placeInWords(i) {
  const { round, rank } = page.columns;
  return rank[i] === NONE ? "" : `round ${round[i]}, by rank ${rank[i]}`;
}

function membersOf(i) {
  const { ordinal, attempt, batch, set } = page.columns, found = [];
  const isOfGroup = (k) => ordinal[k] === ordinal[i] && attempt[k] === attempt[i] && batch[k] === batch[i] && set[k] === set[i];
  let low = i, high = i;  // a group is written at once
  while (low > 0 && isOfGroup(low - 1)) low--;
  while (high + 1 < ordinal.length && isOfGroup(high + 1)) high++;
  for (let k = low; k <= high; k++) found.push(k);
  return found;
}

function groupOf(i) {
  return make("nav", { class: "group", "aria-label": "The group" }, make("span", {}, "Rewards of the group"),
    ...membersOf(i).map((k) => rewardButton(k, k === i)));
}

function rewardButton(k, isCurrent) {
  const c = page.columns;
  return make("button", { type: "button", "aria-current": String(isCurrent === true), onclick: () => open(k),
    title: `member ${c.index[k]}: reward ${number(c.reward[k])}, advantage ${number(c.advantage[k])}`,
  }, number(c.reward[k], 2));
}

/* What the model read and wrote, in order; tokens where the dump has them. */
function turnsOf(i, told, rows) {
  const ends = {}, isLong = told.turns.length > 2;  // ends of the turns shown, by row
  return told.turns.map((turn, n) => {
    const isRead = turn.role === "environment", row = rows[turn.row];
    const isPrompt = isRead && !(turn.row in ends);  // which is not among its row's output tokens
    const from = ends[turn.row] ?? 0, to = isPrompt ? 0 : from + (turn.num_tokens ?? 0);
    ends[turn.row] = to;
    const notes = [`${turn.num_tokens} tokens`, turn.row && `row ${turn.row}`,
      isLong && turn.finish_reason && `ended by ${turn.finish_reason}`, isLong && turn.worker].filter(Boolean);
    const hasTokens = row && !page.isFormatted && to > from && to <= row.tokens.length;
    const body = textOf(hasTokens ? tokensOf(i, told, rows, turn.row, from, to) : turn.text ?? "");
    return make("article", { class: `turn ${isRead ? "read" : "written"}` },
      make("h3", {}, roleOf(turn, n), make("small", {}, notes.join(", "))), body);
  });
}

function textOf(content) {
  const isFormatted = page.isFormatted && typeof content === "string";
  const body = isFormatted ? markdownOf(content).map(grown) : [content].flat();
  return make("div", { class: isFormatted ? "text formatted" : "text", dir: "auto" }, ...body);
}

/* Markdown and formulas as a reader of a book has them, or texts as they are. */
function format() {
  page.isFormatted = !page.isFormatted;
  const row = page.view === "questions" && page.questions[page.at];
  if (row) showQuestion(row); else if (page.chosen >= 0) showSample(page.chosen);
}

function tokensOf(i, told, rows, number, from, to) {
  const row = rows[number], nodes = [];
  for (let t = from; t < to; t++) {
    const text = visible(row.tokens[t]).replace(/\n/g, "↵\n");
    const token = make("span", { class: row.mask[t] === "1" ? "token" : "token masked", tabindex: "-1" }, text || "∅");
    token.at = [number, t];
    token.onclick = () => {
      el("sample").querySelector(".token[aria-current]")?.removeAttribute("aria-current");
      token.setAttribute("aria-current", "true");
      showProvenance(i, told, rows, token.at);
      token.focus({ preventScroll: true });
      token.scrollIntoView({ block: "nearest" });
    };
    nodes.push(token);
  }
  if (nodes.length) nodes[0].tabIndex = 0;
  return nodes;
}

function tokenKeys(event) {
  const move = { ArrowLeft: -1, ArrowRight: 1, Enter: 0 }[event.key];
  if (!event.target.classList?.contains("token") || move === undefined) return;
  const all = [...el("sample").querySelectorAll(".token")];
  all[all.indexOf(event.target) + move]?.click();
  event.preventDefault();
}
