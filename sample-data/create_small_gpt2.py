"""Write what a run from nothing needs: a small GPT-2 without weights, and text to train it on.

    python sample-data/create_small_gpt2.py --output runs/from_nothing

OUTPUT/model holds config.json and a tokenizer of bytes, OUTPUT/text.jsonl the docstrings of this
Python's standard library, a module a line, and OUTPUT/held_out.jsonl those of every twentieth
module. Nothing is fetched; another version of Python has other docstrings.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from atomic_files import write_jsonl

END = "<|endoftext|>"
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
EVERY = 20  # of which the last is held out
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def byte_tokenizer() -> Any:
    """One token a byte of UTF-8, and the end of a text: GPT-2's own, without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = (END, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False
    )


def write_model(folder: Path, *, layers: int, width: int, positions: int) -> None:
    """A GPT-2 of these sizes, as config.json and tokenizer alone."""
    from transformers import GPT2Config

    tokenizer = byte_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=positions, n_embd=width, n_layer=layers,
        n_head=width // 32, bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id, architectures=["GPT2LMHeadModel"],
    )  # fmt: skip
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def docstrings() -> Iterator[str]:
    """The docstrings of each module of the standard library, end to end, by the module's path."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        if LEFT_OUT.isdisjoint(file.relative_to(library).parts):
            tree = ast.parse(file.read_bytes())
            nodes = (node for node in ast.walk(tree) if isinstance(node, DOCUMENTED))
            found = filter(None, map(ast.get_docstring, nodes))
            if text := "\n\n".join(found).encode("utf-8", "ignore").decode():
                yield text


@click.command(help=__doc__)
@click.option("--output", required=True, type=click.Path(path_type=Path))
@click.option("--layers", default=4, show_default=True, type=click.IntRange(1))
@click.option("--width", default=128, show_default=True, help="A multiple of 32.")
@click.option("--positions", default=128, show_default=True, type=click.IntRange(2))
def main(output: Path, layers: int, width: int, positions: int) -> None:
    write_model(output / "model", layers=layers, width=width, positions=positions)
    rows = [{"text": text} for text in dict.fromkeys(docstrings())]
    held_out = rows[EVERY - 1 :: EVERY]
    write_jsonl(output / "held_out.jsonl", rows=held_out)
    write_jsonl(output / "text.jsonl", rows=[row for row in rows if row not in held_out])
    size = sum(len(row["text"].encode()) for row in rows)
    click.echo(f"wrote {output}: {len(rows)} texts with {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
