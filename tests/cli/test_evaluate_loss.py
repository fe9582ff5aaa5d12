"""`async-grpo evaluate --loss`: cross-entropy, by transformers' own numbers."""

import importlib
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, GPT2LMHeadModel

from async_grpo.checkpoint.export import initial_folder, write_initial
from async_grpo.cli.use_model import evaluate
from async_grpo.config.command_options import EvaluateConfig
from async_grpo.run.evaluating import ROW_TOKENS
from async_grpo.util.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "sample-data"))
small_gpt2 = importlib.import_module("create_small_gpt2")
# More than the two rows of `ROW_TOKENS` hold.
TEXTS = ["Beautiful is better than ugly.", "Explicit is better than implicit. " * 500, "Flat"]
PAIRS = [("Simple is", " better than complex."), ("Sparse is better than", " dense.")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random GPT-2 of two layers and 64 positions, of peaked distributions."""
    folder = tmp_path_factory.mktemp("model")
    small_gpt2.write_model(folder / "config", layers=2, width=32, positions=64)
    config = json.loads((folder / "config" / "config.json").read_text())
    (folder / "config" / "config.json").write_text(json.dumps(config | {"initializer_range": 0.3}))
    drawn = initial_folder(str(folder / "config"), output_dir=str(folder), seed=3)
    write_initial(str(folder / "config"), drawn, seed=3)
    return drawn


def expected_loss(model, sequences):
    """Mean float64 cross-entropy of (prompt, completion) ids, by transformers, one at a time."""
    twin = GPT2LMHeadModel.from_pretrained(model).double().eval()
    losses = []
    for prompt, completion in sequences:
        logits = twin(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        target = torch.tensor(completion)
        losses.append(torch.nn.functional.cross_entropy(logits, target, reduction="none"))
    return torch.cat(losses).mean().item(), sum(map(len, losses))


def told(model, data, *options):
    output = Path(data).with_name("loss.json")
    done = CliRunner().invoke(evaluate, [model, data, "--loss", "--output", str(output), *options])
    assert done.exit_code == 0, done.output
    found = json.loads(output.read_text())
    assert f"loss {found['eval_loss']:.4f} a token, perplexity" in done.stdout
    assert found["perplexity"] == pytest.approx(math.exp(found["eval_loss"]))
    return found


def test_an_adapter_is_evaluated_as_its_merged_model(model, tmp_path):
    torch.manual_seed(5)
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(GPT2LMHeadModel.from_pretrained(model), config)
    adapted.save_pretrained(tmp_path / "adapter")
    theirs = adapted.merge_and_unload()
    theirs.save_pretrained(tmp_path / "merged")
    for file in Path(model).glob("*token*"):
        shutil.copyfile(file, tmp_path / "merged" / file.name)
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"input": p, "completion": c}) + "\n" for p, c in PAIRS))
    losses = [told(str(tmp_path / name), str(data))["eval_loss"] for name in ("adapter", "merged")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != pytest.approx(told(model, str(data))["eval_loss"], rel=1e-3)


def test_the_loss_of_a_text_in_blocks_is_transformers_own(model, tmp_path):
    data = tmp_path / "texts.jsonl"
    data.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    found = told(model, str(data), "--block-size", "64")
    encode = AutoTokenizer.from_pretrained(model)
    stream = [t for text in TEXTS for t in (*encode(text)["input_ids"], encode.eos_token_id)]
    assert len(stream) > 2 * ROW_TOKENS
    blocks = [stream[n : n + 64] for n in range(0, len(stream), 64)]
    loss, num_tokens = expected_loss(model, [(block[:1], block[1:]) for block in blocks])
    assert found["eval_loss"] == pytest.approx(loss, abs=1e-5)
    assert (found["num_tokens"], found["num_pairs"]) == (num_tokens, len(blocks))
    few = told(model, str(data), "--block-size", "64", "--limit", "2")
    loss, num_tokens = expected_loss(model, [(block[:1], block[1:]) for block in blocks[:2]])
    assert (few["eval_loss"], few["num_tokens"]) == (pytest.approx(loss, abs=1e-5), num_tokens)


def test_the_loss_of_pairs_is_of_their_completions(model, tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(json.dumps({"question": p, "completion": c}) for p, c in PAIRS))
    found = told(model, str(data), "--column-mapping", "input=question")
    encode = AutoTokenizer.from_pretrained(model)
    pairs = [
        (encode(p)["input_ids"], [*encode(c)["input_ids"], encode.eos_token_id]) for p, c in PAIRS
    ]
    loss, num_tokens = expected_loss(model, pairs)
    assert found["eval_loss"] == pytest.approx(loss, abs=1e-5)
    assert (found["num_tokens"], found["num_pairs"]) == (num_tokens, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": 8}, "--block-size goes with --loss"),
        ({"loss": True, "samples": 8}, "--samples means nothing with --loss"),
        ({"loss": True, "reward_fns": "countdown"}, "--reward-fns means nothing with --loss"),
        ({"loss": True, "num_workers": 2}, "--num-workers means nothing with --loss"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        EvaluateConfig(**options)
