"""peft's adapters of a tiny model, and the snapshots that a trainer publishes of them."""

import json
from dataclasses import replace

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from tiny_models import canary_of, load_model, samples_of, snapshot_of

from async_grpo.types import WeightSample

RANK, ALPHA = 6, 9  # a scaling that float32 and bfloat16 round
SCALE = 0.2  # of B: log-probabilities differ by more than 0.1 between two versions


def make_adapter(folder, seed, **options):
    """A peft model in float32 whose A and B are random numbers."""
    options = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"} | options
    model = get_peft_model(load_model(folder), LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * SCALE)
    return model.eval()


def adapter_tensors(model):
    return {name: each.detach().clone() for name, each in get_peft_model_state_dict(model).items()}


def adapter_config(model):
    config = model.peft_config["default"].to_dict()
    return json.loads(json.dumps(config, default=lambda it: sorted(it)))


def scalings(model):
    """{name of a B: what its product is multiplied by}."""
    return {
        f"{path}.lora_B.weight": module.scaling["default"]
        for path, module in model.named_modules()
        if hasattr(module, "lora_B")
    }


def samples_of_adapter(model, *, seed=0):
    scaling = scalings(model)
    return tuple(
        WeightSample(name, rows, columns, np.float32(values) * np.float32(scaling.get(name, 1.0)))
        for name, rows, columns, values in samples_of(adapter_tensors(model).items(), seed=seed)
    )


def adapter_snapshot(model, batches, *, rows=(), dtype=torch.float32, tensors=None, config=None):
    """What a trainer publishes; `tensors` and `config` are those of a wrong one."""
    named = tensors or adapter_tensors(model)
    sent = [(name, tensor.to(dtype)) for name, tensor in named.items()]
    snapshot = snapshot_of(sent, batches, canary=canary_of(model, rows))
    text = json.dumps(config or adapter_config(model))
    return replace(snapshot, adapter=text, samples=samples_of_adapter(model, seed=batches))
