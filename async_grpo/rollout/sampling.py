"""The sampling contract in vLLM's terms."""

from __future__ import annotations

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from async_grpo.types import GenerationRequest

MAX_SEED = 2**63 - 1


def sampling_params(request: GenerationRequest) -> SamplingParams:
    """Temperature sampling: what the trainer can score; evaluations may cut it to top-p."""
    sampling, seed = request.sampling, request.seed
    if seed is not None:  # vLLM gives output i the seed + i
        seed %= MAX_SEED - request.num_samples
    return SamplingParams(
        n=request.num_samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # only the contract's stop ids end an output
        seed=seed,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
