"""The schema of `training_metrics.jsonl`: every metric, declared once.

A metric is a quotient of two sums (or one sum, or one fact of the step), so that it cannot depend
on how samples were spread over ranks and minibatches. `docs/metrics.md` is made from this table.
"""

from __future__ import annotations

from async_grpo.types.metrics import Metric, Unit, Window


def _plain(name: str, unit: Unit, label: str, meaning: str, *, window: Window = "step") -> Metric:
    return Metric(name, name, "", unit, label, meaning, window)


# fmt: off
# Facts of the gradient step, as trainer rank 0 knows them.
STEP_METRICS = (
    _plain("step", "steps", "Gradient step", "gradient steps of the run so far", window="run"),
    _plain("iteration", "batches", "Batch", "the batch that the step belongs to", window="run"),
    _plain("total_samples_accumulated", "samples", "Samples",
           "samples of the gradient steps so far, taken or skipped", window="run"),
    _plain("total_tokens", "tokens", "Tokens",
           "unmasked output tokens of these samples", window="run"),
    _plain("total_seconds", "seconds", "Run time",
           "wall clock of the run so far, resumed parts included", window="run"),
    _plain("optimizer_steps", "steps", "Optimizer steps",
           "gradient steps really taken: the clock of --schedule-clock steps", window="run"),
    _plain("optimizer_samples", "samples", "Samples in optimizer steps",
           "samples counted in these: the clock of --schedule-clock samples", window="run"),
    _plain("skipped_steps_no_samples", "steps", "Steps without samples",
           "gradient steps skipped because no sample counted", window="run"),
    _plain("skipped_steps_non_finite", "steps", "Steps not finite",
           "gradient steps skipped because a loss or the gradient was not finite", window="run"),
    _plain("grad_norm", "", "Gradient norm", "global gradient norm before clipping"),
    _plain("learning_rate", "", "Learning rate", "learning rate that the step used"),
    _plain("seconds", "seconds", "Time per step", "wall clock since the previous step ended"),
    _plain("seconds_waiting", "seconds", "Waiting", "of these, rank 0 waited for samples"),
    _plain("seconds_publishing", "seconds", "Publishing", "of these, rank 0 published weights"),
    _plain("seconds_checkpointing", "seconds", "Checkpointing",
           "of these, rank 0 copied what a checkpoint holds, or waited for the one before"),
    _plain("failed_checkpoints", "checkpoints", "Failed checkpoints",
           "checkpoints that could not be written; training went on", window="run"),
    Metric("trainer_idle_fraction", "seconds_waiting", "seconds", "fraction", "Trainer idle",
           "share of the step in which rank 0 waited for samples"),
    _plain("batcher_restarts", "restarts", "Batcher restarts",
           "times that the controller was lost and the unfinished step was done again",
           window="run"),
    _plain("sync_batches", "batches", "Latest sync",
           "batches in the weights whose sync was the latest to finish: what follows is of it",
           window="run"),
    _plain("sync_seconds", "seconds", "Sync",
           "from announcing new weights to the last worker's acknowledgement; training goes on"),
    _plain("sync_pause_seconds", "seconds", "Generation paused",
           "of these, generation stood still, on the worker where it did so for longest"),
    _plain("sync_bytes", "bytes", "Weights sent",
           "what each worker loaded; 0 where it had the same weights already"),
    _plain("recomputed_tokens", "tokens", "Recomputed tokens",
           "tokens of running requests whose KV cache the sync threw away, over all workers"),
    _plain("canary_max", "nats", "Largest canary mismatch",
           "largest difference in log-probability between engine and trainer on fixed tokens, "
           "scored with the same weights right after the sync: no staleness in it"),
    _plain("canary_mean", "nats", "Canary mismatch", "mean of these differences"),
)

