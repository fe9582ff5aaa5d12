"""The one place that talks to vLLM: token ids in, token ids and log-probabilities out.

An engine answers requests and takes new weights while it does; it knows neither Ray nor text.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.config import ModelConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from async_grpo.errors import WeightSyncError, WorkerError
from async_grpo.rollout.completions import read_completion
from async_grpo.rollout.settings import EngineConfig
from async_grpo.rollout.shared_file import SharedFile
from async_grpo.types import (
    Completion,
    GenerationRequest,
    WeightsBucket,
    WeightsSnapshot,
    WeightsVersion,
)

T = TypeVar("T")
Fetch = Callable[[WeightsBucket], Awaitable[NDArray[np.uint8]]]

EXTENSION = "async_grpo.weight_sync.vllm_extension.WeightsExtension"
TRANSFER_BACKEND = "staged_file"
CPU_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # "uni" becomes "mp" on CPU
CPU_KV_CACHE_BYTES = 256 << 20
CPU_BATCHED_TOKENS = 4096  # prompt tokens of one engine step
KV_BLOCK_TOKENS = 128  # vLLM's largest block; a sequence may waste one, and vLLM keeps one
UNPUBLISHED = "default"  # vLLM's name for the weights it read from the folder
STAGE_TIMEOUT_S = 120.0  # verifying one bucket, with a step of generation before it
APPLY_TIMEOUT_S = 300.0
MAX_SEED = 2**63 - 1


class EngineBrokenError(WorkerError):
    """The engine's process died, or its weights are in doubt: it must not serve again."""


class Engine:
    """One vLLM engine with its own processes."""

    def __init__(self, config: EngineConfig) -> None:
        self._llm = AsyncLLM.from_engine_args(_engine_args(config))
        self._request_ids = itertools.count()
        self._running: set[str] = set()
        model_config = self._llm.model_config
        self.max_model_len: int = model_config.max_model_len
        self.vocab_size: int = model_config.get_vocab_size()

    async def generate(self, request: GenerationRequest) -> tuple[Completion, ...]:
        """Sample `request.num_samples` outputs; their `text` is left empty.

        Raises:
            WorkerError: the request cannot fit the model, or the answer cannot be trained on.
            EngineBrokenError: the engine died.
        """
        self._check_length(request)
        request_id = str(next(self._request_ids))
        self._running.add(request_id)
        try:
            final = await self._final_output(request, request_id)
        except EngineDeadError as error:
            raise EngineBrokenError(f"the engine died: {error}") from error
        except (EngineGenerateError, ValueError) as error:
            raise WorkerError(f"vLLM refused question {request.ordinal}: {error}") from error
        finally:
            self._running.discard(request_id)
        return tuple(read_completion(output) for output in final.outputs)

    async def _final_output(self, request: GenerationRequest, request_id: str) -> RequestOutput:
        prompt = tokens_input(request.input_token_ids.tolist())
        final: RequestOutput | None = None
        async for output in self._llm.generate(prompt, _sampling_params(request), request_id):
            final = output
        if final is None:
            raise WorkerError(f"vLLM ended question {request.ordinal} without an answer")
        return final

    def _check_length(self, request: GenerationRequest) -> None:
        num_prompt, num_output = len(request.input_token_ids), request.sampling.max_tokens
        if num_prompt + num_output > self.max_model_len:
            raise WorkerError(
                f"prompt + longest output must fit the worker's {self.max_model_len} tokens, got "
                f"{num_prompt} + {num_output}: start the worker with a larger --max-model-len, or "
                "lower --max-generation-tokens"
            )

    async def load(self, snapshot: WeightsSnapshot, fetch: Fetch) -> float:
        """Serve other weights from now on; returns the seconds that generation stood still.

        The buckets are fetched, staged and verified while generation goes on, then loaded in one
        step; running requests continue with the new weights, their caches recomputed.

        Raises:
            WeightSyncError: refused or incomplete; the old weights serve on.
            EngineBrokenError: the loading itself failed.
        """
        if not snapshot.buckets:
            raise WeightSyncError("weights must hold at least one bucket, got none")
        with SharedFile(snapshot.size_bytes) as file:
            try:
                await self._transfer("start_weight_update", self._llm.start_weight_update())
                for bucket in snapshot.buckets:
                    is_last = bucket is snapshot.buckets[-1]
                    await self._stage(bucket, await fetch(bucket), file=file, is_last=is_last)
            except BaseException:  # cancelled too: the next update must find the engine ready
                await self._discard()
                raise
            return await self._apply(snapshot.version)

    async def _stage(
        self, bucket: WeightsBucket, data: NDArray[np.uint8], *, file: SharedFile, is_last: bool
    ) -> None:
        info = {
            "path": file.path,
            "offset_bytes": await asyncio.to_thread(file.append, data),
            "size_bytes": bucket.size_bytes,
            "checksum": bucket.checksum,
            "tensors": [list(meta) for meta in bucket.tensors],
            "is_last": is_last,
        }
        request = WeightTransferUpdateRequest(update_info=info)
        await self._transfer("update_weights", self._llm.update_weights(request))

    async def _apply(self, version: WeightsVersion) -> float:
        paused_at = time.monotonic()
        try:
            async with asyncio.timeout(APPLY_TIMEOUT_S):
                # The caches belong to the old weights and must not outlive them.
                await self._llm.pause_generation(mode="keep", clear_cache=True)
                await self._llm.finish_weight_update(weight_version=str(version))
                await self._llm.resume_generation()
        except BaseException as error:  # half-loaded weights must never serve, whatever happened
            raise EngineBrokenError(f"loading weights {version} failed: {error!r}") from error
        return time.monotonic() - paused_at

    async def _discard(self) -> None:
        await self._transfer("discard", self._llm.collective_rpc("discard_weight_update"))

    async def _transfer(self, what: str, call: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(call, STAGE_TIMEOUT_S)
        except EngineDeadError as error:
            raise EngineBrokenError(f"the engine died: {error}") from error
        except TimeoutError:
            raise EngineBrokenError(
                f"the engine did not answer {what} within {STAGE_TIMEOUT_S:g} s"
            ) from None
        except Exception as error:  # the engine's process sends its errors as bare text
            raise WeightSyncError(str(error).rpartition("method failed: ")[2]) from error

    async def abort(self) -> None:
        """End every running request; their callers get what there is, marked `abort`."""
        await self._llm.abort(list(self._running))

    async def version(self) -> WeightsVersion | None:
        """What the engine's process serves, by its own word; None before the first `load`.

        Raises:
            EngineBrokenError: the process has died.
        """
        try:
            text = await self._llm.get_weight_version()
        except EngineDeadError as error:
            raise EngineBrokenError(f"the engine died: {error}") from error
        return None if text == UNPUBLISHED else WeightsVersion.parse(text)

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._llm.shutdown()


def _engine_args(config: EngineConfig) -> AsyncEngineArgs:
    on_cpu = current_platform.is_cpu()
    dtype = config.dtype
    if dtype == "auto":  # vLLM's own choice would round a float32 model
        dtype = "float32" if on_cpu else "bfloat16"
    args = AsyncEngineArgs(
        model=config.model_path,
        dtype=dtype,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len or None,
        tensor_parallel_size=config.tensor_parallel_size,
        enable_prefix_caching=config.enable_prefix_caching,
        seed=config.seed,
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30) or None,
        generation_config="vllm",  # nothing of the sampling comes from the model's folder
        logprobs_mode="processed_logprobs",  # at the sampling temperature
        skip_tokenizer_init=True,
        disable_log_stats=True,
        # Left alone, vLLM may take Ray's executor inside an actor, and its own placement with it.
        distributed_executor_backend="mp" if config.tensor_parallel_size > 1 else None,
        worker_extension_cls=EXTENSION,
        weight_transfer_config={"backend": TRANSFER_BACKEND},
    )
    return _for_cpu(args) if on_cpu else args


