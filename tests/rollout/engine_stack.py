"""A real engine beside the models whose weights it serves, and ways to compare the two."""

import asyncio
import copy

import numpy as np
import torch
from tiny_models import canary_of, load_model, snapshot_of

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.types import GenerationRequest, SamplingContract, WeightsVersion

TEMPERATURE = 0.7
STOP = 1
TOLERANCE = 2e-5  # float32 rounds to 5e-6 in 400 tokens of 400 samples; other weights differ by 0.1
LONG_PROMPT = np.arange(300, dtype=np.int32) % 75 + 3  # fills several blocks of the prefix cache
FIRST, SECOND = WeightsVersion(0, 0), WeightsVersion(0, 1)
LOOK_S = 0.05
MAX_NUM_SEQS = 16  # fewer than some tests ask for: the engine's line is not empty
CANARY_TOKENS = (LONG_PROMPT[:64], np.array([3, 13, 4, 19], dtype=np.int32), LONG_PROMPT[5:7])


class Models(dict):
    """The model of each version, made when it is asked for; neighbours differ by far."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __missing__(self, version):
        seed = 1 + (version.batches - 1) % 4 if version.batches else None
        self[version] = load_model(self.folder, noise_seed=seed)
        return self[version]


class Stack:
    """An engine, the event loop it lives in, and the models whose weights it was given."""

    def __init__(self, folder, **options):
        from async_grpo.rollout.engine import Engine

        self.folder = folder
        self.runner = asyncio.Runner()
        config = WorkerConfig(model_path=folder, max_num_seqs=MAX_NUM_SEQS, **options)
        self.engine = Engine(config)
        self.models = Models(folder)

    def close(self):
        self.engine._llm.shutdown()
        self.runner.close()

    def run(self, call):
        return self.runner.run(call)

    def snapshot(self, version):
        model = self.models[version]
        canary = canary_of(model, CANARY_TOKENS)
        return snapshot_of(model.named_parameters(), version.batches, canary=canary)

    def load(self, snapshot):
        return self.run(self.engine.load(snapshot, fetch))

    def serve(self, version):
        return self.load(self.snapshot(version))

    def generate(self, **options):
        return self.run(self.engine.generate(make_request(**options)))

    def error_of(self, completion, version, *, prompt=LONG_PROMPT, start=0, stop=None):
        """Largest |engine - transformers in float64| over output tokens [start, stop)."""
        ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids]).astype(np.int64))
        model = copy.deepcopy(self.models[version]).double()
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        expected = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].numpy()
        return np.abs(expected - completion.logprobs)[start:stop].max()


async def fetch(bucket):
    return bucket.data


async def num_sampled(engine):
    """Tokens that each unfinished sequence has sampled: at a pause the engine tells of them."""
    await engine._llm.pause_generation(mode="keep", clear_cache=False)
    await engine._llm.resume_generation()
    states = engine._llm.output_processor.request_states
    return [state.detokenizer.num_output_tokens() for state in states.values()]


async def until_sampled(engine, is_enough):
    """Return when the tokens that each unfinished sequence has sampled are enough."""
    while not is_enough(await num_sampled(engine)):  # noqa: ASYNC110  vLLM tells nobody
        await asyncio.sleep(LOOK_S)


async def until_all_have_tokens(engine, num_tokens):
    """Return when every running sequence has sampled `num_tokens`."""
    await until_sampled(engine, lambda counts: min(counts, default=0) >= num_tokens)


def make_request(
    *,
    prompt=LONG_PROMPT,
    num_samples=4,
    max_tokens=24,
    seed=None,
    stop=(STOP,),
    lease_id=0,
    grammar="",
    **options,
):
    contract = SamplingContract(TEMPERATURE, stop, max_tokens, grammar=grammar)
    return GenerationRequest(0, 0, prompt, num_samples, contract, seed, lease_id, **options)
