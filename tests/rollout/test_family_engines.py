"""Engines of tiny models of every family say what the trainer's policy says of a token.

Before and after an update that comes while they sample; see `family_engines`.
"""

import family_engines
import pytest
from tiny_families import served, tiny_config

from async_grpo.model.foreign_folders import families

pytestmark = pytest.mark.integration
ROWS = {family.kind: family for family in families()}
FAST = ("gemma3_text", "qwen3_moe")
SLOW = [kind for kind, family in ROWS.items() if family.trains == "yes" and kind not in FAST]
LONGROPE = {
    "max_position_embeddings": 1024,
    "original_max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 512,
        "short_factor": [1.1] * 16, "long_factor": [4.0] * 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", [*FAST, *(pytest.param(k, marks=pytest.mark.slow) for k in SLOW)])
def test_an_engine_serves_a_family_as_the_table_says(kind):
    said = verdict(ROWS[kind].serves)
    assert verdict(served(kind)) == said, f"run python tests/model/tiny_families.py {kind}"


def verdict(serves):
    return serves.split(" ")[0].rstrip(":")  # differences are others on another machine


@pytest.mark.slow
def test_an_engine_of_longrope_serves_up_to_the_original_length():
    assert family_engines.serves(tiny_config("phi3", **LONGROPE)) == "yes"


@pytest.mark.slow
def test_an_engine_that_differs_by_more_is_not_said_to_serve():
    found = family_engines.serves(tiny_config("qwen3"), largest=1e-9)
    assert found.startswith("no: off by ")


def test_the_first_error_of_a_log_is_the_reason():
    log = (
        "(EngineCore) ERROR RuntimeError: Engine core initialization failed.\n"
        '  File "x.py", line 3\n(EngineCore) AssertionError: CPU GDN attention requires BF16.\n'
    )
    assert family_engines.reason_in(log) == "AssertionError: CPU GDN attention requires BF16"
