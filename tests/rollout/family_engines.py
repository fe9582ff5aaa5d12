"""One tiny model of a family in a real engine, beside the trainer's policy of the same weights."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import textwrap
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.context import BaseContext
from pathlib import Path

import numpy as np
import torch
import vllm.v1.engine.utils
from engine_stack import LONG_PROMPT, TEMPERATURE, fetch, make_request, until_all_have_tokens
from tiny_models import save_tokenizer, snapshot_of
from transformers import AutoModelForCausalLM, PreTrainedConfig

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.model.attention import PACKED
from async_grpo.model.collate import collate_pairs
from async_grpo.model.loading import load_policy
from async_grpo.rollout.generation_worker import worker_environment
from async_grpo.types import WeightsVersion

logger = logging.getLogger(__name__)
LARGEST = 5e-5  # nats, of all tokens, where the engine computes in float32
ROUNDING = 1e-3  # is less than that in float32
HALF_MEAN, HALF_LARGEST = 2e-3, 1e-2  # where it computes in bf16 alone
FAR = 0.1  # no update mends it
DEADLINE_S = 180.0
PROMPT = LONG_PROMPT[:96]
WHOLE, BEGUN, LONG = 48, 8, 400  # tokens: of an output; of a long one when the update comes, in all
REASON_LETTERS = 110
NOT_THE_CAUSE = ("Engine core init", "EngineDeadError", "Engine core proc", "CancelledError")
FORK = multiprocessing.get_context("fork")  # imports cost more than all else
torch.set_num_threads(1)  # a fork would wait for threads of OpenMP that it does not have
SPAWN = multiprocessing.get_context("spawn")


def save_model(config: PreTrainedConfig, folder: Path, *, steep: float) -> None:
    """Matrices keep the variance of what they multiply, times `steep`, so that all counts."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:  # no norm is 1, no bias 0
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            elif "conv1d" not in name:
                parameter.normal_(std=steep * parameter.shape[-1] ** -0.5)
            if name.endswith("dt_bias"):  # as trained: time steps of 1e-3 to 1e-1
                parameter.sub_(6)
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    save_tokenizer(folder)


@torch.no_grad()
def differences(policy, turns, *, batches):
    """|engine - policy| of the tokens that the weights `batches` sampled, with their experts."""
    packed = collate_pairs(
        [(PROMPT, turn.token_ids) for turn in turns],
        share_prompts=policy.shares_prompts,
        experts=[turn.experts for turn in turns] if policy.routing else None,
    )
    scored = policy(packed, temperature=TEMPERATURE, chunk_size=64).logprobs.float().numpy()
    off_by = np.abs(scored - np.concatenate([turn.logprobs for turn in turns]))
    sampled = [np.zeros(len(turn.token_ids), bool) for turn in turns]
    for own, turn in zip(sampled, turns, strict=True):
        for span in turn.weights_versions:
            own[span.start : span.stop] = span.version.batches == batches
    return off_by[np.concatenate(sampled)]


async def measure(engine, policy, rounding):
    """Of whole outputs, and of the tokens after an update that came while others were sampled."""

    def snapshot(batches):
        sent = getattr(torch, engine.dtype)
        named = ((name, tensor.to(sent)) for name, tensor in policy.model.named_parameters())
        return snapshot_of(named, batches)

    def request(length):
        made = make_request(prompt=PROMPT, max_tokens=length, stop=())
        if policy.routing is None:
            return made
        return replace(made, sampling=replace(made.sampling, with_experts=True))

    if str(rounding) == f"torch.{engine.dtype}":  # its folder's weights are the policy's
        await engine.rename(WeightsVersion(0, 0))
    else:
        await engine.load(snapshot(0), fetch)
    before = differences(policy, await engine.generate(request(WHOLE)), batches=0)
    if before.max() > FAR:
        return before
    running = asyncio.create_task(engine.generate(request(LONG)))
    await until_all_have_tokens(engine, BEGUN)
    with torch.no_grad():
        for parameter in policy.parameters():
            spread = parameter.std() if parameter.numel() > 1 else 1.0
            parameter.add_(torch.randn_like(parameter), alpha=0.1 * float(spread))
            parameter.copy_(parameter.to(rounding))
    await engine.load(snapshot(1), fetch)
    turns = await running
    after = differences(policy, turns, batches=1)
    assert 0 < len(after) < sum(len(turn.token_ids) for turn in turns), "not while it sampled"
    again = differences(policy, await engine.generate(request(WHOLE)), batches=1)
    return np.concatenate([before, after, again])


