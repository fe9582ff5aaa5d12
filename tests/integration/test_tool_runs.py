"""Real runs of a model that chats: a tool, an unchanged agent, a judge, and the run's gateway."""

import re
import subprocess
import sys
from collections import Counter

import numpy as np
import openai
import pytest
from commands import REPOSITORY, Command, dispatcher, trainer
from loops import READY_S, TIMEOUT_S, engine_differences, read_lines, read_samples
from remote_agents import chat, served
from tiny_models import load_model
from transformers import AutoTokenizer

# Engines, trainers and an agent a process: two minutes on an idle machine.
pytestmark = [pytest.mark.integration, pytest.mark.slow]
MODEL = REPOSITORY / "sample-data" / "tiny-chat"
NAMESPACE = ("--namespace", "tools")
GROUP, LONGEST, ROW = 8, 64, 512
TOLERANCE = 2e-5  # nats, float32, of a trained model, whose logits are large
END = "<|im_end|>"
JUDGED = """
from async_grpo.types import Verdict

async def judged(question, episodes, services):
    verdicts = []
    for number, episode in enumerate(episodes):
        messages = [{"role": "user", "content": question.input}]
        said = await services.ask_judge("strict", messages, temperature=0, max_tokens=16)
        verdicts.append(Verdict("scored", number + len(said), None, "judge", said, 0.0))
    return verdicts

judged.groupwise = True
"""
PLANS = """
from async_grpo.environments.base import Environment

class Plans(Environment):
    async def play(self, question, policy, services):
        history = list(question.input_token_ids)
        plan = await policy.sample(history, max_tokens=16, grammar='{"regex": "[0-9]{2}=[0-9]"}')
        await policy.sample([*history, *plan.token_ids])
        return policy.episode()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tools")


@pytest.fixture(scope="module")
def puzzles(folder):
    file = folder / "puzzles.jsonl"
    command = [
        *(sys.executable, "sample-data/create_count_down.py", "--style", "compact"),
        *("--min-numbers", 3, "--max-numbers", 3, "--max-number", 9, "--operators", "+-"),
        *("--num-questions", 16, "--seed", 1, "--model-path", MODEL, "--output", file),
    ]
    subprocess.run([*map(str, command)], check=True, cwd=REPOSITORY)
    return file


@pytest.fixture(scope="module")
def workers(ray_cluster):
    """An engine with verifiers, and whoever plays environments."""
    fixed = ("--max-num-seqs", 16, *NAMESPACE)
    engine = ("--reward-fns", "countdown", "--max-model-len", ROW)
    with (
        dispatcher(ray_cluster, MODEL, *engine, *fixed) as generation,
        Command("worker_dispatcher.py", "--ray-address", ray_cluster, "--mode", "environment",
                *fixed) as playing,
    ):  # fmt: skip
        for command in (generation, playing):
            command.wait_for("registered", timeout_s=READY_S)
        yield ray_cluster


@pytest.fixture(scope="module")
def train(workers, puzzles, folder):
    """Start a run of a few steps."""

    def train(name, environment, *options):
        return trainer(
            workers, MODEL, puzzles, folder / name, "--environment", environment,
            "--samples-per-question", GROUP, "--max-generation-tokens", LONGEST,
            "--max-tokens-per-gpu", ROW, "--learning-rate", 1e-4, "--dump-token-columns",
            "--min-samples-per-checkpoint", 1, *options, *NAMESPACE,
        )  # fmt: skip

    return train


def check_tokens(folder):
    """Every token of every row: sampled by the weights that it names, or read; how many were read.

    A sampled token has the log-probability that those weights give it there, and no other.
    """
    exports = sorted((folder / "hf_format").iterdir(), key=lambda f: int(f.name.split("_")[1]))
    models = [load_model(path) for path in (MODEL, *exports)]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    samples, num_read = read_samples(folder), 0
    assert samples
    for sample in samples:
        mask = np.array(sample["loss_mask"])
        ids = np.array(sample["output_token_ids"])
        logprobs = np.array(sample["behaviour_logprobs"])
        spanned = np.zeros(len(ids), bool)
        for _, start, stop in sample["weights_versions"]:
            spanned[start:stop] = True
        assert np.array_equal(mask, spanned)
        assert (logprobs[~mask] == 0).all()
        assert sample["num_output_tokens"] == mask.sum()
        num_read += (~mask).sum()
        edges = np.flatnonzero(np.diff(mask.astype(int))) + 1
        for part, is_sampled in zip(np.split(ids, edges), np.split(mask, edges), strict=True):
            text = tokenizer.decode(part)
            if is_sampled[0]:
                assert END not in text.removesuffix(END)
            else:
                assert text.startswith(("\n<|im_start|>user\n<tool_response>", END))
                assert text.endswith("<|im_start|>assistant\n")
    differences = engine_differences(samples, models)
    assert max(map(max, differences.values())) <= TOLERANCE
    return num_read


def check_steps(folder, *, number):
    rows = read_lines(folder / "training_metrics.jsonl")
    assert len(rows) == number
    assert all(row["fate_failed"] == 0 for row in rows)
    assert max(row["canary_max"] for row in rows) <= TOLERANCE


def test_a_tool_s_run_trains_what_the_engine_sampled_while_others_ask_the_policy(train, folder):
    environment = "examples/countdown_calculator.py:CountdownCalculator"
    output = folder / "tool"
    with train("tool", environment, "--num-training-batches", 4, "--gateway", 0) as command:
        command.wait_for("the policy is served at", timeout_s=READY_S)
        lines = (output / "gateway.env").read_text().splitlines()
        url, token = (line.partition("=")[2] for line in lines)
        assert (output / "gateway.env").stat().st_mode & 0o777 == 0o600
        client = openai.OpenAI(base_url=url, api_key=token, max_retries=0, timeout=TIMEOUT_S)
        messages = [{"role": "user", "content": "use 2 9 8 to make 15\n"}]
        answers = [
            client.chat.completions.create(model="any", messages=messages, logprobs=True)
            for _ in range(8)
        ]
        assert command.wait(timeout_s=READY_S) == 0, command.err[-4000:]
    assert all(answer.choices[0].logprobs.content for answer in answers)
    check_steps(output, number=4)
    assert check_tokens(output) > 0
    outputs = [sample["output"] for sample in read_lines(output / "samples.jsonl")]
    assert len(outputs) == 4 * 4 * GROUP


def test_an_agent_that_knows_openai_only_trains_what_the_engine_sampled(train, folder):
    agent = f"agent:{sys.executable} {REPOSITORY}/examples/black_box_agent/agent.py"
    options = ("--num-training-batches", 2, "--batch-size", 2)
    with train("agent", agent, *options) as command:
        assert command.wait(timeout_s=2 * READY_S) == 0, command.err[-4000:]
    check_steps(folder / "agent", number=2)
    check_tokens(folder / "agent")


def test_a_turn_under_a_grammar_is_read_and_counted_and_the_next_one_trained(train, folder):
    (folder / "plans.py").write_text(PLANS)
    options = ("--num-training-batches", 2, "--batch-size", 2, "--constrained-outputs")
    with train("plans", f"{folder}/plans.py:Plans", *options) as command:
        assert command.wait(timeout_s=READY_S) == 0, command.err[-4000:]
    check_steps(folder / "plans", number=2)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    num_constrained = num_sampled = 0
    for sample in read_samples(folder / "plans"):
        plan, answer = (turn["num_tokens"] for turn in sample["turns"] if turn["role"] == "model")
        assert sample["loss_mask"] == [False] * plan + [True] * answer
        said = tokenizer.decode(sample["output_token_ids"][:plan], skip_special_tokens=True)
        assert re.fullmatch("[0-9]{2}=[0-9]", said)
        num_constrained, num_sampled = num_constrained + plan, num_sampled + plan + answer
    rows = read_lines(folder / "plans" / "training_metrics.jsonl")
    shares = [row["perc_constrained_tokens"] for row in rows]
    assert min(shares) <= num_constrained / num_sampled <= max(shares)


def test_an_agent_served_elsewhere_trains_what_the_engine_sampled_by_its_own_reward(train, folder):
    given = []

    def act(asked):
        said = chat(asked, asked["input"], max_tokens=LONGEST)
        given.append(0.5 + len(said) % 7)
        return {"reward": given[-1], "info": {"answer": asked["answer"]}}

    with (
        served(act) as agent,
        train("remote", agent, "--num-training-batches", 2, "--batch-size", 2) as command,
    ):
        assert command.wait(timeout_s=READY_S) == 0, command.err[-4000:]
    check_steps(folder / "remote", number=2)
    check_tokens(folder / "remote")
    rewards = Counter(each["reward"] for each in read_lines(folder / "remote" / "samples.jsonl"))
    assert rewards.total() == 2 * 2 * GROUP and rewards <= Counter(given)


def test_an_asynchronous_reward_that_asks_a_judge_grades_a_run(train, workers, folder):
    (folder / "judged.py").write_text(JUDGED)
    judge = ("--mode", "judge", "--name", "strict", "--max-model-len", ROW, *NAMESPACE)
    with (
        dispatcher(workers, MODEL, *judge) as judging,
        train("judged", f"{folder}/judged.py:judged", "--judges", "strict",
              "--num-training-batches", 2) as command,
    ):  # fmt: skip
        assert command.wait(timeout_s=READY_S) == 0, command.err[-4000:] + judging.err[-1000:]
    check_steps(folder / "judged", number=2)
    check_tokens(folder / "judged")
    rows = read_lines(folder / "judged" / "training_metrics.jsonl")
    assert [row["judge_answers"] for row in rows] == [4 * GROUP] * 2
    assert all(row["judge_tokens"] > row["judge_answers"] for row in rows)
    for sample in read_lines(folder / "judged" / "samples.jsonl"):
        assert sample["reward"] == sample["index"] + len(sample["reason"])
