"""The schema of `training_metrics.jsonl`: every metric, declared once.

A metric is a quotient of two sums (or one sum, or one fact of the step), so that it cannot depend
on how samples were spread over ranks and minibatches. `docs/metrics.md` is made from this table.
"""

from __future__ import annotations

import re
from dataclasses import replace

from async_grpo.config.option import attribute_docs
from async_grpo.types.metrics import Metric, Unit, Window


def fact(unit: Unit, label: str, *, window: Window = "step") -> Metric:
    """A metric that is a sum, or a fact of the step, of the same name."""
    return Metric("", "", "", unit, label, "", window)


def quotient(numerator: str, denominator: str, unit: Unit, label: str) -> Metric:
    """A metric that is one sum divided by another; an empty `denominator` divides by nothing."""
    return Metric("", numerator, denominator, unit, label, "")


class StepFacts:
    """Facts of the gradient step, as trainer rank 0 knows them."""

    step = fact("steps", "Gradient step", window="run")
    """gradient steps of the run so far"""
    iteration = fact("batches", "Batch", window="run")
    """the batch that the step belongs to"""
    pass_number = fact("", "Pass over the batch")
    """which of --num-passes the step belongs to, from 1; rows of later ones describe and count the
    same samples again, but for those that were not trained"""
    drift_steps = fact("steps", "Steps since the batch began")
    """gradient steps of the batch before this one, of all passes: by these the weights are newer
    than those of the batch's start, to which lags are counted"""
    total_samples_accumulated = fact("samples", "Samples", window="run")
    """samples of the gradient steps so far, taken or skipped; in however many passes, once"""
    total_tokens = fact("tokens", "Tokens", window="run")
    """unmasked output tokens of these samples"""
    total_seconds = fact("seconds", "Run time", window="run")
    """wall clock of the run so far, resumed parts included"""
    optimizer_steps = fact("steps", "Optimizer steps", window="run")
    """gradient steps really taken: the clock of --schedule-clock steps"""
    optimizer_samples = fact("samples", "Samples in optimizer steps", window="run")
    """samples counted in these: the clock of --schedule-clock samples"""
    optimizer_tokens = fact("tokens", "Tokens in optimizer steps", window="run")
    """unmasked output tokens of these samples: the clock of --schedule-clock tokens"""
    skipped_steps_no_samples = fact("steps", "Steps without samples", window="run")
    """gradient steps skipped because no sample counted"""
    skipped_steps_non_finite = fact("steps", "Steps not finite", window="run")
    """gradient steps skipped because a loss or the gradient was not finite"""
    grad_norm = fact("", "Gradient norm")
    """global gradient norm before clipping"""
    learning_rate = fact("", "Learning rate")
    """learning rate that the step used"""
    seconds = fact("seconds", "Time per step")
    """wall clock since the previous step ended"""
    seconds_waiting = fact("seconds", "Waiting")
    """of these, rank 0 waited for samples"""
    seconds_publishing = fact("seconds", "Publishing")
    """of these, rank 0 published weights"""
    seconds_checkpointing = fact("seconds", "Checkpointing")
    """of these, rank 0 copied what a checkpoint holds, or waited for the one before"""
    seconds_evaluating = fact("seconds", "Evaluating")
    """of these, rank 0 computed the loss of held-out pairs; held-out questions are answered beside
    training"""
    failed_checkpoints = fact("checkpoints", "Failed checkpoints", window="run")
    """checkpoints that could not be written; training went on"""
    skipped_checkpoints = fact("checkpoints", "Skipped checkpoints", window="run")
    """checkpoints that were due while the one before was still being written; a later batch's
    made up for each"""
    unrecorded_minibatches = fact("minibatches", "Minibatches not recorded")
    """minibatches of the step before that --replay-max-gib lacks, for the disk refused them"""
    trainer_idle_fraction = quotient("seconds_waiting", "seconds", "fraction", "Trainer idle")
    """share of the step in which rank 0 waited for samples"""
    failed_trackers = fact("trackers", "Failed trackers")
    """trackers of --trackers that were given up; training went on"""
    alarms = fact("alarms", "Alarms")
    """alarms that hold after the step; `alarms.jsonl` has them in words"""
    alarms_raised = fact("alarms", "Alarms raised", window="run")
    """alarms raised by then, those that have cleared included"""
    batcher_restarts = fact("restarts", "Batcher restarts", window="run")
    """times that the controller was lost and the unfinished step was done again"""
    parts = fact("", "Parts", window="run")
    """entries of `parts` in `training_params.json`: one more where the run went on with other
    options, or other files of the user's"""
    sync_batches = fact("batches", "Latest sync", window="run")
    """batches in the weights whose sync was the latest to finish: what follows is of it"""
    sync_seconds = fact("seconds", "Sync")
    """from announcing new weights to the last worker's acknowledgement; training goes on"""
    sync_pause_seconds = fact("seconds", "Generation paused")
    """of these, generation stood still, on the worker where it did so for longest"""
    sync_bytes = fact("bytes", "Weights sent")
    """what each worker loaded; 0 where it had the same weights already"""
    recomputed_tokens = fact("tokens", "Recomputed tokens")
    """tokens of running requests whose KV cache the sync threw away, over all workers"""
    kept_tokens = fact("tokens", "Tokens kept in caches")
    """tokens of running requests that kept their KV cache (`--keep-kv-cache`), over all workers:
    what is sampled after them is of mixed weights"""
    canary_max = fact("nats", "Largest canary mismatch")
    """largest difference in log-probability between engine and trainer on fixed tokens, scored with
    the same weights right after the sync: no staleness in it"""
    canary_mean = fact("nats", "Canary mismatch")
    """mean of these differences"""
    canary_routing_mismatch = fact("fraction", "Canary routing mismatch")
    """share of an engine's choices of experts on these tokens that are not the trainer's; null for
    a dense model"""
    merge_loss = fact("fraction", "Lost in merging")
    """norm of what rounding to the published type takes of an adapter's change of the weights, by
    the norm of that change, over sampled numbers; null without an adapter that is merged"""


