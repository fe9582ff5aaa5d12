/* Tokens in colour, and how the weight of one came about. */

/* The row with what is computed of each token: `own[t]`, null of one that is not trained. */
function withWeights(i, told, row, number) {
  const c = page.columns, step = page.steps.get(c.step[i]);
  const config = { ...page.header.config, mode: step?.ratio_mode };
  const trained = [...row.mask].flatMap((bit, t) => (bit === "1" ? [t] : []));
  const before = told.rows.slice(0, number);
  const start = before.reduce((total, other) => total + other.tokens.length, 0);
  const advantages = trained.map((t) => told.advantages?.[start + t] ?? c.advantage[i]);
  const pick = (values) => values && trained.map((t) => values[t]);
  const versions = Array(row.tokens.length).fill(null);
  for (const [version, from, to] of row.versions || []) versions.fill(version, from, to);
  const weights = row.logprobs && row.behaviour && config.mode ? tokenWeights(config, {
    w: c.weight[i], advantages, logprobs: row.logprobs, old: row.old,
    behaviour: pick(row.behaviour), reference: pick(row.reference), teacher: pick(row.teacher),
  }) : [];
  const own = Array(row.tokens.length).fill(null);
  if (row.behaviour) trained.forEach((t, n) => { own[t] = { n, advantage: advantages[n], ...weights[n] }; });
  return { ...row, config, versions, own, D: denominatorOf(step, config), clip: clipOf(step, config) };
}

function denominatorOf(step, config) {
  return step && (config.aggregation === "token-mean" ? step.num_tokens : step.num_samples);
}

/* By what training/step.py cuts a gradient whose norm is too large. */
function clipOf(step, config) {
  const limit = config.max_grad_norm;
  return step?.grad_norm && limit ? Math.min(1, limit / (step.grad_norm + 1e-6)) : 1;
}

const weightOf = (row, own) => (-own.gradient / row.D) * row.clip;

/* What a token is coloured by; undefined: not known. */
function valueOf(i, row, t, by) {
  if (by === "version") return row.versions[t] === null ? undefined : lagOf(i, row.versions[t]);
  const own = row.own[t];
  if (by === "advantage") return own?.advantage;
  if (own?.lp === undefined) return undefined;
  return by === "difference" ? own.lp - row.behaviour[t] : weightOf(row, own);
}

const batchOf = (version) => Number(String(version).split(".").pop());
const lagOf = (i, version) => page.columns.batch[i] - batchOf(version);

function coloursOf(rows) {
  if (!rows.length) return [];
  const select = make("select", { id: "colouring", onchange: () => {
    page.colouring = select.value;
    colour(rows);
  } }, ...Object.entries(COLOURINGS).map(([value, text]) =>
    make("option", { value, selected: value === page.colouring && "" }, text)));
  return [make("p", { class: "legend" }, make("label", {}, "Tokens coloured by ", select), make("span", { id: "legend" }))];
}

function colour(rows) {
  if (!rows.length) return;
  const by = page.colouring, tokens = [...el("sample").querySelectorAll(".token")];
  const values = tokens.map(({ at: [number, t] }) => (by ? valueOf(page.chosen, rows[number], t, by) : undefined));
  const known = values.filter((value) => Number.isFinite(value));
  const largest = known.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  tokens.forEach((token, k) => {
    const share = Number.isFinite(values[k]) && largest ? values[k] / largest : 0;
    const strength = (0.12 + 0.6 * Math.abs(share)).toFixed(3);
    token.style.backgroundColor = share ? `rgb(var(--${share > 0 ? "plus" : "minus"}) / ${strength})` : "";
    token.title = values[k] === undefined ? "" : number(values[k]);
  });
  if (!by) return el("legend").replaceChildren();
  if (!known.length) return el("legend").replaceChildren("not in the dump for this sample");
  el("legend").replaceChildren(make("i", { class: "key minus" }), "below 0 ", make("i", { class: "key plus" }),
    `above 0; ${number(least(known), 3)} to ${number(most(known), 3)}`);
}

function showProvenance(i, told, rows, [at, t]) {
  const row = rows[at], c = page.columns, own = row.own[t], version = row.versions[t];
  const worker = told.turns.length > 2 ? "" : told.workers?.[0] ?? "";
  const sampled = version === null ? "not by the policy: it was given or read" :
    `with version ${batchOf(version)} of run ${version.split(".")[0]}, ${lagOf(i, version)} behind batch ${c.batch[i]}` +
    `${worker && `, by ${worker}`}; ` +
    `log-probability b = ${number(row.behaviour?.[t], 7)}`;
  const verdict = `${labelOf("verdict", i) || "none"}${told.reason ? `: ${told.reason}` : ""}; reward ${rewardInWords(i)}`;
  const lines = [
    ["Token", `${t} of row ${at}, slot ${c.ordinal[i]}, attempt ${c.attempt[i]}, member ${c.index[i]}: “${row.tokens[t]}”`],
    ["Sampled", sampled],
    ["Verdict", verdict],
    ["Fate", [labelOf("fate", i), placeInWords(i)].filter(Boolean).join(", ")],
    ...(own ? [advantageInWords(i, told, own), ...weightInWords(i, row, own)]
      : [["Weight", "0 in the policy's loss: the token is masked or given, it is read and not sampled"]]),
  ];
  const part = (text) => make("div", {}, text);
  el("provenance").replaceChildren(make("h3", {}, "How this token is weighed"), make("table", {}, ...lines.map(
    ([name, ...text]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, ...text.map(part))))));
}

