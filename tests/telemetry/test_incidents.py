from dataclasses import replace

from async_grpo.telemetry.incidents import Incidents
from async_grpo.types import PipelineStatus, Problem, WorkerInfo

QUIET = PipelineStatus(
    **{name: 0 for name in ("batch", "generating", "verifying", "in_reference", "ready")},
    **{name: 0 for name in ("training", "done", "output_tokens", "answers", "reward_count")},
    reward_sum=0.0,
)
OLD_WORRY = Problem("generation", "the worker did not answer", "generation-a")


def worker(name, role="generation"):
    return WorkerInfo(name, role, "node", 7, "model", 100, 1.0, 0.0, 64)


def seen(*roll_calls):
    """Incidents after (role, members, fenced) at 0, 1, 2, ... seconds."""
    incidents = Incidents()
    for now_s, (role, members, fenced) in enumerate(roll_calls):
        incidents.see_members(role, [worker(name, role) for name in members], fenced, now_s=now_s)
    return incidents


def test_the_death_that_left_a_role_empty_explains_a_later_stall():
    incidents = seen(("generation", "a", {}), ("generation", "", {"a": "worker a died"}))
    incidents.see_status(replace(QUIET, problem=Problem("reference", "nothing comes")), now_s=5)
    cause = incidents.first_cause()
    assert (cause.at_s, cause.reason, cause.worker.pid) == (1, "worker a died", 7)


def test_of_several_deaths_the_first_is_the_cause():
    calls = (
        ("generation", "ab", {}),
        ("generation", "b", {"a": "1st"}),
        ("generation", "", {"b": "2nd"}),
    )
    assert seen(*calls).first_cause().reason == "1st"


def test_a_lost_worker_explains_nothing_while_its_role_works():
    incidents = seen(("logprob", "ab", {}), ("logprob", "b", {"a": "died"}))
    assert incidents.first_cause() is None
    assert [each.reason for each in incidents.latest] == ["died"]


def test_a_loss_that_was_replaced_is_not_blamed_for_a_later_one():
    calls = [("generation", "a", {}), ("generation", "b", {"a": "early"}), ("generation", "", {})]
    assert seen(*calls).first_cause().reason == "generation worker b left its registry"


def test_the_first_problem_since_all_was_well_is_the_cause_and_names_the_worker():
    incidents = seen(("generation", ["generation-a"], {}))
    problems = (
        Problem("verification", "old"),
        None,
        OLD_WORRY,
        Problem("generation", "no worker was free"),
    )
    for now_s, problem in enumerate(problems):
        incidents.see_status(replace(QUIET, problem=problem), now_s=now_s)
    cause = incidents.first_cause()
    assert (cause.at_s, cause.reason, cause.worker.worker_id) == (2, str(OLD_WORRY), "generation-a")
    incidents.see_status(QUIET, now_s=9)
    assert incidents.first_cause() is None


def test_answers_are_what_counts_as_moving():
    incidents = Incidents()
    for now_s, answers in enumerate((0, 3, 3, 3)):
        incidents.see_status(replace(QUIET, answers=answers), now_s=now_s)
    assert incidents.moved_at_s == 1


def test_memory_is_bounded():
    incidents = Incidents()
    for number in range(3000):
        incidents.see_members("generation", [worker(f"w{number}")], {}, now_s=number)
    assert (len(incidents._known), len(incidents.latest)) == (1000, 20)
