from dataclasses import replace

import pytest

from async_grpo.config.train import TrainConfig
from async_grpo.errors import ConfigError
from async_grpo.run.recruitment import Demand, check_worker
from async_grpo.types import WorkerInfo

WORKER = WorkerInfo("w1", "generation", "node", 1, "other-model", 128, 8.0, 0.0, max_model_len=48)


def demand(*, longest_prompt=16, **options):
    config = TrainConfig(
        model_name_or_path="model",
        data_path="data",
        max_generation_tokens=32,
        max_tokens_per_gpu=64,
        **options,
    )
    return Demand(config, vocab_size=128, longest_prompt=longest_prompt, tokenizer_hash="ab" * 32)


def test_a_worker_that_just_fits_is_taken():
    check_worker(WORKER, demand())
    check_worker(replace(WORKER, temperature=0.5), demand(temperature=0.5))
    check_worker(replace(WORKER, tokenizer_hash="ab" * 32), demand())
    check_worker(replace(WORKER, role="reference"), demand(weight_transport="nccl"))


@pytest.mark.parametrize(
    ("worker", "options", "sentence"),
    [
        (
            replace(WORKER, temperature=0.5),
            {},
            r"--temperature 1.0 must be that of worker w1, which serves 0.5: give both the same",
        ),
        (
            replace(WORKER, vocab_size=127),
            {},
            r"vocabulary has 127 tokens instead of 128: start it with --model-path model instead",
        ),
        (
            replace(WORKER, tokenizer_hash="cd" * 32),
            {},
            r"worker w1 must have the tokenizer of the model that is trained, but that of "
            r"other-model has another hash \(cdcdcdcdcdcd\) than that of model \(abababababab\): ",
        ),
        (
            WORKER,
            {"longest_prompt": 17},
            r"at most 48 tokens, .* --max-generation-tokens 32 needs 49: .* larger --max-model-len",
        ),
        (
            replace(WORKER, role="reference"),
            {"longest_prompt": 17},
            r"needs 49: start it with a larger --max-tokens-per-gpu",
        ),
        (
            WORKER,
            {"weight_transport": "nccl"},
            r"--weight-transport nccl needs an NVIDIA device in trainer rank 0, .* object_store",
        ),
    ],
)
def test_a_worker_that_cannot_serve_the_run_is_refused(worker, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_worker(worker, demand(**options))