def _for_cpu(args: AsyncEngineArgs) -> AsyncEngineArgs:
    args.enforce_eager = True
    # A seeded request whose prompt is cut in two winds back its generator, which a CPU generator
    # cannot: the engine would die of it.
    args.enable_chunked_prefill = False
    longest_prompt = args.create_model_config().max_model_len
    args.max_num_batched_tokens = max(longest_prompt, CPU_BATCHED_TOKENS)
    if args.tensor_parallel_size == 1:
        args.distributed_executor_backend = CPU_EXECUTOR
    if args.kv_cache_memory_bytes is None:  # vLLM would take nearly all of the memory
        longest = _longest_sequence_bytes(args.create_model_config())
        args.kv_cache_memory_bytes = max(CPU_KV_CACHE_BYTES, longest)
    return args


def _longest_sequence_bytes(model: ModelConfig) -> int:
    """KV cache that one sequence of the longest length needs; vLLM refuses to start with less."""
    num_layers = model.hf_text_config.num_hidden_layers
    per_token = 2 * num_layers * model.get_total_num_kv_heads() * model.get_head_size()
    return (model.max_model_len + 2 * KV_BLOCK_TOKENS) * per_token * model.dtype.itemsize


def _sampling_params(request: GenerationRequest) -> SamplingParams:
    sampling, seed = request.sampling, request.seed
    if seed is not None:  # vLLM gives output i the seed + i
        seed %= MAX_SEED - request.num_samples
    return SamplingParams(
        n=request.num_samples,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # only the contract's stop ids end an output
        seed=seed,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
