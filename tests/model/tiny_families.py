"""A tiny config of every causal family that the installed transformers and vLLM both know.

`python tests/model/tiny_families.py` asks the loader's own check about each, in float32 on a CPU,
and writes the table that `async-grpo models` prints, and docs/models.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from model_families import ALTERNATE, FAMILIES, SIZES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from async_grpo.model import model_folder
from async_grpo.model.experts import Routing
from async_grpo.model.loading import EXPERTS, check_packing
from async_grpo.util.errors import UnfitModel

TABLE = Path(model_folder.__file__).with_name("families.tsv")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEADING = "## Every family\n"
REPLAYED, ITS_OWN = "; experts of the engine's choice", "; experts of its own choice"
ALONE, PACKED = "packed; states once a sequence", "packed"
# Options of experts, of latent attention and of old names of sizes, for configs that have them.
RULES = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "num_local_experts": 4, "n_routed_experts": 4, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 16, "kv_lora_rank": 16,
    "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 256, "ffn_dim": 48, "rotary_dim": 4,
    "word_embed_proj_dim": 32, "dense_intermediate_size": 32,
}  # fmt: skip


def families() -> Iterator[tuple[str, str]]:
    """(model type, class) of all, in the order of their names."""
    from vllm.model_executor.models.registry import ModelRegistry

    served = set(ModelRegistry.get_supported_archs())
    for family, names in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        name = names if isinstance(names, str) else names[0]
        if name in served and not name.endswith(model_folder.OF_SEVERAL_INPUTS):
            yield family, name


def tiny_config(family: str) -> PreTrainedConfig:
    default, own = AutoConfig.for_model(family), FAMILIES.get(family, {})
    known = {*vars(default), *default.attribute_map}
    sizes = {name: value for name, value in (RULES | SIZES).items() if name in known}
    if family == "gemma3n_text":
        own = {"layer_types": ALTERNATE, "num_kv_shared_layers": 2, "laurel_rank": 8}
    if "kv_lora_rank" in sizes:  # latent attention has as many heads of keys as of queries
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    # Experts compute in float32 at most: those tests do without, the check does not.
    dense = {"mlp_only_layers", "first_k_dense_replace", "num_experts", "num_local_experts"}
    own = {name: value for name, value in own.items() if name not in dense}
    return AutoConfig.for_model(family, **(sizes | own))


def verdict(family: str) -> tuple[str, str]:
    """(yes or no, how it is packed or why it is refused) of a family."""
    try:
        config = tiny_config(family)
        if hasattr(config, "text_config"):
            return "no", "a text model inside of one that also sees: give the text model alone"
        model_folder._check_architecture(config, Path(family))
        how = ALONE if check_packing(config, family) else PACKED
        if not any(hasattr(config, name) for name in EXPERTS):
            return "yes", how
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
        return "yes", how + (REPLAYED if Routing.of(whole) else ITS_OWN)
    except UnfitModel as error:
        why = str(error).partition("packed attention in ")[2] or str(error)
        said = why.partition(") ")[2].partition(": this")[0]
        if "off by" in said:  # by another number on another machine
            said = "scores otherwise than sequences alone"
        return "no", "the packed row " + model_folder.first_line(ValueError(said))
    except (ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        return "untried", f"{type(error).__name__} of the tiny config"


def with_table(page: str, table: str) -> str:
    """The page with the table at its end."""
    rows = [line.replace("|", "/").split("\t") for line in table.splitlines()]
    trained = sum(trains == "yes" for _, _, trains, _ in rows)
    lines = [f"| `{kind}` | {name} | {trains} | {how} |" for kind, name, trains, how in rows]
    said = f"{trained} of {len(rows)} train. Engines are not asked here.\n\n"
    head = "| `model_type` | class | trains | how, or why not |\n|---|---|---|---|\n"
    return page.partition(HEADING)[0] + HEADING + "\n" + said + head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    table = "".join("\t".join((*each, *verdict(each[0]))) + "\n" for each in families())
    TABLE.write_text(table)
    PAGE.write_text(with_table(PAGE.read_text(), table))
