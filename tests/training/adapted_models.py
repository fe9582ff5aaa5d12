"""The tiny model with an adapter whose factors are not 0, and its plain float64 twin."""

import torch
from oracle import oracle_twin, tiny_model
from torch.nn.utils import parametrize

from async_grpo.config.training_options import AdapterOptions
from async_grpo.model.adapters import NAME, Adapter
from async_grpo.model.packed_linear import packed_layers, rounded
from async_grpo.model.policy import PolicyModel, trained_parameters
from async_grpo.model.weight_files import materialise

CPU = torch.device("cpu")
KINDS = {
    "all linear": {"lora_rank": 4},
    "some, rank-stabilised": {
        "lora_rank": 3, "lora_targets": "q_proj,v_proj,down_proj", "use_rslora": True,
        "lora_alpha": 2.0, "lora_init": "gaussian",
    },
    "decomposed": {"lora_rank": 2, "lora_targets": r".*\.(o|up)_proj", "use_dora": True},
    "norms too": {"lora_rank": 2, "lora_targets": "k_proj", "modules_to_save": "norm"},
}  # fmt: skip
# Those whose frozen weights are held packed, beside the others.
PACKED = {
    "in 4 bits": {"lora_rank": 2, "base_quantization": "nf4"},
    "in 8 bits": {"lora_rank": 2, "lora_targets": "q_proj,up_proj", "base_quantization": "int8"},
}
ALL_KINDS = KINDS | PACKED


def adapted(model, *, seed=1, starts=False, **options):
    """A policy of `model` with an adapter of these options; unless it `starts`, B is random."""
    policy = PolicyModel(model)
    adapter = Adapter.of(AdapterOptions(**options), model="m", seed=seed)
    whole = {name: each.detach().float() for name, each in model.named_parameters()}
    adapter.inject(policy)
    materialise(policy, CPU, parameters_on=CPU)
    for path, layer in packed_layers(policy.model):
        name = path.replace(".base_layer", ".weight")
        layer.fill(rounded(whole[name], layer.kind), name)
    if not options.get("base_quantization"):
        adapter.fill(policy, {})
    if not starts:
        torch.manual_seed(seed)
        for name, parameter in trained_parameters(policy):
            if "lora_B" in name or "magnitude" in name or "modules_to_save" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
    for _, parameter in trained_parameters(policy):  # scales of packed weights stay float32
        parameter.data = parameter.data.to(model.dtype)
    return policy


class Added(torch.nn.Module):
    """W + s B A, and with a magnitude m that times m / |its rows|, whose gradient DoRA drops."""

    def __init__(self, scale, a, b, magnitude):
        super().__init__()
        self.scale, self.a, self.b, self.magnitude = scale, a, b, magnitude

    def forward(self, weight):
        whole = weight + self.scale * self.b @ self.a
        if self.magnitude is None:
            return whole
        return whole * (self.magnitude / whole.detach().norm(dim=1))[:, None]


def adapted_twin(make, policy, *, scale):
    """(twin, {trained parameter of the policy: its leaf}); `make` returns the model as it was."""
    twin = oracle_twin(make())
    twin.requires_grad_(False)
    for path, layer in packed_layers(policy.model):
        twin.get_submodule(path.removesuffix(".base_layer")).weight.data = layer.weight.double()
    leaves = {
        name: torch.nn.Parameter(parameter.detach().double().clone())
        for name, parameter in trained_parameters(policy)
    }
    for name, leaf in leaves.items():
        path, saved, rest = name.partition(f".modules_to_save.{NAME}.")
        if saved:
            setattr(twin.get_submodule(path), rest, leaf)
        elif "lora_A" in name:
            path = name.partition(".lora_A.")[0]
            b = leaves[name.replace("lora_A", "lora_B")]
            magnitude = leaves.get(name.replace("lora_A", "lora_magnitude_vector"))
            added = Added(scale, leaf, b, magnitude)
            parametrize.register_parametrization(twin.get_submodule(path), "weight", added)
    return twin, leaves


def scale_of(options):
    """alpha / r, or alpha / sqrt(r)."""
    rank = options["lora_rank"]
    alpha = options.get("lora_alpha", 2 * rank)
    return alpha / (rank**0.5 if options.get("use_rslora") else rank)


def tiny(*, tied=True, dtype=torch.float64):
    return tiny_model(tied=tied, dtype=dtype)
