"""vLLM's own schedulers below ours, one step at a time or the next while one runs.

Devices take the second kind, which vLLM switches off on a CPU: here it is built, and driven as
vLLM's engine core does, with counted tokens in place of a model.
"""

from collections import deque

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from async_grpo.rollout.scheduler import (
    KEEP,
    WholeOutputsAsyncScheduler,
    WholeOutputsScheduler,
    make_scheduler,
)

BLOCK = 4
PROMPT = list(range(3, 3 + 2 * BLOCK + 1))  # two whole blocks and a token
KINDS = pytest.mark.parametrize("is_async", [False, True])
hash_of = get_hash_fn_by_name("sha256")
init_none_hash(hash_of)


class Core:
    """Steps as vLLM's engine core takes them; an asynchronous one has two under way."""

    def __init__(self, folder, *, is_async, keeps=False, num_blocks=64):
        config = vllm_config(folder, is_async=is_async, keeps=keeps)
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = make_scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        self.depth = 2 if is_async else 1
        self.under_way = deque()
        self.num_sampled = 0
        self.tokens = {}  # all that were sampled for each, in order
        self.told = {}  # and what was sent
        self.spared = {}  # tokens that each found in the cache when it began last

    def add(self, name, *, prompt=PROMPT, max_tokens=8):
        params = SamplingParams(
            max_tokens=max_tokens,
            logprobs=0,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        params.update_from_generation_config({}, eos_token_id=None)
        hasher = get_request_block_hasher(BLOCK, hash_of)
        self.tokens[name], self.told[name] = [], []
        request = Request(name, list(prompt), params, None, block_hasher=hasher)
        self.scheduler.add_request(request)

    def step(self):
        """Schedule as far ahead as is done; then take the outputs of the oldest step."""
        scheduled = self.scheduler.schedule()
        known = scheduled.scheduled_cached_reqs
        self.spared |= {
            name: num_tokens
            for name, num_tokens in zip(known.req_ids, known.num_computed_tokens, strict=True)
            if name in known.resumed_req_ids
        }
        self.spared |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        self.under_way.append((scheduled, self.sample(scheduled)))
        return self.update() if len(self.under_way) == self.depth else {}

    def sample(self, scheduled):
        names = []
        for name in scheduled.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            if not request.is_prefill_chunk:
                names.append(name)
        ids = np.arange(1000 + self.num_sampled, 1000 + self.num_sampled + len(names))[:, None]
        self.num_sampled += len(names)
        return names, ids

    def update(self):
        scheduled, (names, ids) = self.under_way.popleft()
        lists = LogprobsLists(ids, -ids.astype(np.float32), ids[:, 0])
        output = ModelRunnerOutput(
            names, {name: index for index, name in enumerate(names)}, ids.tolist(), lists
        )
        for name, (token,) in zip(names, ids.tolist(), strict=True):
            if name in self.scheduler.requests:
                self.tokens[name].append(token)
        messages = self.scheduler.update_from_output(scheduled, output)
        for message in messages.values():
            for each in message.outputs:
                self.take(each)
        return messages

    def take(self, output):
        self.told[output.request_id] += output.new_token_ids
        if output.new_token_ids:
            ids, logprobs, ranks, _ = output.new_logprobs
            assert ids[:, 0].tolist() == ranks.tolist() == output.new_token_ids
            assert (-logprobs[:, 0]).tolist() == output.new_token_ids

    def run(self):
        while self.scheduler.has_requests() or self.under_way:
            self.step() if self.scheduler.has_requests() else self.update()

    def pause(self):
        """Then all that was sampled is told, and the caches are reset, as before new weights."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        self.run()
        assert self.told == self.tokens
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def resume(self):
        self.scheduler.set_pause_state(PauseState.UNPAUSED)


def vllm_config(folder, *, is_async, keeps) -> VllmConfig:
    args = EngineArgs(
        model=folder,
        dtype="float32",
        block_size=BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        enable_chunked_prefill=False,
        enable_prefix_caching=True,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 20,
        skip_tokenizer_init=True,
        additional_config={KEEP: keeps},
    )
    config = args.create_engine_config()
    config.scheduler_config.async_scheduling = is_async  # which vLLM refuses a CPU
    return config


@KINDS
def test_every_token_is_told_once_when_its_sequence_has_ended(model_folder, is_async):
    core = Core(model_folder, is_async=is_async)
    kind = WholeOutputsAsyncScheduler if is_async else WholeOutputsScheduler
    assert type(core.scheduler) is kind
    core.add("short", max_tokens=3)
    core.add("long", max_tokens=9)
    for _ in range(4):
        core.step()
    assert core.told["long"] == [] and len(core.told["short"]) == 3
    num_tokens, unfinished, running = core.scheduler()
    assert num_tokens == len(core.tokens["short"] + core.tokens["long"])
    assert (list(unfinished), running) == (["long"], ["long"])
    core.run()
    assert core.told == core.tokens
    assert [len(core.told[name]) for name in ("short", "long")] == [3, 9]


@KINDS
def test_a_pause_tells_what_there_is_and_the_rest_comes_after_it(model_folder, is_async):
    core = Core(model_folder, is_async=is_async)
    core.add("a")
    core.add("b")
    for _ in range(3):
        core.step()
    core.pause()
    assert 0 < len(core.told["a"]) < 8
    assert all(request.num_computed_tokens == 0 for request in core.scheduler.requests.values())
    core.resume()
    core.run()
    assert core.told == core.tokens
    assert [len(told) for told in core.told.values()] == [8, 8]


@KINDS
def test_an_aborted_sequence_is_forgotten_with_what_is_under_way_of_it(model_folder, is_async):
    core = Core(model_folder, is_async=is_async)
    core.add("a")
    core.add("b")
    for _ in range(3):
        core.step()
    core.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    core.run()
    assert core.told["a"] == [] and len(core.told["b"]) == 8
    core.add("c")
    core.run()
    assert core.told["c"] == core.tokens["c"]


@KINDS
def test_kept_caches_serve_those_that_run_and_nobody_who_comes_later(model_folder, is_async):
    core = Core(model_folder, is_async=is_async, keeps=True)
    core.add("old", max_tokens=12)
    for _ in range(2):
        core.step()
    core.add("before")
    core.step()
    assert core.spared["before"] == 2 * BLOCK, "prompts share nothing: the test shows nothing"
    core.pause()
    kept = core.scheduler.requests["old"].num_computed_tokens
    assert kept >= len(PROMPT)
    core.resume()
    core.add("new", max_tokens=1)
    core.step()
    assert core.scheduler.requests["old"].num_computed_tokens > kept
    assert core.spared["new"] == 0
    core.run()
    # Its answer stands upon old blocks; the first blocks of its prompt are cached anew by now.
    turn = PROMPT + core.told["old"]
    core.add("next turn", prompt=turn)
    core.step()
    assert core.spared["next turn"] == 2 * BLOCK
    core.run()
    assert core.told == core.tokens


@KINDS
def test_a_kept_sequence_that_is_preempted_computes_all_of_its_tokens_again(model_folder, is_async):
    core = Core(model_folder, is_async=is_async, keeps=True)
    core.add("a", max_tokens=12)
    for _ in range(3):
        core.step()
    core.pause()
    core.resume()
    scheduler = core.scheduler
    request = scheduler.requests["a"]
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    del core.spared["a"]
    core.run()
    assert core.spared["a"] == 0
    assert core.told == core.tokens
    assert len(core.told["a"]) == 12
