"""The rewards of a run: the file to edit, or to copy and name with `--reward-registry`.

An adapter is a function `(sample, **kwargs) -> {"reward": float, "format_reward": float}`, the
second entry optional; a number or a boolean alone is a reward too. `--reward-fns a,b` runs several
on every sample and keeps the best verdict.

`sample` is a dict: every column of the question's data line, and

    input             the prompt as text
    answer            the expected answer, as text; None when the data has none
    output            the generated text: the only place where an answer may be looked for
    sample_text       input + output
    output_token_ids  the generated tokens, a list of int
    finish_reason     "stop", "length" (cut at the limit) or "abort"

An adapter runs in a process of its own with a time and a memory limit. An exception in it is an
error of verification: the sample is graded once more, then its group is dropped and counted, and
the trainer says why. It is called once on the first line of the data before a run begins.
Raise `UnscorableError(reason)` when the output holds no answer: reward 0, counted as such. An
adapter whose best reward is not 1.0 says so: `my_adapter.max_reward = 2.0`.

With `my_adapter.groupwise = True` it grades all outputs of a question in one call, as judges that
rank and majority votes do: it is given a list of samples, and returns a list with a reward (or a
dict as above, or an `UnscorableError`) for each. Such a reward grades its questions alone.
"""

from collections.abc import Callable
from enum import StrEnum

from async_grpo.verification.graders.shipped import SHIPPED


class RewardType(StrEnum):
    """What `--reward-fns` calls the adapters of this file."""

    MATHD = "mathd"
    SYMPY = "sympy"
    COUNTDOWN = "countdown"
    MATH_VERIFY = "math_verify"
    CODE_EXECUTION = "code_execution"
    MAJORITY = "majority"
    TTRL = "ttrl"
    REASONING_GYM = "reasoning_gym"


REWARD_ADAPTERS: dict[RewardType, Callable[..., float | dict[str, float]]] = {
    reward: SHIPPED[reward] for reward in RewardType
}
