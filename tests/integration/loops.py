"""Real runs through the command line: workers, trainers, what they leave, and its recomputation."""

import contextlib
import json
import re

import numpy as np
import pytest
import ray
import torch
from commands import dispatcher, trainer, wait_until
from tiny_models import load_model
from torch.nn.utils.rnn import pad_sequence

from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import CONTROLLER
from async_grpo.telemetry.schema import METRICS
from async_grpo.types import WeightsVersion

OF_ROWS = (
    "input_token_ids", "output_token_ids", "loss_mask", "behaviour_logprobs",
    "reference_logprobs", "weights_versions",
)  # fmt: skip

READY_S, TIMEOUT_S = 180.0, 60.0
REWARDS = """
def share_of_digits(sample, **kwargs):
    output = sample["output"]
    return {"reward": sum(map(str.isdigit, output)) / max(len(output), 1)}


def begins_with_a_digit(sample, **kwargs):
    return {"reward": float(sample["output"][:1].isdigit())}
"""
# No adapter gives one; no group was replaced.
# In runs without judges, too.
WITHOUT_POPULATION = {"avg_format_reward", "avg_replaced_reward", "perc_timed_out_samples"} | {
    "perc_continued_groups",
    "perc_resampled_groups",  # of what was sampled since the step before: nothing, of a run ahead
    "judge_answers",
    "judge_tokens",
    "judge_asked_again",
    "perc_judge_disagreements",
    "service_answers",
    "avg_ref_reward",
    *("routing_mismatch", "canary_routing_mismatch", "router_entropy"),  # of a dense model
    "merge_loss",  # without an adapter
    "replay_gain",
    *("expert_load_max", "dead_experts", "balance_loss"),
    *("mfu", "mfu_computing", "peak_device_bytes", "peak_allocated_bytes"),  # of a CPU
    "seconds_copying",
}


class Setup:
    """What all runs of a file share, and a folder for what they leave behind."""

    def __init__(self, folder, address, model, questions, *, namespace, reward):
        self.folder, self.address, self.model, self.questions = folder, address, model, questions
        self.namespace = namespace
        self._reward = f"{folder / 'rewards.py'}:{reward}"
        (folder / "rewards.py").write_text(REWARDS)

    def workers(self, mode, *flags, num_workers=2, model=None):
        """A dispatcher in the foreground."""
        return dispatcher(
            self.address, model or self.model, "--mode", mode, "--num-workers", num_workers,
            "--reward-fns", self._reward, "--max-num-seqs", 16, "--max-tokens-per-gpu", 512,
            *flags, "--namespace", self.namespace,
        )  # fmt: skip

    def train(self, name, *, ranks=2, **options):
        """A run whose command goes on."""
        shape = {"max_generation_tokens": 12, "max_tokens_per_gpu": 64}
        options = shape | {"dump_token_columns": True} | options
        flags = (
            part
            for option, value in options.items()
            for part in ("--" + option.replace("_", "-"), value)
        )
        output = self.folder / name
        return trainer(
            self.address,
            self.model,
            self.questions,
            output,
            *flags,
            "--namespace",
            self.namespace,
            ranks=ranks,
        )

    def rows(self, name):
        """The lines of a run's metrics so far."""
        return read_lines(self.folder / name / "training_metrics.jsonl")

    def samples(self, name):
        """The lines of a run's samples so far."""
        return read_samples(self.folder / name)

    def versions(self, name):
        """The model after 0, 1, 2 ... batches of a run that exported after each."""
        exports = (self.folder / name / "hf_format").iterdir()
        ordered = sorted(exports, key=lambda folder: int(folder.name.removeprefix("samples_")))
        return [load_model(folder) for folder in (self.model, *ordered)]


def read_samples(folder):
    """The lines of a dump whose samples have one row each, without the list that it stands in."""
    lines = read_lines(folder / "samples.jsonl")
    for line in lines:
        for columns in (line, line.get("scores", {})):
            for name, rows in columns.items():
                if name in OF_ROWS or columns is not line:
                    (columns[name],) = rows
    return lines


def read_lines(path):
    """The whole lines of a file that may still be written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def num_registered(command):
    """Workers that a dispatcher has told of, its verifier pool aside."""
    return len(re.findall(r"^worker (?!verifier-)\S+ registered", command.out, re.MULTILINE))


def wait_until_registered(command, num_workers):
    """Raises with what the dispatcher has printed when it ends, or they do not come in time."""
    with contextlib.suppress(AssertionError):
        wait_until(
            lambda: num_registered(command) >= num_workers or command.has_ended(),
            timeout_s=READY_S,
        )
    assert num_registered(command) == num_workers, f"{command.out}\n{command.err}"


def controller_call(method, *args):
    call = getattr(Cluster().find_actor(CONTROLLER), method).remote(*args)
    return ray.get(call, timeout=TIMEOUT_S)


def on_a_worker(role, method, request):
    """The answer of a worker, with the weights that the last run has left it."""
    (_, handle), *_ = controller_call("receivers", role)
    return ray.get(getattr(handle, method).remote(request), timeout=TIMEOUT_S)


def recomputed(model, prompt, output):
    """[L] log-probabilities of the output's tokens by transformers, at temperature 1."""
    return _recomputed(model, [(prompt, output)])[0]


def recomputed_samples(model, samples):
    """The same of each dumped sample."""
    pairs = [(sample["input_token_ids"], sample["output_token_ids"]) for sample in samples]
    return _recomputed(model, pairs)


@torch.no_grad()
def _recomputed(model, pairs):
    """In one forward: of a causal model no token sees the padding behind it."""
    sequences = [torch.from_numpy(np.concatenate(pair).astype(np.int64)) for pair in pairs]
    ids = pad_sequence(sequences, batch_first=True)
    logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].numpy()
    return [
        row[len(prompt) - 1 :][: len(output)]
        for row, (prompt, output) in zip(logprobs, pairs, strict=True)
    ]


def engine_differences(samples, models):
    """{version: [nats]}: |engine - the weights that its tokens name| of every dumped token."""
    spans = {}
    for sample in samples:
        for version, start, stop in sample["weights_versions"]:
            named = spans.setdefault(WeightsVersion.parse(version).batches, [])
            named.append((sample, start, stop))
    found = {}
    for batches, named in spans.items():
        own = recomputed_samples(models[batches], [sample for sample, _, _ in named])
        found[batches] = [
            difference
            for scores, (sample, start, stop) in zip(own, named, strict=True)
            for difference in np.abs(scores - sample["behaviour_logprobs"])[start:stop]
        ]
    return found


def check_rows(rows, *, questions, group, max_staleness, unmeasured=frozenset()):
    """Every metric has a value, every sample of every admitted slot one fate, no lag is too old."""
    for row in rows:
        missing = {m.name for m in METRICS if row.get(m.name) is None}
        assert missing <= WITHOUT_POPULATION | unmeasured
        fates = {name: count for name, count in row.items() if name.startswith("fate_")}
        replaced = fates.pop("fate_replaced")
        assert sum(fates.values()) == questions * group
        assert replaced % group == 0
        assert row["fate_trained"] + row["fate_zero_contribution"] == row["num_samples"]
        assert row["fate_trained"] == row["trained_samples"]
        assert 0 <= row["avg_lag"] <= row["max_lag"] <= max_staleness
        by_lag = [row[f"lag_{lag}_samples"] for lag in range(max_staleness + 1)]
        assert sum(by_lag) == row["num_samples"]
        assert sum(lag * count for lag, count in enumerate(by_lag)) == pytest.approx(
            row["avg_lag"] * row["num_samples"]
        )
