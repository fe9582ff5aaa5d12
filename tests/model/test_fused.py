"""Kernels of another package are used where they compute the same, and else done without."""

import pytest
import torch
from model_families import family_config
from transformers.models.llama import modeling_llama

from async_grpo.model import fused

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


def test_an_unknown_family_and_an_absent_package_are_told(monkeypatch):
    assert fault(lambda model: None) == "know no llama"
    monkeypatch.setattr(fused, "is_liger_kernel_available", lambda: False)
    assert fault(squares()) == "are not installed (requirements/gpu-kernels.txt)"