class Pipeline:
    """Over all samples of the step: trained and of zero contribution."""

    num_samples = fact("samples", "Samples per step")
    """samples that count in the step, but for those of the next line"""
    given_samples = fact("samples", "Given samples per step")
    """samples of --pairs-path, and reference answers that are trained, which count in the step:
    nobody sampled them, no other metric of this section holds them"""
    num_groups = fact("questions", "Questions per step")
    """questions that count in the step"""
    avg_reward = quotient("reward_sum", "num_samples", "", "Mean reward")
    """reward of a sample, as its verifier gave it"""
    avg_max_reward_in_group = quotient(
        "max_reward_in_group_sum", "num_groups", "", "Best reward of a group"
    )
    """best reward among the samples of a question"""
    avg_ref_reward = quotient("ref_reward_sum", "ref_answers", "", "Reward of reference answers")
    """reward of a question's reference answer (--use-ref-answers)"""
    avg_format_reward = quotient("format_reward_sum", "format_reward_samples", "", "Format reward")
    """format reward of the samples whose verifier gives one"""
    avg_overlong_penalty = quotient("overlong_penalty_sum", "num_samples", "", "Overlong penalty")
    """taken from a sample's reward for its length, before advantages"""
    avg_kl_penalty = quotient("kl_penalty_sum", "num_samples", "", "KL penalty")
    """taken from a sample's reward for its k1 to the reference model"""
    perc_correct_samples = quotient("correct_samples", "num_samples", "fraction", "Correct samples")
    """share (0 to 1) of samples with the full reward of 1"""
    avg_output_tokens = quotient("output_tokens", "num_samples", "tokens", "Output length")
    """length of an output"""
    avg_prompt_tokens = quotient("prompt_tokens", "num_samples", "tokens", "Prompt length")
    """length of a sample's prompt"""
    perc_truncated_samples = quotient(
        "truncated_samples", "num_samples", "fraction", "Truncated samples"
    )
    """share (0 to 1) of samples cut at the longest output"""
    perc_masked_samples = quotient("masked_samples", "num_samples", "fraction", "Masked samples")
    """share (0 to 1) of samples without a trained token, as --mask-truncated-samples makes those
    cut: in the baseline and in D, with 0 tokens"""
    perc_constrained_tokens = quotient(
        "constrained_tokens", "output_tokens", "fraction", "Constrained tokens"
    )
    """share (0 to 1) of output tokens sampled under a grammar (--constrained-outputs): read, not
    trained, and in no other metric of training"""
    perc_with_0_advantage = quotient(
        "zero_advantage_samples", "num_samples", "fraction", "Samples without advantage"
    )
    """share (0 to 1) of samples whose advantage is exactly 0"""
    perc_unscorable_samples = quotient(
        "unscorable_samples", "num_samples", "fraction", "Unscorable samples"
    )
    """share (0 to 1) of samples in which no answer was found"""
    perc_timed_out_samples = quotient(
        "timed_out_samples", "ended_samples", "fraction", "Timed-out samples"
    )
    """share (0 to 1) of samples dropped because their group took longer than
    --generation-timeout-s, --turn-timeout-s or --episode-timeout-s, of all that ended in the step;
    null when there are none"""
    perc_overrun_samples = quotient("overrun_samples", "num_samples", "fraction", "Overruns")
    """share (0 to 1) of samples, unscorable too, on which a reward reached its limit of time or
    memory, twice"""
    perc_failed_samples = quotient(
        "failed_samples", "finished_samples", "fraction", "Failed samples"
    )
    """share (0 to 1) of samples that were dropped with their group, as it could not be sampled,
    graded or scored, of these and the samples that count"""
    perc_resampled_groups = quotient(
        "resampled_groups", "sampled_groups", "fraction", "Groups sampled again"
    )
    """share (0 to 1) of groups that were sampled again, whole, as what sampled them was lost: a
    selection, for what had been sampled before is not trained; by cause as
    `perc_resampled_groups_<why>`"""
    perc_continued_groups = quotient(
        "continued_groups", "sampled_groups", "fraction", "Groups gone on with"
    )
    """share (0 to 1) of groups whose engine was lost, and with all of which another one went on
    from the tokens that they had"""
    avg_lag = quotient("lag_sum", "sampled_samples", "batches", "Mean lag")
    """age of a sample's oldest token, in versions of the weights"""
    avg_token_lag = quotient("token_lag_sum", "output_tokens", "batches", "Mean lag of a token")
    """age of an output token, in versions of the weights"""
    max_lag = quotient("lag_max", "", "batches", "Largest lag")
    """age of the oldest token of any sample, in versions of the weights"""
    tokens_per_second = quotient("output_tokens", "seconds", "1/s", "Output tokens")
    """output tokens of the step's samples by wall clock"""
    samples_per_second = quotient("num_samples", "seconds", "1/s", "Samples")
    """samples of the step by wall clock"""
    generator_idle_fraction = quotient(
        "generating_idle_seconds", "pipeline_seconds", "fraction", "Generators idle"
    )
    """share of the time in which no sample was being generated, or queued for it: generators stood
    at the edge of the staleness window"""
    verifier_idle_fraction = quotient(
        "verifying_idle_seconds", "pipeline_seconds", "fraction", "Verifiers idle"
    )
    """share of the time in which no sample was being verified"""
    reference_idle_fraction = quotient(
        "in_reference_idle_seconds", "pipeline_seconds", "fraction", "Reference idle"
    )
    """share of the time in which the reference had nothing to score"""
    reference_retries = fact("samples", "Scored again")
    """samples sent to another reference worker after one failed; outputs that were sampled again
    are counted by reason, as `discarded_<reason>`"""
    judge_answers = fact("calls", "Answers of judges")
    """what judges have answered to environments; of failed and held-out episodes too"""
    judge_tokens = fact("tokens", "Tokens of judges")
    """read and written by judges for these"""
    judge_asked_again = fact("calls", "Judges asked again")
    """of these answers, those to a question whose answer before was no verdict"""
    perc_judge_disagreements = quotient(
        "judge_disagreements", "judge_comparisons", "fraction", "Judges disagreed"
    )
    """share (0 to 1) of the questions to several judges on which their verdicts differed"""
    service_answers = fact("calls", "Answers of services")
    """what services of the user's own have answered to environments; of failed and held-out
    episodes too"""
    unwritten_samples = fact("samples", "Samples not dumped", window="run")
    """samples that --dump-samples-filename lacks, for the disk refused them or was too slow;
    counted since the controller began the run"""
    refused_lines = fact("lines", "Lines left out")
    """lines of --data-order window that could not be used when they were asked for: another of
    their window took the place; the log says what is wrong with the first"""
    avg_generating_samples = quotient(
        "generating_seconds", "pipeline_seconds", "samples", "Samples in generation"
    )
    """samples being generated, or queued for it, at a time"""
    avg_verifying_samples = quotient(
        "verifying_seconds", "pipeline_seconds", "samples", "Samples in verification"
    )
    """samples being graded, or queued for it, at a time"""
    avg_scoring_samples = quotient(
        "in_reference_seconds", "pipeline_seconds", "samples", "Samples in scoring"
    )
    """samples that a reference or a teacher scored, or that were queued for one, at a time"""


