"""What an output is worth: graders are plain functions of texts, free of Ray.

A grader looks only at the generated text and raises `UnscorableError` when that holds no answer.
"""

from async_grpo.verification.graders.answers import UnscorableError

__all__ = ["UnscorableError"]
