"""Stories for scripted services, and the model, questions and folder of the runs that play them."""

import json

import numpy as np
import torch
from oracle import make_sample, oracle_logprobs, oracle_twin
from scripted_services import Story, Told
from tiny_models import load_model, make_model

from async_grpo.config.train_config import TrainConfig
from async_grpo.model.model_folder import check_model_folder
from async_grpo.run.data import load_data
from async_grpo.run.preparation import plan_run
from async_grpo.types import Turn, VersionSpan, WeightsVersion

NAMESPACE = "scripted-loop"
GROUP = 4
LONGEST = 20  # tokens of an output: one that has as many was cut
COMMON = {
    "batch_size": 4,
    "samples_per_question": GROUP,
    "max_generation_tokens": LONGEST,
    "max_tokens_per_gpu": 64,
    "loss_chunksize": 16,
    "min_samples_per_checkpoint": 1,  # an export of every version
    "trackers": "",
    "namespace": NAMESPACE,
    "logging_level": "ERROR",
}
REPLACED, EXHAUSTED = 2, 8  # ordinals


class World:
    """The model, the questions and a folder for the runs."""

    def __init__(self, folder, address, questions):
        self.folder, self.address, self.questions = folder, address, questions
        self.model = str(folder / "model")
        make_model(self.model, tied=True)
        load_model(self.model, noise_seed=1).save_pretrained(self.model)

    def config(self, name, options):
        return TrainConfig(
            model_name_or_path=self.model,
            data_path=self.questions,
            output_dir=str(self.folder / name),
            ray_address=self.address,
            **COMMON | options,
        )

    def prompt(self, config):
        """Token ids of a slot's question at an attempt."""
        facts = check_model_folder(self.model)
        plan = plan_run(config, facts, *load_data(config, facts), num_ranks=2)
        return lambda ordinal, attempt: plan.draw(ordinal, attempt=attempt)[0].input_token_ids

    def prompts(self, config):
        """Token ids by ordinal."""
        prompt = self.prompt(config)
        return [prompt(ordinal, 0) for ordinal in ordinals_of(config)]

    def rows(self, name):
        return lines(self.folder / name / "training_metrics.jsonl")

    def samples(self, name):
        return lines(self.folder / name / "samples.jsonl")

    def versions(self, name):
        """Files of the weights after each batch."""
        exports = (self.folder / name / "hf_format").iterdir()
        ordered = sorted(exports, key=lambda folder: int(folder.name.removeprefix("samples_")))
        return [folder / "model.safetensors" for folder in ordered]


def ordinals_of(config):
    return range(config.batching.num_training_batches * config.batching.batch_size)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_story(world, name, options):
    """Groups around the model's own numbers: some without variance."""
    config, rng = world.config(name, options), np.random.default_rng(7)
    prompt, twin = world.prompt(config), oracle_twin(load_model(world.model))
    keys = [(ordinal, 0) for ordinal in ordinals_of(config)] + [(REPLACED, 1), (EXHAUSTED, 1)]
    groups = {}
    for ordinal, attempt in keys:
        version = WeightsVersion(0, ordinal // config.batching.batch_size)
        made = [make_completion(twin, prompt(ordinal, attempt), version, rng) for _ in range(GROUP)]
        completions, references = zip(*made, strict=True)
        even = (ordinal, attempt) in ((REPLACED, 0), (EXHAUSTED, 0), (EXHAUSTED, 1))
        rewards = (0.1,) * GROUP if even else tuple(rng.random(GROUP).tolist())
        groups[ordinal, attempt] = Told(completions, rewards, references)
    return Story(config=config, groups=groups)


@torch.no_grad()
def make_completion(twin, prompt, version, rng):
    """(completion, reference scores)."""
    output = rng.integers(3, 70, size=rng.integers(3, LONGEST + 1)).astype(np.int32)
    own = oracle_logprobs(twin, make_sample(prompt, output), temperature=1.0).numpy()
    completion = Turn(
        token_ids=output,
        logprobs=(own + rng.normal(0, 0.2, len(own))).astype(np.float32),
        weights_versions=(VersionSpan(version, 0, len(output)),),
        finish_reason="length" if len(output) == LONGEST else "stop",
        text="",
    )
    return completion, (own + rng.normal(0, 0.2, len(own))).astype(np.float32)


def lagging_story(config, paper):
    """The completions of a paper run; one question is first answered with weights too old."""
    return Story(
        config=config,
        groups={(ordinal, 0): Told(*told) for ordinal, told in enumerate(paper.groups)},
        latency_seed=3,
        lies=frozenset({config.batching.batch_size * 3 + 1}),
    )
