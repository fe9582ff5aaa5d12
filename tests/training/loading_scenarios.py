"""Small models of several architectures, and what ranks find when they load them in slices."""

from pathlib import Path

import torch
import torch.distributed as dist
from oracle import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Olmo2Config,
    Qwen2Config,
)

from async_grpo.model.loading import load_sharded
from async_grpo.model.policy import hf_named_parameters
from async_grpo.training.fsdp import shard

SIZES = {
    "vocab_size": 61,  # no number of ranks divides it
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
CONFIGS = {
    "qwen2 tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "llama3": LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "olmo2": Olmo2Config(**SIZES),
    "gemma3": Gemma3TextConfig(**SIZES, layer_types=["sliding_attention", "full_attention"]),
    "gpt2": GPT2Config(vocab_size=61, n_positions=64, n_embd=24, n_layer=2, n_head=3),
}


def write_models(folder: Path) -> None:
    """Each as a folder of several files, in bfloat16; and one whose norms have two numbers."""
    for name, config in CONFIGS.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter))
        model.save_pretrained(folder / name, max_shard_size="8KB")
        assert len(list((folder / name).glob("*.safetensors"))) > 2
    tiny_model(tied=False).save_pretrained(folder / "qwen3")


def differences(rank: int, *, models: str) -> dict[str, list[str]]:
    """{model: what of it is not, bit for bit, what from_pretrained makes of its folder}."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for name in sorted(path.name for path in Path(models).iterdir()):
        path = f"{models}/{name}"
        policy = load_sharded(
            path, attention="packed", dtype=torch.float32, device=torch.device("cpu"),
            shard=lambda policy: shard(policy, mesh),
        )  # fmt: skip
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        own = {n: p.detach().full_tensor() for n, p in hf_named_parameters(policy)}
        own |= dict(policy.model.named_buffers())
        expected = dict(plain.named_parameters()) | dict(plain.named_buffers())
        bad = [n for n in own.keys() & expected if not torch.equal(own[n], expected[n])]
        head, embedding = (
            model.get_output_embeddings().weight is model.get_input_embeddings().weight
            for model in (policy.model, plain)
        )
        found[name] = sorted({*bad, *(own.keys() ^ expected)}) + ["tie"] * (head != embedding)
    return found