def found_in(folder: str, dtype: str, rounding: torch.dtype) -> tuple[float, float]:
    """(mean, largest) difference of an engine of this process, of weights that are so rounded."""
    from async_grpo.rollout.engine import Engine

    policy = load_policy(folder, attention=PACKED, dtype=torch.float32)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(parameter.to(rounding))
    with asyncio.Runner() as runner:
        engine = Engine(WorkerConfig(model_path=folder, max_num_seqs=4, dtype=dtype))
        try:
            found = runner.run(measure(engine, policy, rounding))
        finally:
            engine._llm.shutdown()
    return float(found.mean()), float(found.max())


def _child(
    config: PreTrainedConfig, folder: str, dtype: str, rounding: torch.dtype, start: BaseContext
) -> None:
    os.setsid()
    with open(f"{folder}/log", "w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    os.environ |= worker_environment()
    vllm.v1.engine.utils.get_mp_context = lambda: start
    try:
        save_model(config, Path(folder), steep=1.5 if dtype == "float32" else 0.5)
        mean, largest = found_in(folder, dtype, rounding)
        Path(folder, "found").write_text(f"{mean} {largest}")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)  # threads of an engine that died would be waited for


def _measured(
    config: PreTrainedConfig, dtype: str, rounding: torch.dtype, start: BaseContext = FORK
) -> tuple[float, float] | str:
    """(mean, largest) difference, or why there is none; the engine's process starts so."""
    with tempfile.TemporaryDirectory() as folder:
        child = FORK.Process(target=_child, args=(config, folder, dtype, rounding, start))
        child.start()
        child.join(DEADLINE_S)
        is_late = child.is_alive()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # its engine too, which may be dying still
        child.join()
        if (found := Path(folder, "found")).exists():
            mean, largest = map(float, found.read_text().split())
            logger.info("%s: %s of %s: mean %.1e, largest %.1e", config.model_type, dtype,
                        rounding, mean, largest)  # fmt: skip
            return mean, largest
        log = Path(folder, "log").read_text()
        logger.debug("%s", log)
        if is_late:
            return f"no answer within {DEADLINE_S:g} s"
        return reason_in(log) or f"the engine died ({child.exitcode})"


def reason_in(log: str) -> str:
    """The first error that a log of an engine names, which is the cause of the others."""
    errors = re.findall(r"^.*?\b(\w*Error\b(?:: .*)?)$", log, re.M)
    named = [error for error in errors if not any(word in error for word in NOT_THE_CAUSE)]
    checked = re.findall(r"^  (?:Assertion failed|Value error), (.*?)(?: \[type=.*)?$", log, re.M)
    found = next(iter(checked + named), "").rstrip(".")
    return textwrap.shorten(found, REASON_LETTERS, placeholder=" ...")


def serves(config: PreTrainedConfig, *, largest: float = LARGEST) -> str:
    """As a row of the table says it: yes, bf16, differs by ..., or no: why."""
    found = _measured(config, "float32", torch.float32)
    if isinstance(found, str) and "BF16" in found.upper():
        return _in_half(config)
    if isinstance(found, str):  # perhaps for what this process has imported
        found = _measured(config, "float32", torch.float32, SPAWN)
    if isinstance(found, str):
        return f"no: {found}"
    if found[1] <= largest:
        return "yes"
    rounded = _measured(config, "float32", torch.bfloat16)
    if not isinstance(rounded, str) and rounded[1] <= largest:
        return "bf16"  # of some weights
    off_by = f"{found[1]:.0e} nats"
    return f"differs by {off_by}" if found[1] > ROUNDING else f"no: off by {off_by}"


def _in_half(config: PreTrainedConfig) -> str:
    """Of an engine that computes in bf16 alone: no difference of it is said to be of its code."""
    found = _measured(config, "bfloat16", torch.bfloat16)
    if isinstance(found, str):
        return f"no: {found}"
    mean, largest = found
    is_near = mean <= HALF_MEAN and largest <= HALF_LARGEST
    return "bf16" if is_near else f"no: in bf16 off by {mean:.0e} nats in the mean, {largest:.0e}"
