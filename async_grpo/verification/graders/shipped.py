"""The shipped rewards as adapters, which run without network and can write no file.

Each adapter imports its libraries only when a server prepares it: a smaller server forks faster.
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
# reasoning-gym uses it to make questions of one task only; its import needs a writable folder.
UNUSED_BY_GYM = "cellpylib"
MAX_GYM_CHARACTERS = 10_000  # of an answer


def mathd(sample: Sample, **kwargs: object) -> dict[str, float]:
    r"""Compare the last \boxed{} with `answer` as normalised strings."""
    return {"reward": mathd_reward(_said(sample), sample["answer"])}


def sympy(sample: Sample, **kwargs: object) -> dict[str, float]:
    r"""Compare the last \boxed{} with `answer` as mathematics."""
    from async_grpo.verification.graders.symbolic import sympy_reward

    return {"reward": sympy_reward(_said(sample), sample["answer"])}


def math_verify(sample: Sample, **kwargs: object) -> dict[str, float]:
    """Compare the answer in the output with `answer` by the math-verify library."""
    from async_grpo.verification.graders.math_verify import math_verify_reward

    return {"reward": math_verify_reward(_said(sample), sample["answer"])}


def countdown(sample: Sample, **kwargs: object) -> dict[str, float]:
    """Grade an equation that must reach `target` and use every number of `nums` exactly once."""
    numbers = sample["nums"] if "nums" in sample else sample["numbers"]
    grade = grade_countdown(_said(sample), numbers=numbers, target=sample["target"])
    return {"reward": grade.reward, "format_reward": grade.format_reward}


def code_execution(sample: Sample, **kwargs: object) -> dict[str, float]:
    """Run the last fenced block of Python on all tests of the question: docs/verification.md."""
    from async_grpo.verification.graders.code_execution import grade_code

    return {"reward": grade_code(sample["output"], sample)}


def majority(samples: list[Sample], **kwargs: object) -> list[float | UnscorableError]:
    """Take the answer that most outputs of the question give as the right one."""
    return majority_rewards([_said(sample) for sample in samples])


def reasoning_gym(sample: Sample, **kwargs: object) -> dict[str, float]:
    """Score the answer by the scorer of its task in reasoning-gym: docs/environments.md."""
    given = sample["reasoning_gym"]
    reward = reasoning_gym_reward(_said(sample), given["entry"], config=given["config"])
    return {"reward": reward}


def majority_rewards(outputs: Sequence[str]) -> list[float | UnscorableError]:
    r"""1.0 for each output whose answer is the single most frequent one, else 0.0.

    Test-time reinforcement learning (TTRL; Zuo et al., 2025, arXiv 2504.16084): the answer that
    most outputs of a question give replaces the unknown right answer. If several are the most
    frequent, none is right.

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
    """The score in [0, 1] of the last `<answer>` of an output, by the scorer of the entry's task.

    Some scorers execute the answer, so they run only here, in a confined process without network
    and files. A text that takes over this process can lie about its reward, as with a user's
    function.

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
    """The scorer of a task, by its name; raises `ValueError` for an unknown task."""
    return gym_library().create_dataset(task, **json.loads(config))


@functools.cache
def gym_library() -> Any:
    """The package reasoning-gym; raises `ImportError` if it is not installed."""
    from unittest import mock  # imported here, as servers of other adapters do without

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

    Users' rewards call it too, with a grader of (output, answer): docs/verification.md.

    The tables grow with each new form of answer: the first of a form takes 20 to 80 ms.
    """
    for text in FORMS:
        with contextlib.suppress(UnscorableError, ValueError):
            grade(rf"\boxed{{{text}}}", text)
            grade(rf"\boxed{{{text}}}", f"1+{text}")


def _said(sample: Sample) -> str:
    """The output without repetitions of the prompt, which may hold an answer."""
    return without_prompt(sample["output"], sample.get("input") or "")


def _prepare_countdown() -> None:
    """Run the grader until Python has specialised its code, for all forked requests."""
    for _ in range(50):
        countdown({"output": "8-2+9=15", "nums": [2, 9, 8], "target": 15})


def _prepare_mathematics(adapter: Callable[[Sample], object]) -> None:
    warm_up(lambda output, answer: adapter({"output": output, "answer": answer}))


def _prepare_code_execution() -> None:
    """Raise `ConfigError` if programs cannot be confined, so that the run ends at its start."""
    import async_grpo.verification.graders.code_execution  # noqa: F401 - a child cannot import it
    from async_grpo.verification.jailer import require_jail

    require_jail()


def _prepare_reasoning_gym() -> None:
    """Raise `ConfigError` if the package is not installed."""
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
    adapter.__name__: adapter
    for adapter in (mathd, sympy, countdown, math_verify, code_execution, majority, reasoning_gym)
} | {"ttrl": majority}