class Replacement:
    """Over the groups that dynamic sampling replaced: no other metric holds them."""

    num_replacements = fact("questions", "Replacements")
    """questions drawn because a group had no variance in its rewards"""
    replaced_tokens = fact("tokens", "Replaced tokens")
    """output tokens of the samples replaced: generated, and not trained"""
    avg_replaced_reward = quotient(
        "replaced_reward_sum", "replaced_samples", "", "Reward of replaced samples"
    )
    """reward of a sample that was replaced"""


class Trainer:
    """Over the tokens trained: samples of zero contribution are never sent."""

    loss = quotient("loss_sum", "loss_denominator", "", "Loss")
    """the objective that was minimised: weighted token losses by D of the aggregation"""
    policy_loss = quotient("policy_loss_sum", "loss_denominator", "", "Policy loss")
    """the policy's part of the loss, weighted in the same way"""
    kl = quotient("kl_sum", "loss_denominator", "nats", "KL to reference")
    """estimated KL divergence from the reference model, weighted in the same way; null where the
    loss has no such term"""
    entropy = quotient("entropy_sum", "trained_tokens", "nats", "Entropy")
    """entropy of the policy at the sampling temperature, a token"""
    clip_fraction = quotient("clipped_tokens", "sampled_tokens", "fraction", "Clipped tokens")
    """share of tokens whose policy gradient was clipped away"""
    mismatch_kl = quotient("mismatch_kl_sum", "sampled_tokens", "nats", "Engine mismatch")
    """KL (k3) between engine and trainer on the sampled tokens, a token"""
    mismatch_max = fact("nats", "Largest engine mismatch")
    """largest difference in log-probability between the two, of any token"""
    mismatch_ratio_max = fact("", "Largest engine ratio")
    """largest probability of a token under the trainer by that under the engine"""
    effective_sample_size = quotient(
        "effective_tokens", "sampled_tokens", "fraction", "Effective sample size"
    )
    """(sum of that ratio) squared by the sum of its squares, as a share of the tokens"""
    corrected_fraction = quotient(
        "corrected_tokens", "sampled_tokens", "fraction", "Corrected tokens"
    )
    """share of tokens whose importance weight was truncated or masked"""
    far_fraction = quotient("far_tokens", "sampled_tokens", "fraction", "Tokens beyond 20 nats")
    """share of tokens more than 20 nats above the old policy, or below the reference where the loss
    has a KL term: exponents are clamped at 20"""
    routing_mismatch = quotient(
        "differing_choices", "replayed_choices", "fraction", "Routing mismatch"
    )
    """share of the engine's choices of experts, all replayed, that the trainer itself would not
    have made; null where none is replayed"""
    replay_gain = quotient("replay_gain_sum", "gain_tokens", "nats", "Gain of routing replay")
    """KL between engine and trainer, a token, that replaying takes away: of the first minibatch of
    every tenth step, scored with the trainer's own choices too; null in other steps"""
    rerouted_prompts = fact("questions", "Prompts routed otherwise")
    """prompts that were computed again for samples of one question, whose engine had routed them
    otherwise"""
    router_entropy = quotient("router_entropy_sum", "trained_tokens", "nats", "Router entropy")
    """entropy of the routers' shares, a token and layer; null for a dense model"""
    expert_load_max = fact("", "Largest load of an expert")
    """choices of the busiest expert by the mean over all of its layer; 1: they are balanced"""
    dead_experts = fact("fraction", "Dead experts")
    """share of the experts that no trained token of the step has chosen"""
    balance_loss = quotient("balance_loss_sum", "loss_denominator", "", "Balancing loss")
    """the balancing loss, weighted as the loss, of which it is no part here; null for a dense
    model"""
    trained_samples = fact("samples", "Trained samples")
    """samples sent to trainers"""
    trained_tokens = fact("tokens", "Trained tokens")
    """unmasked output tokens of these"""
    num_minibatches = fact("minibatches", "Minibatches")
    """forward and backward passes of all ranks, fillers included"""
    num_fillers = fact("minibatches", "Fillers")
    """passes without samples, made to keep the ranks in step"""
    packing_efficiency = quotient(
        "packed_tokens", "budget_tokens", "fraction", "Packing efficiency"
    )
    """how full rows are: tokens that are computed, what rows share once, by the token budget of all
    passes"""
    data_tokens_per_second = quotient("data_tokens", "seconds", "1/s", "Data tokens")
    """prompt and output tokens of the rows by wall clock, shared ones with each of them"""
    trained_tokens_per_second = quotient("trained_tokens", "seconds", "1/s", "Trained tokens")
    """unmasked output tokens trained by wall clock"""


