"""What happens in a scripted run, and what must come of it by the rules of design.md."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from async_grpo.batching.admission import StepKey
from async_grpo.config.train_config import TrainConfig

NUM_QUESTIONS = 7
MAX_TRIES = 3
REWARDS = (0.0, 0.5, 1.0)
BEHAVIOUR, REFERENCE_LOGPROB = -0.5, -1.0  # log-probability of every token


def reference_length(question):
    """Tokens of the reference answer of a question, by its number."""
    return 2 + question


@dataclass(frozen=True, kw_only=True)
class Script:
    """Everything is a function of the seed, the slot and its attempt; `timing` alone moves time."""

    config: TrainConfig
    num_ranks: int = 2
    seed: int = 0
    timing: int = 0
    failing: frozenset[int] = frozenset()  # ordinals whose verification fails
    failing_later: frozenset[int] = frozenset()  # ordinals whose replacements fail so
    dropped: frozenset[int] = frozenset()  # ordinals that no generation worker can answer
    flaky: frozenset[int] = frozenset()  # ordinals whose first try at each attempt fails
    deadly: frozenset[int] = frozenset()  # questions that kill the worker that samples them
    even: frozenset[int] = frozenset()  # ordinals whose first samples all get the same reward
    barren: frozenset[int] = frozenset()  # ordinals whose samples at any attempt do
    slowest_s: float = 5.0
    loses_a_lease: bool = False
    max_rows: int = 1  # of a sample; more: an environment worker plays every group
    shares_prefixes: bool = False  # its ranks compute what rows have in common once

    def chance(self, *key):
        """A number in [0, 1) that is always the same for the key."""
        return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=6).digest()) / 2**48

    def seconds(self, *key):
        return self.chance("seconds", self.timing, *key) * self.slowest_s

    def replacement(self, slot, *, attempt):
        return (slot * 3 + attempt * 2 + 1) % NUM_QUESTIONS

    def question(self, ordinal, attempt):
        return self.replacement(ordinal, attempt=attempt) if attempt else ordinal % NUM_QUESTIONS

    @property
    def trains_references(self):
        return self.config.objective.ref_answer_coefficient > 0

    @property
    def size(self):
        """Samples that a slot admits."""
        return self.config.sampling.samples_per_question + self.trains_references

    def reference(self, ordinal, attempt):
        """{index: reward} of the reference answer, where groups have one."""
        if not self.config.objective.use_ref_answers:
            return {}
        reward = self.rewards(ordinal, attempt)[0]
        if ordinal not in self.barren:
            reward = REWARDS[int(3 * self.chance("reference", self.seed, ordinal, attempt))]
        return {self.config.sampling.samples_per_question: reward}

    def rewards(self, ordinal, attempt=0):
        if ordinal in self.barren or (ordinal in self.even and attempt == 0):
            return (0.5,) * self.config.sampling.samples_per_question
        return tuple(
            REWARDS[int(3 * self.chance("reward", self.seed, ordinal, attempt, index))]
            for index in range(self.config.sampling.samples_per_question)
        )

    def lengths(self, ordinal, attempt=0):
        """Tokens of each sample."""
        if (ordinal, attempt) not in self._lengths:
            self._lengths[ordinal, attempt] = self._draw_lengths(ordinal, attempt)
        return self._lengths[ordinal, attempt]

    @cached_property
    def _lengths(self):
        return {}

    def _draw_lengths(self, ordinal, attempt):
        longest = self.config.sampling.max_generation_tokens
        return [
            1 + int(longest * self.chance("length", self.seed, ordinal, attempt, index))
            for index in range(self.config.sampling.samples_per_question)
        ]

    def row_lengths(self, ordinal, attempt, index):
        """Tokens of each row of a sample."""
        length = self.lengths(ordinal, attempt)[index]
        chance = self.chance("rows", self.seed, ordinal, attempt, index)
        num_rows = min(length, 1 + int(self.max_rows * chance))
        return [length // num_rows + (row < length % num_rows) for row in range(num_rows)]

    def is_cut(self, num_tokens):
        return num_tokens == self.config.sampling.max_generation_tokens

    def members(self, ordinal, attempt):
        """Indices of the samples that --length-limit-policy leaves in the group."""
        leaves_out = self.config.sampling.length_limit_policy == "invalidate"
        lengths = self.lengths(ordinal, attempt)
        return [i for i, n in enumerate(lengths) if not (leaves_out and self.is_cut(n))]

    def graded(self, ordinal, attempt):
        """{index of a member: its reward}"""
        zeroes = self.config.sampling.length_limit_policy == "zero_reward"
        rewards, lengths = self.rewards(ordinal, attempt), self.lengths(ordinal, attempt)
        return {
            index: 0.0 if zeroes and self.is_cut(lengths[index]) else rewards[index]
            for index in self.members(ordinal, attempt)
        }

    def member_tokens(self, ordinal, attempt):
        lengths = self.lengths(ordinal, attempt)
        return sum(lengths[index] for index in self.members(ordinal, attempt))

    def shaped_rewards(self, ordinal, attempt):
        """{index of a member: its reward less penalties}, dyadic: rounding decides nothing."""
        config, shaped = self.config, {}
        lengths = self.lengths(ordinal, attempt)
        start = config.sampling.max_generation_tokens - config.objective.overlong_buffer_tokens
        for index, value in self.graded(ordinal, attempt).items():
            num_tokens = lengths[index]
            if config.objective.overlong_buffer_tokens and num_tokens > start:
                excess = (num_tokens - start) / config.objective.overlong_buffer_tokens
                value -= config.objective.overlong_penalty * excess
            if config.objective.kl_estimator == "k1":
                divergence = num_tokens * (BEHAVIOUR - REFERENCE_LOGPROB)
                value -= config.objective.kl_coefficient * divergence
            shaped[index] = value
        return shaped

    def attempts(self, ordinal):
        """(attempts that are replaced, the attempt that is kept or None, stage that failed)."""
        replaced = []
        for attempt in range(1 + self.config.objective.dynamic_sampling):
            if ordinal in self.dropped:
                return replaced, None, "generation"
            if ordinal in (self.failing_later if attempt else self.failing):
                return replaced, None, "verification"
            if not self.members(ordinal, attempt):
                return replaced, None, "length limit"
            is_last = attempt == self.config.objective.dynamic_sampling
            members = self.shaped_rewards(ordinal, attempt) | self.reference(ordinal, attempt)
            if is_last or len({*members.values()}) > 1:
                return replaced, attempt, ""
            replaced.append(attempt)
        raise AssertionError("the last attempt is kept")

    def step(self, step):
        """What must become of one gradient step."""
        return ExpectedStep(self, step)

    @property
    def steps(self):
        config = self.config
        return [
            StepKey(batch, step)
            for batch in range(config.batching.num_training_batches)
            for step in range(config.batching.steps_per_batch)
        ]


@dataclass(frozen=True)
class ExpectedStep:
    """The fates, D and sums of one step, from the rules alone."""

    script: Script
    key: StepKey

    @property
    def ordinals(self):
        config = self.script.config
        first = self.key.batch * config.batching.batch_size
        first += self.key.step_in_batch * config.batching.questions_per_step
        return range(first, first + config.batching.questions_per_step)

    @cached_property
    def slots(self):
        """ordinal -> (replaced attempts, kept attempt or None, stage that failed)."""
        return {ordinal: self.script.attempts(ordinal) for ordinal in self.ordinals}

    @cached_property
    def trained(self):
        """(ordinal, index) -> trained tokens of the samples that go to the trainers."""
        return {key: n for key, (n, contributes) in self._kept().items() if contributes}

    @cached_property
    def fates(self):
        """Every try but the last of an attempt is discarded, but for leases that are lost."""
        script, size = self.script, self.script.size
        num_discarded = 0
        for ordinal, (replaced, kept, stage) in self.slots.items():
            num_attempts = len(replaced) + (kept is not None or stage != "generation")
            num_discarded += num_attempts * (ordinal in script.flaky)
            num_discarded += (MAX_TRIES - 1) * (stage == "generation")
        slots = self.slots.values()
        num_trained = len(self.trained)
        return Counter(
            trained=num_trained,
            zero_contribution=len(self._kept()) - num_trained,
            failed=size * sum(kept is None for _, kept, _ in slots),
            discarded=size * num_discarded + self.num_left_out,
            replaced=size * sum(len(replaced) for replaced, _, _ in slots),
        )

    @property
    def num_left_out(self):
        size = self.script.config.sampling.samples_per_question
        sampled = [index for _, index in self._kept() if index < size]
        return self.sum_over_kept(lambda ordinal, attempt: size) - len(sampled)

    @property
    def num_references(self):
        """Reference answers that are trained."""
        return self.sum_over_kept(lambda ordinal, attempt: self.script.trains_references)

    @property
    def token_fates(self):
        """Of what engines answer, but for leases that are lost afterwards."""
        script, sampled = self.script, {"replaced": 0, "failed": 0}
        for ordinal, (replaced, _, stage) in self.slots.items():
            sampled["replaced"] += sum(sum(script.lengths(ordinal, n)) for n in replaced)
            if stage in ("verification", "length limit"):
                sampled["failed"] += sum(script.lengths(ordinal, len(replaced)))
        kept = self.sum_over_kept(script.member_tokens)
        slots = self.slots
        size = script.config.sampling.samples_per_question
        sampled_keys = [key for key in self.trained if key[1] < size]
        trained = sum(script.lengths(n, slots[n][1])[index] for n, index in sampled_keys)
        return Counter(sampled | {"trained": trained, "zero_contribution": kept - trained})

    @property
    def denominators(self):
        """D in samples and in tokens: trained and of zero contribution, nothing else."""
        kept = self._kept()
        return len(kept), sum(num_tokens for num_tokens, _ in kept.values())

    def sum_over_kept(self, values):
        """Sum of `values(ordinal, attempt)` over the groups that count."""
        slots = self.slots.items()
        return sum(values(ordinal, kept) for ordinal, (_, kept, _) in slots if kept is not None)

    def sum_over_replaced(self, values):
        slots = self.slots.items()
        return sum(values(ordinal, a) for ordinal, (replaced, _, _) in slots for a in replaced)

    @property
    def scored_tokens(self):
        """Output tokens that the reference must see, and not one more."""
        config, script = self.script.config, self.script
        if config.objective.kl_coefficient == 0:
            return 0
        if config.objective.kl_in_loss:
            size = config.sampling.samples_per_question
            return sum(
                script.lengths(ordinal, self.slots[ordinal][1])[index]
                for (ordinal, index), (num_trained, _) in self._kept().items()
                if num_trained and index < size  # the reference answer was not sampled
            )

        seen = script.member_tokens
        return self.sum_over_kept(seen) + self.sum_over_replaced(seen)

    def _kept(self):
        """(ordinal, index) -> (trained tokens, has a gradient) of the samples that count."""
        config, kept = self.script.config, {}
        always = config.objective.kl_in_loss or config.objective.entropy_coefficient > 0
        for ordinal, (_, attempt, _) in self.slots.items():
            if attempt is None:
                continue
            rewards = self.script.shaped_rewards(ordinal, attempt)
            reference = self.script.reference(ordinal, attempt)
            mean = np.mean([*(rewards | reference).values()])
            if self.script.trains_references:
                num_tokens = reference_length(self.script.question(ordinal, attempt))
                kept.update({(ordinal, index): (num_tokens, True) for index in reference})
            for index, reward in rewards.items():
                num_trained = num_tokens = self.script.lengths(ordinal, attempt)[index]
                if config.objective.mask_truncated_samples and self.script.is_cut(num_tokens):
                    num_trained = 0
                has_advantage = reward - mean != 0.0
                kept[ordinal, index] = num_trained, num_trained > 0 and (always or has_advantage)
        return kept
