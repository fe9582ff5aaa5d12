"""Kernels of another package are used where they compute the same, and else done without."""

import functools
import re

import pytest
import torch
from model_families import family_config
from transformers.models.llama import modeling_llama

from async_grpo.model import fused, logprobs

CPU = torch.device("cpu")


def fault(give, dtype=torch.float32):
    return fused.fault(family_config("llama"), device=CPU, dtype=dtype, give=give)


def squares(*, forward=1.0, backward=1.0):
    """A stand-in for the kernels: norms by autograd, times a factor in either pass."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, own):
            return own * forward

        @staticmethod
        def backward(ctx, gradient):
            return gradient * backward

    def give(model):
        for norm in (part for part in model.modules() if type(part).__name__ == "LlamaRMSNorm"):
            usual = norm.forward
            norm.forward = lambda states, usual=usual: Scaled.apply(usual(states))

    return give


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_compute_the_same_are_used(dtype):
    assert fault(squares(), dtype) == ""


@pytest.mark.parametrize(
    ("wrong", "said"), [({"forward": 1.1}, "scores"), ({"backward": 0.9}, "gradients")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_pass_in_either_direction_is_told(dtype, wrong, said):
    assert fault(squares(**wrong), dtype).endswith(f" of the {said}")


def test_what_needs_a_device_is_done_without_on_a_cpu_and_its_family_stays_as_it_was(caplog):
    before = dict(vars(modeling_llama))
    assert not fused.fuses(family_config("llama"), device=CPU, dtype=torch.float32)
    assert "Liger's kernels raise " in caplog.text
    assert "the model's own are used instead" in caplog.text
    after = vars(modeling_llama)
    assert all(after[name] is before[name] for name in before)


def test_an_unknown_family_and_an_absent_package_are_told(monkeypatch, caplog):
    assert fault(lambda policy: None) == "know no llama"
    monkeypatch.setattr(fused, "is_liger_kernel_available", lambda: False)
    assert not fused.fuses(family_config("llama"), device=CPU, dtype=torch.float32)
    assert "Liger's kernels are not installed (requirements/gpu-kernels.txt), the" in caplog.text


def by_backend(monkeypatch, backend):
    """Whether a policy may be compiled by a backend in place of the usual one."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    # An engine on CPUs, of other tests in this process, switches it off.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    logprobs._compiled.cache_clear()
    try:
        return fused.compiles(family_config("llama"), device=CPU, dtype=torch.float32)
    finally:
        logprobs._compiled.cache_clear()


def wrong(graph, inputs):
    """A compiler whose kernels are off."""
    return lambda *inputs: tuple(
        1.1 * each if torch.is_tensor(each) and each.is_floating_point() else each
        for each in graph(*inputs)
    )


def absent(graph, inputs):
    raise RuntimeError("there is no g++")


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("eager", ""),
        (wrong, r"are off by \S+ of the scores, "),
        (absent, "there is no g\\+\\+"),
    ],
)
def test_what_compiles_otherwise_or_not_at_all_is_told_and_done_without(
    backend, said, monkeypatch, caplog
):
    assert by_backend(monkeypatch, backend) == (not said)
    found = re.search(f"--use-torch-compile: compiled kernels .*{said}", caplog.text, re.DOTALL)
    assert bool(found) == bool(said)
    # Of one code only few models are compiled: none is left of those that were tried.
    left = torch._dynamo.eval_frame._debug_get_cache_entry_list
    assert not left(modeling_llama.LlamaDecoderLayer.forward.__code__)
