"""A tiny config of every causal family that the installed transformers and vLLM both know.

`python tests/model/tiny_families.py` asks the loader's own check about each, in float32 on a CPU,
and of those that train a real engine (a quarter of an hour), and writes the table that
`async-grpo models` prints, and docs/models.md. With names of families, their rows alone are new.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from huggingface_hub.errors import StrictDataclassError
from model_families import ALTERNATE, FAMILIES, SIZES
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from async_grpo.model import model_folder
from async_grpo.model.experts import Routing
from async_grpo.model.loading import EXPERTS, check_packing
from async_grpo.rollout.generation_worker import worker_environment
from async_grpo.util.errors import UnfitModel

sys.path.append(str(Path(__file__).parents[1] / "rollout"))  # of `family_engines`
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
# What engines on CPUs take: heads of 32 numbers, matrices of multiples of 32.
SERVED = {
    "vocab_size": 128, "hidden_size": 128, "head_dim": 32, "intermediate_size": 128,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "n_embd": 128,
    "max_position_embeddings": 512, "n_positions": 512, "pad_token_id": 0, "ffn_dim": 128,
    "word_embed_proj_dim": 128, "dense_intermediate_size": 128, "rotary_dim": 16,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
    "head_dim": 64,
}  # fmt: skip
SCALED = {"logits_scaling": 6.0, "attention_multiplier": 0.2}  # 1 each by default
# What differs on CPUs alone: vLLM's kernel of rotary positions there takes heads for tokens in
# queries of three dimensions, which LFM 2 and latent attention hand it.
OF_CPUS = ("lfm2", "deepseek_v2", "deepseek_v3", "axk1", "glm4_moe_lite", "longcat_flash")
DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
# With what folders of a family state and transformers' classes do not, and vLLM reads.
OWN: dict[str, dict[str, object]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "axk1": {
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "first_k_dense_replace": 0,
    },
    "cohere2": {"sliding_window": 512},  # the longest row that is trained
    "cohere2_moe": {"sliding_window": 512},
    "gemma3n_text": {
        "layer_types": ALTERNATE, "num_kv_shared_layers": 2, "laurel_rank": 8,
        "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 32,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 32,
        "global_head_dim": 64, "enable_moe_block": True, "top_k_experts": 2,
    },
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "granitemoe": SCALED,
    "granitemoe_swa": SCALED,
    "granitemoehybrid": SCALED | {"mamba_d_head": 32},
    "granitemoeshared": SCALED,
    "hrm_text": {"num_key_value_heads": 4},
    "lfm2": {"conv_dim": 128, "block_dim": 128, "block_multiple_of": 32},
    "longcat_flash": {
        "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity",
    },
    "minicpm3": LATENT,
    "minimax_m2": {
        "rotary_dim": 16, "scoring_func": "sigmoid",
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        },
    },
    "deepseek_v3": LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "qwen3_5_moe_text": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
}  # fmt: skip


def families() -> Iterator[tuple[str, str]]:
    """(model type, class) of all, in the order of their names."""
    from vllm.model_executor.models.registry import ModelRegistry

    served = set(ModelRegistry.get_supported_archs())
    for family, names in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        name = names if isinstance(names, str) else names[0]
        if "text_config" in CONFIG_MAPPING[family].sub_configs:
            continue  # the text model inside has a row of its own
        if name in served and not name.endswith(model_folder.OF_SEVERAL_INPUTS):
            yield family, name


def tiny_config(family: str, **changes: object) -> PreTrainedConfig:
    default, own = AutoConfig.for_model(family), FAMILIES.get(family, {})
    known = {*vars(default), *default.attribute_map}
    sizes = {name: value for name, value in (RULES | SIZES | SERVED).items() if name in known}
    own = own | OWN.get(family, {})
    if "kv_lora_rank" in sizes:  # latent attention has as many heads of keys as of queries
        latent = LATENT | {"num_key_value_heads": sizes["num_attention_heads"]}
        sizes |= {name: value for name, value in latent.items() if name in known}
    # Experts compute in float32 at most: those tests do without, the check does not.
    dense = {"mlp_only_layers", "first_k_dense_replace", "num_experts", "num_local_experts"}
    own = {name: value for name, value in own.items() if name not in dense}
    return AutoConfig.for_model(family, **(sizes | own | changes))


def verdict(family: str) -> tuple[str, str]:
    """(yes or no, how it is packed or why it is refused) of a family."""
    try:
        config = tiny_config(family)
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


def served(family: str) -> str:
    """What a real engine of a family's tiny model shows, as the table says it."""
    import family_engines  # vLLM is imported by then with what it reads of the environment

    found = family_engines.serves(tiny_config(family))
    return found.replace("differs by", "no: on CPUs off by") if family in OF_CPUS else found


def row(family: str, name: str) -> str:
    """The table's line of a family, whose engine is asked if it trains."""
    trains, how = verdict(family)
    return "\t".join((family, name, trains, served(family) if trains == "yes" else "-", how))


def with_table(page: str, table: str) -> str:
    """The page with the table at its end."""
    rows = [line.replace("|", "/").split("\t") for line in table.splitlines()]
    trained = sum(trains == "yes" for _, _, trains, _, _ in rows)
    served = sum(serves == "yes" for _, _, _, serves, _ in rows)
    in_half = sum(serves == "bf16" for _, _, _, serves, _ in rows)
    lines = [f"| `{kind}` | {name} | {' | '.join(rest)} |" for kind, name, *rest in rows]
    said = (
        f"{trained} of {len(rows)} train, {served} of these are served to 5e-05 nats, "
        f"{in_half} in bf16.\n\n"
    )
    head = "| `model_type` | class | trains | serves | how, or why not |\n|---|---|---|---|---|\n"
    return page.partition(HEADING)[0] + HEADING + "\n" + said + head + "\n".join(lines) + "\n"


@click.command()
@click.argument("named", nargs=-1)
@click.option("--log", is_flag=True, help="Show differences, and the logs of engines that refuse.")
def main(named: tuple[str, ...], *, log: bool) -> None:
    """Write the table and the page; of some families alone, where they are NAMED."""
    logging.basicConfig(level=logging.ERROR)
    logging.getLogger("family_engines").setLevel(logging.DEBUG if log else logging.ERROR)
    rows = {line.partition("\t")[0]: line for line in TABLE.read_text().splitlines()}
    known = dict(families())
    for family in named or known:
        rows[family] = row(family, known[family])
        click.echo(rows[family])
        table = "".join(f"{rows[kind]}\n" for kind in known if kind in rows)
        TABLE.write_text(table)
        PAGE.write_text(with_table(PAGE.read_text(), table))


if __name__ == "__main__":
    os.environ |= worker_environment()  # read by vLLM while it is imported
    main()
