"use strict";
/* What each trained token of a row adds to the gradient: algorithms/grpo_loss.py as plain
 * numbers.
 *
 *   d loss / d lp = w * ( f * d policy / d lp + kl_coefficient * d kl / d lp )
 *   weight        = -(d loss / d lp) / D: by how much the step pushes the token's log-probability up
 *
 * row: { w, advantages, logprobs, old, behaviour, reference, teacher }, arrays over the row's trained
 * tokens; `old` only where the policy has moved since its batch began, `logprobs` the trainer's.
 */
const MAX_EXPONENT = 20;

function tokenWeights(config, row) {
  const old = config.mode === "behaviour" ? row.behaviour
    : (config.mode === "decoupled" && row.old) || row.logprobs;
  const differences = row.logprobs.map((lp, t) => lp - old[t]);
  const ratios = bySequence(config.ratio_level, differences, mean).map((x) => Math.exp(bounded(x)));
  const corrections = correctionsOf(config, old.map((value, t) => value - row.behaviour[t]));
  const tokens = row.logprobs.map((lp, t) => {
    const advantage = followed(config, row, t);
    const [slope, clipped] = policySlope(config, ratios[t], advantage);
    const { factor, corrected } = corrections[t];
    return { lp, old: old[t], difference: differences[t], ratio: ratios[t], advantage, clipped,
             factor, corrected, policy: factor * slope, kl: klSlope(config, row, t, differences[t]) };
  });
  if (config.ratio_level === "sequence") {  // a token moves the ratio of all of them
    const shared = mean(tokens.map((token) => token.policy));
    for (const token of tokens) token.policy = shared;
  }
  for (const token of tokens) token.gradient = row.w * (token.policy + token.kl);
  return tokens;
}

/* A teacher's log-probability may be a part of the advantage (algorithms/distillation_loss.py). */
function followed(config, row, t) {
  const own = row.advantages[t];
  if (config.algorithm !== "distillation" || !row.teacher) return own;
  const gap = row.teacher[t] - row.logprobs[t], bound = config.opd_clip || Infinity;
  return own * config.reward_coefficient
    + config.opd_coefficient * Math.min(Math.max(gap, -bound), bound);
}

/* d policy / d lp, and whether a clip has cut it (or, of cispo, bounded it). */
function policySlope(config, ratio, advantage) {
  const limited = Math.min(Math.max(ratio, 1 - config.clip_low), 1 + config.clip_high);
  if (config.policy_loss === "cispo") return [-limited * advantage, limited !== ratio];
  const isFloored = config.dual_clip && advantage < 0 && ratio > config.dual_clip;
  const clipped = limited * advantage < ratio * advantage || Boolean(isFloored);
  const isFar = ratio >= Math.exp(MAX_EXPONENT);  // what is bounded there has no gradient
  return [clipped || isFar ? 0 : -ratio * advantage, clipped];
}

/* f(old / b): how far the engine's numbers are from the trainer's. */
function correctionsOf(config, differences) {
  if (config.importance_correction === "none") {
    return differences.map(() => ({ factor: 1, corrected: false }));
  }
  const { correction_low: low, correction_high: high } = config;
  return bySequence(config.correction_level, differences, sum).map((x) => {
    const ratio = Math.exp(x);
    if (config.importance_correction === "truncate") {
      return { factor: Math.min(ratio, high), corrected: ratio > high };
    }
    const corrected = ratio < low || ratio > high;
    return { factor: corrected ? 0 : ratio, corrected };
  });
}

/* kl_coefficient * d kl / d lp. */
function klSlope(config, row, t, difference) {
  if (!config.kl_coefficient || config.kl_estimator === "k1" || !row.reference) return 0;
  const x = row.reference[t] - row.logprobs[t];
  if (config.kl_estimator === "k2") return -config.kl_coefficient * x;
  const slope = x > MAX_EXPONENT ? 0 : 1 - Math.exp(x);
  if (config.kl_estimator !== "k3_iw") return config.kl_coefficient * slope;
  const ratio = Math.exp(bounded(difference));
  const kl = Math.expm1(bounded(x)) - bounded(x);
  const moves = difference > MAX_EXPONENT ? 0 : 1;
  return config.kl_coefficient * ratio * (slope + moves * kl);
}

const bounded = (x) => Math.min(x, MAX_EXPONENT);
const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => (values.length ? sum(values) / values.length : 0);

function bySequence(level, values, combine) {
  if (level !== "sequence") return values;
  const shared = combine(values);
  return values.map(() => shared);
}

if (typeof module !== "undefined") module.exports = { tokenWeights };
