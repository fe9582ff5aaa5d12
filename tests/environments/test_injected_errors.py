"""A tenth of all groups fails by each class of error: the others have not one other bit.

The whole way from admission to the trainer's minibatches is real, on a clock that jumps; engines,
judge, service and verifiers are played. Half of the errors pass. Then a request is sent again, or
the whole group is played again, but what nobody has classified fails its group at once.
"""

import functools
from collections import Counter

import numpy as np
from players import make_turn
from script import Script
from scripted import run
from scripted_run import Run, make_config, split_steps

from async_grpo.config.roles import GENERATION, judge, service
from async_grpo.environments.base import Environment, FailureClass
from async_grpo.environments.chat.messages import ToolCall
from async_grpo.environments.judging import score
from async_grpo.environments.play import GroupPlay
from async_grpo.environments.tools.function import tool
from async_grpo.environments.tools.toolbox import Toolbox
from async_grpo.types import JudgeAnswer, Verdict
from async_grpo.util.errors import DeadlineError, ProcessLostError

# A limit of the user's is no error, and what takes longer is not played again: see test_play.
CLASSES = tuple(each for each in FailureClass if each is not FailureClass.TIMEOUT)
RATE = 0.1  # of groups, for each class
GROUP, NUM_BATCHES, BATCH = 4, 12, 20
CONFIG = make_config(
    batch_size=BATCH,
    num_training_batches=NUM_BATCHES,
    samples_per_question=GROUP,
    max_generation_tokens=3,
    max_tokens_per_gpu=60,
    advantage="grpo",
    judges="strict",
)
LOST = {
    FailureClass.ENGINE: ProcessLostError("the engine has died"),
    FailureClass.JUDGE: ProcessLostError("the judge has died"),
    FailureClass.SERVICE: ProcessLostError("the service has died"),
    FailureClass.DEADLINE: DeadlineError("no turn came"),
}
WHOSE = {FailureClass.JUDGE: judge("strict"), FailureClass.SERVICE: service("index")}


@tool
async def look(is_away: bool) -> str:
    """What is there."""
    if is_away:
        raise ConnectionError("the index is away")
    return "a thing"


BOX = Toolbox([look])


class Tried(Environment):
    """Two turns, a tool and a service between them; the judge says what it is worth, never 0."""

    def __init__(self, failure, times):
        self.failure, self.times = failure, times
        self.num_plays = 0

    def fails(self, failure):
        """Whether it does now, which it does so many times."""
        now = failure is self.failure and self.times > 0
        self.times -= now
        return now

    async def play(self, question, policy, services):
        self.num_plays += 1
        first = await policy.sample(question.input_token_ids)
        if self.fails(FailureClass.ENVIRONMENT):
            raise KeyError("a mistake of its author")
        await BOX.answer([ToolCall("look", {"is_away": self.fails(FailureClass.TOOL)})])
        heard = await services["index"]([60])
        await policy.sample(np.concatenate([question.input_token_ids, first.token_ids, heard]))
        return policy.episode()

    async def grade(self, question, episodes, services):
        verdicts = []
        for episode in episodes:
            asked = [{"role": "user", "content": str(reward_of(episode))}]
            (reward,) = await services.judge(["strict"], asked, form=score(0, 1))
            verdicts.append(Verdict.scored(reward, adapter="strict"))
        return verdicts


def reward_of(episode):
    """From what was sampled: somewhere in [0.25, 1]."""
    sampled = np.concatenate([turn.token_ids for turn in episode.turns])
    return round(0.25 + 0.75 * float(np.random.default_rng(sampled).random()), 6)