class Hardware:
    """What the trainer's ranks make of their machines; sums are over all ranks."""

    mfu = quotient("model_tflop", "peak_tflop", "fraction", "Model FLOPs utilisation")
    """arithmetic that training the step's minibatches needs, by what the ranks could do in its wall
    clock at the peak of --peak-tflops; null without one"""
    mfu_computing = quotient("model_tflop", "busy_peak_tflop", "fraction", "MFU while computing")
    """the same by the time in which rank 0 neither waited for samples nor published, copied a
    checkpoint or evaluated"""
    tflops_per_second = quotient("model_tflop", "rank_seconds", "1/s", "TFLOP a rank")
    """this arithmetic in TFLOP, by wall clock and rank: 6 FLOPs a parameter and token that meet, 12
    a pair of tokens, layer and element of attention; shared prompts once, nothing that is computed
    again"""
    seconds_gathering = quotient("gathering_seconds", "num_ranks", "seconds", "FSDP's collectives")
    """of a rank in FSDP's all-gathers and reduce-scatters since those of the line before, waiting
    for later ranks included (not in the all-reduce between groups of HYBRID_SHARD); on a device the
    time of their streams, most of it beside computing"""
    seconds_all_gather = quotient("all_gather_seconds", "num_ranks", "seconds", "All-gathers")
    """of these, in all-gathers of weights"""
    seconds_reduce_scatter = quotient(
        "reduce_scatter_seconds", "num_ranks", "seconds", "Reduce-scatters"
    )
    """of these, in reduce-scatters of gradients"""
    seconds_copying = quotient("copying_seconds", "num_ranks", "seconds", "Copies to the device")
    """of a rank in copying the step's minibatches from the host to its device, by its stream; null
    on a CPU"""
    seconds_updating = quotient("updating_seconds", "num_ranks", "seconds", "Optimizer")
    """of a rank in dividing and clipping the gradient and in AdamW, of the step before"""
    seconds_agreeing = quotient("agreeing_seconds", "num_ranks", "seconds", "Agreeing")
    """of a rank in the audit of this step, and in the sums of metrics and the gradient norm of the
    step before, likewise"""
    peak_process_bytes = fact("bytes", "Peak process memory", window="run")
    """most memory of this machine that a rank's process has held since it began, where it is the
    largest; of each rank as `peak_process_bytes/rank_0` and so on"""
    peak_device_bytes = fact("bytes", "Peak device memory", window="run")
    """likewise of the device, reserved by torch's allocator, without what CUDA and NCCL take
    themselves; null on a CPU"""
    peak_allocated_bytes = fact("bytes", "Peak allocated memory", window="run")
    """likewise of these, held by tensors: what is reserved beyond them is cached or fragmented"""


