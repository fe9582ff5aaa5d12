from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.types import Rewards, share_out
from async_grpo.util.errors import ConfigError
from async_grpo.verification.config import VerifierConfig

RUNNING = VerifierConfig(reward_names=("a.py:f", "g"), sources={"a.py": "1", "registry": "2"})
POOLS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 500)), min_size=1, max_size=12)


def rewards(config, num_cores=2):
    return config.rewards(num_cores=num_cores)


@given(POOLS, st.integers(1, 64))
def test_shares_sum_to_the_global_number_and_every_pool_has_a_process(pools, num_cores):
    stated = rewards(RUNNING, num_cores)
    shares = share_out(
        {
            str(n): (f"node {node}", replace(stated, num_verifiers=wanted))
            for n, (node, wanted) in enumerate(pools)
        }
    )
    nodes = Counter(node for node, _ in pools)
    expected = min(max(wanted for _, wanted in pools), len(nodes) * num_cores)
    assert 0 <= sum(shares.values()) - expected <= list(shares.values()).count(1)
    for node, num_pools in nodes.items():
        its = sum(shares[str(n)] for n, (other, _) in enumerate(pools) if other == node)
        assert its <= num_cores + num_pools


def test_when_one_pool_leaves_the_others_make_up_the_number():
    stated = rewards(replace(RUNNING, num_verifiers=12), num_cores=16)
    pools = {name: (f"node of {name}", stated) for name in "abc"}
    assert share_out(pools) == {"a": 4, "b": 4, "c": 4}
    del pools["b"]
    assert share_out(pools) == {"a": 6, "c": 6}


def test_a_pool_with_other_rewards_is_refused_and_both_are_named():
    running = rewards(VerifierConfig(reward_names=("countdown",)))
    with pytest.raises(
        ConfigError, match=r"got .* mathd of .* while .* countdown of .* is used by X"
    ):
        rewards(VerifierConfig(reward_names=("mathd",))).require_equal(running, users="X")


def test_a_pool_with_an_edited_reward_is_refused_by_its_file_and_both_hashes():
    edited = replace(RUNNING, sources={"a.py": "1", "registry": "3"})
    with pytest.raises(
        ConfigError,
        match=r"but registry \(d4735e3a265e, now 4e07408562be\) was edited since X began to use",
    ):
        rewards(edited).require_equal(rewards(RUNNING), users="X")


def test_a_pool_may_differ_in_what_does_not_grade():
    other = replace(RUNNING, num_verifiers=3, search_paths=("elsewhere",))
    rewards(other, num_cores=7).require_equal(rewards(RUNNING), users="X")


def test_a_hash_stands_for_the_text():
    assert isinstance(rewards(RUNNING), Rewards)
    assert rewards(RUNNING).hashes.keys() == RUNNING.sources.keys()
    assert all(len(value) == 64 for value in rewards(RUNNING).hashes.values())


def test_a_module_that_a_reward_imports_may_not_be_edited_while_it_is_used():
    running = rewards(replace(RUNNING, imported={"helper.py of a.py": "1" * 64}))
    edited = rewards(replace(RUNNING, imported={"helper.py of a.py": "2" * 64}))
    rewards(replace(RUNNING, imported=dict(running.hashes))).require_equal(running, users="X")
    with pytest.raises(ConfigError, match=r"helper.py of a.py \(111111111111, now 222222222222\)"):
        edited.require_equal(running, users="X")