# Sums of the batcher over all samples of the step: trained and zero contribution.
PIPELINE_METRICS = (
    _plain("num_samples", "samples", "Samples per step", "samples that count in the step"),
    _plain("num_groups", "questions", "Questions per step", "questions that count in the step"),
    Metric("avg_reward", "reward_sum", "num_samples", "", "Mean reward",
           "reward of a sample, as its verifier gave it"),
    Metric("avg_max_reward_in_group", "max_reward_in_group_sum", "num_groups", "",
           "Best reward of a group", "best reward among the samples of a question"),
    Metric("avg_format_reward", "format_reward_sum", "format_reward_samples", "",
           "Format reward", "format reward of the samples whose verifier gives one"),
    Metric("avg_overlong_penalty", "overlong_penalty_sum", "num_samples", "",
           "Overlong penalty", "taken from a sample's reward for its length, before advantages"),
    Metric("avg_kl_penalty", "kl_penalty_sum", "num_samples", "",
           "KL penalty", "taken from a sample's reward for its k1 to the reference model"),
    Metric("avg_output_tokens", "output_tokens", "num_samples", "tokens", "Output length",
           "length of an output"),
    Metric("avg_prompt_tokens", "prompt_tokens", "num_samples", "tokens", "Prompt length",
           "length of a sample's prompt"),
    Metric("perc_truncated_samples", "truncated_samples", "num_samples", "fraction",
           "Truncated samples", "share (0 to 1) of samples cut at the longest output"),
    Metric("perc_masked_samples", "masked_samples", "num_samples", "fraction", "Masked samples",
           "share (0 to 1) of samples without a trained token, as --mask-truncated-samples makes "
           "those cut: in the baseline and in D, with 0 tokens"),
    Metric("perc_with_0_advantage", "zero_advantage_samples", "num_samples", "fraction",
           "Samples without advantage", "share (0 to 1) of samples whose advantage is exactly 0"),
    Metric("perc_unscorable_samples", "unscorable_samples", "num_samples", "fraction",
           "Unscorable samples", "share (0 to 1) of samples in which no answer was found"),
    Metric("perc_timed_out_samples", "timed_out_samples", "ended_samples", "fraction",
           "Timed-out samples", "share (0 to 1) of samples dropped because their group took longer "
           "than --generation-timeout-s, of all that ended in the step; null when there are none"),
    Metric("perc_overrun_samples", "overrun_samples", "num_samples", "fraction", "Overruns",
           "share (0 to 1) of samples, unscorable too, on which a reward reached its limit of time "
           "or memory, twice"),
    Metric("perc_failed_samples", "failed_samples", "finished_samples", "fraction",
           "Failed samples", "share (0 to 1) of samples that were dropped with their group, as it "
           "could not be sampled, graded or scored, of these and the samples that count"),
    Metric("avg_lag", "lag_sum", "sampled_samples", "batches", "Mean lag",
           "age of a sample's oldest token, in versions of the weights"),
    Metric("avg_token_lag", "token_lag_sum", "output_tokens", "batches", "Mean lag of a token",
           "age of an output token, in versions of the weights"),
    Metric("max_lag", "lag_max", "", "batches", "Largest lag",
           "age of the oldest token of any sample, in versions of the weights"),
    Metric("tokens_per_second", "output_tokens", "seconds", "1/s", "Output tokens",
           "output tokens of the step's samples by wall clock"),
    Metric("samples_per_second", "num_samples", "seconds", "1/s", "Samples",
           "samples of the step by wall clock"),
    Metric("generator_idle_fraction", "generating_idle_seconds", "pipeline_seconds", "fraction",
           "Generators idle", "share of the time in which no sample was being generated, or queued "
           "for it: generators stood at the edge of the staleness window"),
    Metric("verifier_idle_fraction", "verifying_idle_seconds", "pipeline_seconds", "fraction",
           "Verifiers idle", "share of the time in which no sample was being verified"),
    Metric("reference_idle_fraction", "in_reference_idle_seconds", "pipeline_seconds", "fraction",
           "Reference idle", "share of the time in which the reference had nothing to score"),
    _plain("reference_retries", "samples", "Scored again",
           "samples sent to another reference worker after one failed; outputs that were sampled "
           "again are counted by reason, as `discarded_<reason>`"),
    _plain("unwritten_samples", "samples", "Samples not dumped",
           "samples that --dump-samples-filename lacks, for the disk refused them or was too slow; "
           "counted since the controller began the run", window="run"),
    Metric("avg_generating_samples", "generating_seconds", "pipeline_seconds", "samples",
           "Samples in generation", "samples being generated, or queued for it, at a time"),
)

# Sums of the batcher over the groups that dynamic sampling replaced, within the same step.
REPLACEMENT_METRICS = (
    _plain("num_replacements", "questions", "Replacements",
           "questions drawn because a group had no variance in its rewards"),
    _plain("replaced_tokens", "tokens", "Replaced tokens",
           "output tokens of the samples replaced: generated, and not trained"),
    Metric("avg_replaced_reward", "replaced_reward_sum", "replaced_samples", "",
           "Reward of replaced samples", "reward of a sample that was replaced"),
)