class Evaluation:
    """Held-out data, in evaluation_metrics.jsonl."""

    eval_accuracy = quotient("num_correct", "num_samples", "fraction", "Held-out accuracy")
    """share of samples with the full reward of 1"""
    eval_reward = quotient("reward_sum", "num_samples", "", "Held-out reward")
    """reward of a sample"""
    eval_solved = quotient(
        "num_solved", "graded_questions", "fraction", "Held-out questions solved"
    )
    """share of questions with at least one correct sample"""
    eval_pass_at_k = quotient("pass_at_k_sum", "graded_questions", "fraction", "Held-out pass@k")
    """for each k, as `eval_pass_at_4`: the chance that one at least of k samples is correct,
    unbiased; of these and the three above, `_low` and `_high` are the ends of their 95 % interval
    over questions"""
    eval_output_tokens = quotient("output_tokens", "num_samples", "tokens", "Held-out length")
    """sampled tokens of a sample"""
    eval_truncated = quotient("truncated_samples", "num_samples", "fraction", "Held-out truncated")
    """share of samples cut at the longest output"""
    eval_failed = quotient("num_failed", "num_sampled", "fraction", "Held-out samples that failed")
    """share of samples that could not be played or graded: in no other figure; `failures` counts
    them by the stage that lost them"""
    eval_loss = quotient("loss_sum", "num_tokens", "nats", "Held-out loss")
    """with --algorithm sft: cross-entropy of the held-out pairs, a trained token"""


