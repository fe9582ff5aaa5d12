from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.errors import ConfigError
from async_grpo.verification.config import VerifierConfig, count_processes

COUNTS = st.integers(0, 500)


@given(COUNTS, COUNTS, st.integers(1, 9), COUNTS)
def test_processes_never_outnumber_the_cores_and_there_is_always_one(asked, cluster, nodes, local):
    count = count_processes(asked, cluster_cpus=cluster, num_nodes=nodes, local_cpus=local)
    assert 1 <= count <= max(1, min(asked, cluster))
    if nodes == 1:
        assert count <= max(1, local)


def test_a_second_dispatcher_with_other_rewards_is_refused_and_told_who_runs():
    running = VerifierConfig(reward_names=("countdown",))
    with pytest.raises(
        ConfigError, match=r"got .* mathd of .* while .* countdown of .* is used by X"
    ):
        VerifierConfig(reward_names=("mathd",)).require_same_rewards(running, users="X")


def test_a_second_dispatcher_with_an_edited_reward_is_refused_by_the_name_of_its_file():
    running = VerifierConfig(reward_names=("a.py:f", "g"), sources={"a.py": "1", "registry": "2"})
    replace(running).require_same_rewards(running, users="X")
    edited = replace(running, sources={"a.py": "1", "registry": "3"})
    with pytest.raises(ConfigError, match=r"but registry was edited since X began to use"):
        edited.require_same_rewards(running, users="X")


def test_a_second_dispatcher_may_differ_in_what_does_not_grade():
    running = VerifierConfig(reward_names=("countdown",))
    other = replace(running, num_verifiers=3, search_paths=("elsewhere",))
    other.require_same_rewards(running, users="X")