# Sums of the trainer ranks over the tokens trained: samples of zero contribution are never sent.
TRAINER_METRICS = (
    Metric("loss", "loss_sum", "loss_denominator", "", "Loss",
           "the objective that was minimised: weighted token losses by D of the aggregation"),
    Metric("policy_loss", "policy_loss_sum", "loss_denominator", "", "Policy loss",
           "the policy's part of the loss, weighted in the same way"),
    Metric("kl", "kl_sum", "loss_denominator", "nats", "KL to reference",
           "estimated KL divergence from the reference model, weighted in the same way; null where "
           "the loss has no such term"),
    Metric("entropy", "entropy_sum", "trained_tokens", "nats", "Entropy",
           "entropy of the policy at the sampling temperature, a token"),
    Metric("clip_fraction", "clipped_tokens", "sampled_tokens", "fraction", "Clipped tokens",
           "share of tokens whose policy gradient was clipped away"),
    Metric("mismatch_kl", "mismatch_kl_sum", "sampled_tokens", "nats", "Engine mismatch",
           "KL (k3) between engine and trainer on the sampled tokens, a token"),
    Metric("mismatch_max", "mismatch_max", "", "nats", "Largest engine mismatch",
           "largest difference in log-probability between the two, of any token"),
    Metric("mismatch_ratio_max", "mismatch_ratio_max", "", "", "Largest engine ratio",
           "largest probability of a token under the trainer by that under the engine"),
    Metric("effective_sample_size", "effective_tokens", "sampled_tokens", "fraction",
           "Effective sample size",
           "(sum of that ratio) squared by the sum of its squares, as a share of the tokens"),
    Metric("corrected_fraction", "corrected_tokens", "sampled_tokens", "fraction",
           "Corrected tokens",
           "share of tokens whose importance weight was truncated or masked"),
    Metric("far_fraction", "far_tokens", "sampled_tokens", "fraction", "Tokens beyond 20 nats",
           "share of tokens more than 20 nats above the old policy, or below the reference where "
           "the loss has a KL term: exponents are clamped at 20"),
    _plain("trained_samples", "samples", "Trained samples", "samples sent to trainers"),
    _plain("trained_tokens", "tokens", "Trained tokens", "unmasked output tokens of these"),
    _plain("num_minibatches", "minibatches", "Minibatches",
           "forward and backward passes of all ranks, fillers included"),
    _plain("num_fillers", "minibatches", "Fillers",
           "passes without samples, made to keep the ranks in step"),
    Metric("packing_efficiency", "packed_tokens", "budget_tokens", "fraction",
           "Packing efficiency", "prompt and output tokens by the token budget of all passes"),
    Metric("trained_tokens_per_second", "trained_tokens", "seconds", "1/s", "Trained tokens",
           "unmasked output tokens trained by wall clock"),
)

# Sums of one pass over the held-out questions: a line of `evaluation_metrics.jsonl`.
EVALUATION_METRICS = (
    Metric("eval_accuracy", "num_correct", "num_samples", "fraction", "Held-out accuracy",
           "share of samples with the full reward of 1"),
    Metric("eval_reward", "reward_sum", "num_samples", "", "Held-out reward",
           "reward of a sample"),
    Metric("eval_solved", "num_solved", "num_questions", "fraction", "Held-out questions solved",
           "share of questions with at least one correct sample"),
    Metric("eval_loss", "loss_sum", "num_tokens", "nats", "Held-out loss",
           "with --algorithm sft: cross-entropy of the held-out pairs, a trained token"),
)
# fmt: on

METRICS = STEP_METRICS + PIPELINE_METRICS + REPLACEMENT_METRICS + TRAINER_METRICS
METRIC_BY_NAME = {metric.name: metric for metric in METRICS + EVALUATION_METRICS}


def axis_label(name: str) -> str:
    """What a plot writes at the axis of `name`, with the unit; the name itself if unknown.

    >>> axis_label("avg_output_tokens"), axis_label("tokens_per_second"), axis_label("my_metric")
    ('Output length (tokens)', 'Output tokens per second', 'my_metric')
    """
    metric = METRIC_BY_NAME.get(name)
    if metric is None:
        return name
    if metric.unit == "1/s":
        return f"{metric.label} per second"
    has_unit = metric.unit in ("tokens", "batches", "seconds", "nats", "bytes")
    shown = has_unit and metric.window == "step"
    return f"{metric.label} ({metric.unit})" if shown else metric.label