/* algorithms/grpo.py with the rewards of the group, without outputs that were left out of it. */
function advantageInWords(i, told, own) {
  const n = (value) => number(value, 5), method = page.header.config.advantage;
  const counts = (k) => labelOf("fate", k) !== "discarded";
  const rewards = membersOf(i).filter(counts).map(shaped), size = rewards.length, centre = mean(rewards);
  if (told.advantages || Number.isNaN(centre) || !["grpo", "dr", "rloo"].includes(method)) {
    return ["Advantage", `A = ${number(own.advantage, 7)}, of the algorithm`];
  }
  const centred = shaped(i) - centre, words = `(${n(shaped(i))} − ${n(centre)})`;
  const std = Math.sqrt(sum(rewards.map((r) => (r - centre) ** 2)) / (size - 1));
  const [formula, value] = {
    grpo: [`(r − mean) / (std + 0.0001) = ${words} / (${n(std)} + 0.0001)`, centred / (std + 1e-4)],
    dr: [`r − mean = ${words}`, centred],
    rloo: [`(r − mean) · n / (n − 1) = ${words} · ${size} / ${size - 1}`, (centred * size) / (size - 1)],
  }[method];
  const found = rewards.every((r) => r === rewards[0]) ? 0 : value;
  const isSame = Math.abs(found - own.advantage) < 1e-6 || page.header.config.algorithm === "distillation";
  return ["Advantage", `A = ${formula} = ${number(found, 7)}`,
    `rewards of the group: ${rewards.map((r) => number(r, 3)).join(", ")}`,
    ...(isSame ? [] : [`the trainer had A = ${number(own.advantage, 7)}: the algorithm has another formula, or the dump lacks a part of the group`])];
}

function weightInWords(i, row, own) {
  const { config } = row, n = (value) => number(value, 6);
  const share = ["Share", shareInWords(i, config)];
  if (own.lp === undefined) {
    const plain = row.D ? `; at a ratio of 1 it would be w · A / D = ${n((page.columns.weight[i] * own.advantage) / row.D)}` : "";
    return [share, ["Weight", `what the trainer computed of this token is not in the dump${plain}`]];
  }
  const factors = `−f · ratio · A${own.policy === 0 && own.advantage ? " = 0" : ""}`;
  const kl = config.kl_coefficient && config.kl_estimator !== "k1";
  const norm = row.clip === 1 ? "" : ` · ${n(row.clip)}`;
  return [share,
    ["Ratio", ...ratioInWords(config, own)],
    ["Correction", correctionInWords(config, own)],
    ["D", `${row.D} ${config.aggregation === "token-mean" ? "tokens" : "samples"} of step ${page.columns.step[i]}`],
    ...(norm ? [["Norm", `the gradient was longer than ${config.max_grad_norm}, and is cut: ${norm}`]] : []),
    ["Gradient", `d loss / d lp = w · (${factors}${kl ? " + β · d kl / d lp" : ""})`,
      `= ${n(page.columns.weight[i])} · (${n(own.policy)}${kl ? ` + ${n(own.kl)}` : ""}) = ${n(own.gradient)}`,
      trainersInWords(row, own)],
    ["Weight", `−gradient / D${norm} = ${n(-own.gradient)} / ${row.D}${norm} = ${n(weightOf(row, own))}`],
  ];
}

function shareInWords(i, config) {
  const { num_trained_tokens: lengths, weight } = page.columns;
  return {
    "sample-mean": `w = 1 / L = 1 / ${lengths[i]} trained tokens = ${number(weight[i], 6)}`,
    "token-mean": "w = 1, for D counts tokens",
    constant: `w = 1 / ${config.constant_length_samples} = ${number(weight[i], 6)}`,
  }[config.aggregation];
}

function ratioInWords(config, own) {
  const n = (value) => number(value, 6);
  const against = { behaviour: "b", decoupled: "the policy at the start of the batch", on_policy: "the policy itself" }[config.mode];
  const formula = config.ratio_level === "sequence" ? "exp(mean of lp − old over the sample)" : "exp(lp − old)";
  const bounds = `[${n(1 - config.clip_low)}, ${n(1 + config.clip_high)}]`;
  const cut = { true: config.policy_loss === "cispo" ? `bounded by ${bounds}` : `clipped by ${bounds}: no gradient`,
    false: `not clipped by ${bounds}` }[own.clipped];
  return [`lp = ${n(own.lp)} when it was trained; old = ${n(own.old)}: ${against}`, `${formula} = ${n(own.ratio)}, ${cut}`];
}

function correctionInWords(config, own) {
  if (config.importance_correction === "none") return "f = 1: none";
  const cut = own.corrected ? ", cut" : "";
  return `f = ${number(own.factor, 6)}${cut} (${config.importance_correction}, by ${config.correction_level})`;
}

function trainersInWords(row, own) {
  if (!row.gradients) return "";
  const theirs = row.gradients[own.n];
  const isSame = Math.abs(theirs - own.gradient) <= 1e-4 * Math.abs(own.gradient) + 1e-7;
  return `the trainer's own was ${number(theirs, 6)}: ${isSame ? "the same" : "another, for its loss has terms that this page does not know"}`;
}
