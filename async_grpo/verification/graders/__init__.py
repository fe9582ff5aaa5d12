"""Graders: plain functions that give an output its reward, without Ray.

A grader reads only the generated text, and raises `UnscorableError` if that holds no answer.
"""

from async_grpo.verification.graders.answers import UnscorableError as UnscorableError

SHIPPED = "async_grpo.verification.graders.shipped"
TIMEOUT_VARIABLE = "ASYNC_GRPO_VERIFIER_TIMEOUT_S"  # read by adapters that divide their time
