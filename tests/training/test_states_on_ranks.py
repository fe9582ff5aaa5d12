"""Ranks with other numbers of sequences, whose layers carry states, against one float64 pass."""

import pytest
from fsdp_scenarios import CONFIG
from model_families import family_model
from oracle import objective, oracle_outputs, relative_difference
from ranks import run_ranks
from state_scenarios import samples_of, uneven_step


@pytest.mark.integration
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_uneven_ranks_give_the_gradient_of_sequences_alone(family, tmp_path):
    twin = family_model(family, attention="eager")
    objective(oracle_outputs(twin, samples_of(family), CONFIG), CONFIG).backward()
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for gradient in run_ranks(uneven_step, num_ranks=2, folder=tmp_path, family=family):
        assert relative_difference(gradient, expected) < 1e-5
