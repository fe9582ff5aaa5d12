"""The shipped rewards as adapters: without network, and without a file that they could write.

A fork costs what its server holds, so each adapter imports its libraries when a server prepares it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from async_grpo.util.errors import ConfigError
from async_grpo.verification.graders.answers import UnscorableError, find_answer, without_prompt
from async_grpo.verification.graders.countdown import grade_countdown
from async_grpo.verification.graders.mathd import mathd_reward, normalise
from async_grpo.verification.tasks import Sample

FORMS = (
    "12", "-3", "0.75", "1,234", "3.5%", r"\frac{3}{4}", r"-\frac{17}{12}", r"\sqrt{5}+2",
    r"\frac{1+\sqrt{5}}{2}", r"3\sqrt[3]{2}", "x^2+3x-1", r"2x(x+3)", r"x=\frac{7}{2}", "y=2x+1",
    r"x^{10}", r"2^{n+1}", r"\{1,2,3\}", "(1,5)", r"(3,\frac{\pi}{4})", r"[0,\infty)",
    r"(-\infty,2)\cup(3,5]", r"x>5", r"1\le x<4", r"2\pi", r"\sin x", r"\log_2 8", "e^{2x}", "3+4i",
    r"90^\circ", r"\text{Monday}", r"5\text{ cm}", r"\$20", "f(x)=2x",
    r"\begin{pmatrix}1\\2\end{pmatrix}",
)  # fmt: skip
# Makes questions of one task, scores none, and imports what wants a folder to write to.
UNUSED_BY_GYM = "cellpylib"
MAX_GYM_CHARACTERS = 10_000  # of an answer


def mathd(sample: Sample, **kwargs: object) -> dict[str, float]:
    r"""The last \boxed{} is the answer, as normalised strings."""
    return {"reward": mathd_reward(_said(sample), sample["answer"])}


def sympy(sample: Sample, **kwargs: object) -> dict[str, float]:
    r"""The last \boxed{} is the answer, as mathematics."""
    from async_grpo.verification.graders.symbolic import sympy_reward

    return {"reward": sympy_reward(_said(sample), sample["answer"])}


def math_verify(sample: Sample, **kwargs: object) -> dict[str, float]:
    """The math-verify library finds the answer in the output."""
    from async_grpo.verification.graders.math_verify import math_verify_reward

    return {"reward": math_verify_reward(_said(sample), sample["answer"])}


def countdown(sample: Sample, **kwargs: object) -> dict[str, float]:
    """An equation that hits `target` with every number of `nums` used exactly once."""
    numbers = sample["nums"] if "nums" in sample else sample["numbers"]
    grade = grade_countdown(_said(sample), numbers=numbers, target=sample["target"])
    return {"reward": grade.reward, "format_reward": grade.format_reward}


def code_execution(sample: Sample, **kwargs: object) -> dict[str, float]:
    """The last fenced block of Python passes all tests of the question: docs/verification.md."""
    from async_grpo.verification.graders.code_execution import grade_code

    return {"reward": grade_code(sample["output"], sample)}


def majority(samples: list[Sample], **kwargs: object) -> list[float | UnscorableError]:
    """The answer that most outputs of the question give is the answer."""
    return majority_rewards([_said(sample) for sample in samples])


def reasoning_gym(sample: Sample, **kwargs: object) -> dict[str, float]:
    """What the scorer of a task of reasoning-gym says: docs/environments.md."""
    given = sample["reasoning_gym"]
    reward = reasoning_gym_reward(_said(sample), given["entry"], config=given["config"])
    return {"reward": reward}


def majority_rewards(outputs: Sequence[str]) -> list[float | UnscorableError]:
    r"""1.0 for each output whose answer is the single most frequent one, else 0.0.

    Test-time reinforcement learning (TTRL; Zuo et al., 2025, arXiv 2504.16084): the answer that
    most outputs of a question give stands for the answer that nobody knows. Where several are the
    most frequent, none is.

    >>> majority_rewards([r"\boxed{4}", r"it is \boxed{4.0}", r"\boxed{5}", ""])
    [1.0, 1.0, 0.0, UnscorableError('no answer in the output')]
    >>> majority_rewards([r"\boxed{4}", r"\boxed{5}"])
    [0.0, 0.0]
    """
    answers = [_normal_answer(output) for output in outputs]
    counts = Counter(answer for answer in answers if isinstance(answer, str)).most_common(2)
    is_tie = len(counts) == 2 and counts[0][1] == counts[1][1]
    majority = counts[0][0] if counts and not is_tie else None
    return [float(a == majority) if isinstance(a, str) else a for a in answers]


def _normal_answer(output: str) -> str | UnscorableError:
    try:
        return normalise(find_answer(output))
    except UnscorableError as error:
        return error


def reasoning_gym_reward(output: str, entry: Mapping[str, Any], *, config: str = "{}") -> float:
    """What the scorer of the entry's task says of the last `<answer>` of an output, in [0, 1].

    Some scorers run what they read, so they run here alone, in a confined process without network
    and files. What a text takes over there can lie about itself, as about any reward of a user's
    own.

    `config`: the task's, as JSON. Raises `UnscorableError` for an output without an answer, or one
    that the scorer cannot read.
    """
    answer = gym_library().utils.extract_answer(output)
    if answer is None or len(answer) > MAX_GYM_CHARACTERS:
        raise UnscorableError(f"no <answer> of at most {MAX_GYM_CHARACTERS} characters")
    scorer = gym_scorer(entry["metadata"]["source_dataset"], config)
    try:
        reward = float(scorer.score_answer(answer, dict(entry)))
    except (Exception, SystemExit) as error:  # the scorer may run the answer, which may raise
        raise UnscorableError(f"the scorer raised {error!r}") from error
    if not math.isfinite(reward):
        raise UnscorableError(f"the scorer said {reward}")
    return min(max(reward, 0.0), 1.0)


@functools.cache
def gym_scorer(task: str, config: str) -> Any:
    """The task by its name; raises `ValueError` for one that is none."""
    return gym_library().create_dataset(task, **json.loads(config))


@functools.cache
def gym_library() -> Any:
    """The package; raises `ImportError` where it is not installed."""
    from unittest import mock  # which a fork server of other adapters need not hold

    is_here = UNUSED_BY_GYM in sys.modules
    sys.modules.setdefault(UNUSED_BY_GYM, mock.MagicMock())
    try:
        import reasoning_gym
        import reasoning_gym.utils
    finally:
        if not is_here:
            del sys.modules[UNUSED_BY_GYM]
    return reasoning_gym


@functools.cache
def warm_up(grade: Callable[[str, str], object]) -> None:
    """Have a parser of mathematics build its tables, which forked requests then share.

    They grow with every form of answer that is met: 20 to 80 ms for the first of its kind.
    """
    for text in FORMS:
        with contextlib.suppress(UnscorableError, ValueError):
            grade(rf"\boxed{{{text}}}", text)
            grade(rf"\boxed{{{text}}}", f"1+{text}")


def _said(sample: Sample) -> str:
    """What the model added: a prompt that it repeats may hold an answer."""
    return without_prompt(sample["output"], sample.get("input") or "")


def _prepare_countdown() -> None:
    """Let Python make the code faster that each request runs."""
    for _ in range(50):
        countdown({"output": "8-2+9=15", "nums": [2, 9, 8], "target": 15})


def _prepare_mathematics(adapter: Callable[[Sample], object]) -> None:
    warm_up(lambda output, answer: adapter({"output": output, "answer": answer}))


def _prepare_code_execution() -> None:
    """Raise `ConfigError` where programs cannot be confined: the run ends at its start."""
    import async_grpo.verification.graders.code_execution  # noqa: F401 - out of a child's reach
    from async_grpo.verification.jailer import require_jail

    require_jail()


def _prepare_reasoning_gym() -> None:
    """Raise `ConfigError` where the package is not installed."""
    try:
        gym_library()
    except ImportError as error:
        raise ConfigError(
            f"--reward-fns reasoning_gym needs the package reasoning-gym, got {error}: "
            "pip install -r requirements/reasoning-gym.txt"
        ) from error


for _adapter in (mathd, math_verify, sympy):
    _adapter.prepare = functools.partial(_prepare_mathematics, _adapter)  # type: ignore[attr-defined]
majority.groupwise = True  # type: ignore[attr-defined]
majority.prepare = lambda: majority([])  # type: ignore[attr-defined]
countdown.prepare = _prepare_countdown  # type: ignore[attr-defined]
code_execution.executes_text = reasoning_gym.executes_text = True  # type: ignore[attr-defined]
code_execution.prepare = _prepare_code_execution  # type: ignore[attr-defined]
reasoning_gym.prepare = _prepare_reasoning_gym  # type: ignore[attr-defined]

SHIPPED = {
    "mathd": mathd,
    "sympy": sympy,
    "countdown": countdown,
    "math_verify": math_verify,
    "code_execution": code_execution,
    "majority": majority,
    "reasoning_gym": reasoning_gym,
}