class InjectedRun(Run):
    """`rate` of the groups fail by each class, for ever or once."""

    def __init__(self, rate):
        super().__init__(Script(config=CONFIG, max_rows=2, num_ranks=2))
        self.rate = rate
        self.cluster.play = self.play
        self.asked = Counter()
        self.played = {}  # by ordinal: the environment, and how often its group was asked for

    def failure(self, ordinal):
        """The class that befalls a group, or none, and how often."""
        number = int(self.script.chance("class", ordinal) / self.rate) if self.rate else 99
        is_for_ever = self.script.chance("times", ordinal) < 0.5
        return (CLASSES[number], 99 if is_for_ever else 1) if number < len(CLASSES) else (None, 0)

    async def play(self, request):
        environment, number = self.played.get(request.ordinal, (None, 0))
        environment = environment or Tried(*self.failure(request.ordinal))
        self.played[request.ordinal] = environment, number + 1
        group = GroupPlay(request, functools.partial(self.ask, environment, request.lease_id), None)
        return await group.run(environment)

    async def ask(self, environment, lease_id, role, method, request, **_):
        for failure, error in LOST.items():
            is_its = role == WHOSE.get(failure, GENERATION)
            if is_its and environment.fails(failure):
                raise error
        if role == service("index"):
            return request.content
        if role != GENERATION:
            return JudgeAnswer(f"VERDICT: {request.messages[0]['content'].split()[0]}", 9)
        history = request.input_token_ids.tolist()
        self.asked[request.ordinal, *history] += 1
        rng = np.random.default_rng(
            [request.ordinal, *history, self.asked[request.ordinal, *history]]
        )
        ids = rng.integers(5, 50, size=rng.integers(1, 4))
        turns = [make_turn(ids, version=self.cluster.version)]
        self.generation.open[lease_id].received(turns)
        return turns


@functools.cache
def outcome(rate):
    """(the run, samples that were trained by key, samples that failed by reason)."""
    running = InjectedRun(rate)
    trained, reasons = {}, Counter()
    for rank, items in enumerate(run(running.train())):
        for minibatches, end in split_steps(items):
            samples = [sample for each in minibatches for sample in each.samples]
            trained |= {(sample.ordinal, sample.index): sample for sample in samples}
            reasons.update(end.reasons if rank == 0 else {})
    return running, trained, reasons


ENGINE_AWAY = (FailureClass.ENGINE, 99)


def is_lost(running, ordinal):
    """Whether its group fails: for an error that stays, or that nobody has classified."""
    failure, times = running.failure(ordinal)
    return times > 1 or failure is FailureClass.ENVIRONMENT


def groups_of(running):
    return range(BATCH * NUM_BATCHES)


def test_groups_without_an_injected_error_have_the_same_bits_as_without_any():
    running, trained, _ = outcome(RATE)
    _, expected, none = outcome(0.0)
    spared = [n for n in groups_of(running) if running.failure(n)[0] is None]
    assert not none and len(expected) == GROUP * len(groups_of(running))
    assert 80 < len(spared) < 160
    for key in [(ordinal, index) for ordinal in spared for index in range(GROUP)]:
        got, other = trained[key], expected[key]
        assert np.float64(got.advantage).tobytes() == np.float64(other.advantage).tobytes()
        assert got.verdict.reward == other.verdict.reward
        (row,), (same,) = got.episode.rows, other.episode.rows
        assert row.token_ids.tolist() == same.token_ids.tolist()


def test_no_error_becomes_a_reward_and_each_is_counted_by_its_class():
    running, trained, reasons = outcome(RATE)
    lost = [n for n in groups_of(running) if is_lost(running, n)]
    expected = Counter(running.failure(ordinal)[0] for ordinal in lost)
    assert set(expected) == set(CLASSES)
    failed = {reason: n for reason, n in reasons.items() if reason.startswith("failed")}
    assert failed == {f"failed: environment: {c}": GROUP * n for c, n in expected.items()}
    assert {ordinal for ordinal, _ in trained} == set(groups_of(running)) - set(lost)
    assert len(trained) == GROUP * (len(groups_of(running)) - len(lost))
    assert min(sample.verdict.reward for sample in trained.values()) >= 0.25


def test_what_passes_is_done_again_and_its_group_is_trained():
    running, trained, _ = outcome(RATE)
    passing = [n for n in groups_of(running) if running.failure(n)[1] and not is_lost(running, n)]
    assert {running.failure(n)[0] for n in passing} == set(CLASSES) - {FailureClass.ENVIRONMENT}
    assert all((ordinal, index) in trained for ordinal in passing for index in range(GROUP))


def test_no_member_is_ever_played_again_alone():
    running, _, _ = outcome(RATE)
    again = Counter()
    for ordinal, (environment, number) in running.played.items():
        assert environment.num_plays == GROUP * number  # one play of each member, each time
        again[running.failure(ordinal)] += number - 1
    tool = (FailureClass.TOOL, 1), (FailureClass.TOOL, 99)
    assert {failure for failure, number in again.items() if number} == {*tool, ENGINE_AWAY}
    assert max(number for _, number in running.played.values()) == 2