def _declared_in(section: type) -> tuple[Metric, ...]:
    """The metrics of a section, named by their attributes; the string below each is its meaning."""
    docs = attribute_docs(section)
    return tuple(
        replace(metric, name=name, numerator=metric.numerator or name, meaning=docs[name])
        for name, metric in vars(section).items()
        if isinstance(metric, Metric)
    )


SECTIONS = {
    section: _declared_in(section)
    for section in (StepFacts, Pipeline, Replacement, Trainer, Hardware, Evaluation)
}
METRIC_BY_NAME = {metric.name: metric for metrics in SECTIONS.values() for metric in metrics}
OF_TYPES = (
    "num_samples", "num_groups", "avg_reward", "avg_max_reward_in_group", "perc_correct_samples",
    "avg_output_tokens", "perc_truncated_samples", "perc_unscorable_samples",
    "perc_failed_samples", "num_replacements",
)  # fmt: skip
"""Metrics that each type of questions with a data file also has, as `avg_reward/TYPE`."""
OF_RANKS = ("peak_process_bytes", "peak_device_bytes", "peak_allocated_bytes")
"""Metrics that each rank also has."""
METRICS = tuple(METRIC_BY_NAME[name] for name in METRIC_BY_NAME if name not in vars(Evaluation))
"""The metrics of a gradient step."""


def axis_label(name: str) -> str:
    """The label of a plot's axis for the metric `name`, with the unit; `name` itself if unknown.

    >>> axis_label("avg_output_tokens"), axis_label("tokens_per_second"), axis_label("my_metric")
    ('Output length (tokens)', 'Output tokens per second', 'my_metric')
    >>> axis_label("avg_reward/sums"), axis_label("eval_pass_at_4/math")
    ('Mean reward, sums', 'Held-out pass@4, math')
    """
    whole, _, kind = name.partition("/")
    if kind and axis_label(whole) != whole:
        return f"{axis_label(whole)}, {kind}"
    metric = METRIC_BY_NAME.get(whole)
    if passed := re.fullmatch(r"eval_pass_at_(\d+)", whole):
        return METRIC_BY_NAME["eval_pass_at_k"].label.replace("@k", f"@{passed[1]}")
    if metric is None:
        return name
    if metric.unit == "1/s":
        return f"{metric.label} per second"
    has_unit = metric.unit in ("tokens", "batches", "seconds", "nats", "bytes")
    shown = has_unit and metric.window == "step"
    return f"{metric.label} ({metric.unit})" if shown else metric.label
