"""CPU seconds of vLLM with the tiny model, as one process: `PROBED` in validation.py.

    python -m benchmarks.scaling.engine_probe

A run of n sequences of L tokens takes L * (step + n * sequence); a prompt of P tokens that is
answered with one, P * prefill.
"""

from __future__ import annotations

import os
import statistics
import time

import click
import numpy as np

from benchmarks import results
from benchmarks.stack import MODEL

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
FEW, MANY = 8, 128  # sequences
OUTPUT, SHORT_PROMPT, LONG_PROMPT = 64, 20, 80  # tokens


@click.command()
@click.option("--repeats", default=3, help="of each measurement, of which the median counts")
def main(repeats: int) -> None:
    """Measure what a step, a sequence and a token of a prompt cost."""
    os.environ.update(ENVIRONMENT)
    import vllm  # after the environment, which it reads on import

    engine = vllm.LLM(
        model=str(MODEL), dtype="float32", max_model_len=256, max_num_seqs=256, enforce_eager=True,
        seed=0, kv_cache_memory_bytes=64 << 20, logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
    )  # fmt: skip
    random = np.random.default_rng(0)

    def seconds(num: int, prompt_tokens: int, output_tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": random.integers(2, 100, prompt_tokens).tolist()}
            for _ in range(num)
        ]
        sampling = vllm.SamplingParams(
            temperature=1.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False, logprobs=0
        )
        began = time.process_time()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.process_time() - began

    seconds(MANY, SHORT_PROMPT, 2)  # what is compiled or allocated on first use
    many, few, read, short = (
        statistics.median(seconds(*what) for _ in range(repeats))
        for what in (
            (MANY, SHORT_PROMPT, OUTPUT),
            (FEW, SHORT_PROMPT, OUTPUT),
            (MANY, LONG_PROMPT, 1),
            (MANY, SHORT_PROMPT, 1),
        )
    )
    sequence_s = (many - few) / OUTPUT / (MANY - FEW)
    prefill_s = (read - short) / MANY / (LONG_PROMPT - SHORT_PROMPT)
    rows = [
        ("a step", f"{few / OUTPUT - FEW * sequence_s:.2e}"),
        ("a sequence", f"{sequence_s:.2e}"),
        ("a token read", f"{prefill_s:.2e}"),
    ]
    click.echo(f"{results.machine()}, {results.load()}")
    click.echo(results.table(("what", "CPU seconds"), rows))


if __name__ == "__main__":
    main()
