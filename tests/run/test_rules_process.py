"""The rules of a user's algorithm run beside rank 0, and what fails there names its line."""

import asyncio
from functools import partial

import pytest
from fake_cluster import FakeCluster
from scripted import Handle, make_sample, run
from scripted_run import make_config
from trained import HERE

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm, users_algorithm
from async_grpo.run.companions import RemoteRules, RulesProcess, start_rules
from async_grpo.types import Group, WeightsVersion
from async_grpo.util.errors import DeadlineError, WorkerError

BROKEN = """
from async_grpo.algorithms.grpo import Grpo
class Broken(Grpo):
    def finish_group(self, group):
        return group.no_such_name
"""


def group(ordinal=0):
    samples = (make_sample(WeightsVersion(0, 0), index=i, reward=float(i)) for i in range(2))
    return Group(ordinal, 0, tuple(samples))


def rules_of(name, process=None):
    """As rank 0 hands them to the controller, without Ray between."""
    config = make_config(algorithm=str(name))
    process = process or RulesProcess(partial(find_algorithm, config), users_algorithm(config))
    return RemoteRules(Handle(process), find_algorithm(config))


def test_rules_beside_the_controller_answer_as_those_in_it_do():
    name = f"{HERE}/global_norm.py:GlobalNorm"
    local = LocalRules(find_algorithm(make_config(algorithm=name)))
    remote = rules_of(name)
    assert (
        (remote.waits_for_step, remote.needs) == (local.waits_for_step, local.needs) == (True, ())
    )

    async def advantages(rules):
        groups = [await rules.finish_group(group(ordinal)) for ordinal in range(2)]
        finished = await rules.finish_step(groups)
        return [[sample.advantage for sample in each.samples] for each in finished]

    assert run(advantages(remote)) == run(advantages(local))


def test_an_exception_names_the_user_s_line(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    said = r"raised AttributeError: .*broken.py:5, return group.no_such_name\): correct it"
    with pytest.raises(WorkerError, match=said):
        run(rules_of(tmp_path / "broken.py:Broken").finish_group(group()))


def test_an_answer_has_60_seconds():
    class Silent:
        async def finish_group(self, group):
            await asyncio.sleep(1e6)

    with pytest.raises(DeadlineError, match=r"opd.py:OnPolicy.* did not answer within 60 s"):
        run(rules_of(HERE / "opd.py:OnPolicyDistillation", Silent()).finish_group(group()))


def test_a_process_runs_the_text_that_rank_0_has_read(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(BROKEN)
    config = make_config(algorithm=f"{path}:Broken")
    code = users_algorithm(config)
    path.write_text("no python")
    with pytest.raises(WorkerError, match="no_such_name"):
        run(RulesProcess(partial(find_algorithm, config), code).finish_group(group()))


def test_shipped_algorithms_need_no_process():
    assert isinstance(
        start_rules(partial(find_algorithm, make_config()), None, FakeCluster()), LocalRules
    )


@pytest.mark.integration
def test_a_real_process_finishes_groups_and_ends_with_its_owner(tmp_path):
    from local_ray import local_ray  # imports Ray

    with local_ray(num_cpus=1):
        from async_grpo.cluster.cluster import Cluster

        config = make_config(algorithm=f"{HERE}/global_norm.py:GlobalNorm")
        make = partial(find_algorithm, config)
        rules = start_rules(make, users_algorithm(config), Cluster())
        (finished,) = asyncio.run(rules.finish_step([group()]))
        assert [sample.advantage > 0 for sample in finished.samples] == [False, True]
