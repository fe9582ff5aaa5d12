"""The options of what a run writes, and of the model, cluster and gateway that it uses."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from async_grpo.config.option import (
    LOG_LEVELS,
    POSITIVE,
    Change,
    Options,
    Several,
    option,
    required,
)
from async_grpo.util import deadlines


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions(Options):
    """The output folder, checkpoints, dumps and trackers."""

    output_dir: str = option("runs/latest", change=Change.PLACE, group="What the run writes")
    """folder for metrics, samples and exports"""
    resume: str = option("auto", change=Change.PLACE | Change.INCIDENTAL)
    """auto: go on from the newest good checkpoint of the output folder, if there is one; never; or
    the folder of a checkpoint, or of a run"""
    overwrite: bool = option(False, change=Change.PLACE | Change.INCIDENTAL)
    """replace the run that the output folder holds"""
    min_samples_per_checkpoint: int = option(0)
    """samples trained between exports to hf_format/; 0: only at the end"""
    checkpoint_every_batches: int = option(50)
    """batches between checkpoints that the run can go on from, and one at the end; 0: none"""
    checkpoint_every_minutes: float = option(15.0, change=Change.INCIDENTAL)
    """minutes after which the batch that ends is saved, too; 0: by batches only"""
    keep_checkpoints: int = option(2, must=POSITIVE, change=Change.INCIDENTAL)
    """checkpoints kept, the newest ones"""
    dump_samples_filename: str = option("samples.jsonl", none="")
    """file for every trained sample: a name in the output folder, or a path; empty: none"""
    dump_token_columns: bool = option(False, change=Change.INCIDENTAL)
    """also dump token ids, masks and log-probabilities, about 90 bytes an output token"""
    dump_max_gib: float = option(4.0, change=Change.INCIDENTAL)
    """room for dumped samples in GiB, in four files: the oldest goes for a new one; 0: no limit"""
    replay_max_gib: float = option(4.0, change=Change.INCIDENTAL)
    """room in GiB, of all ranks, for what each minibatch held and came to, by which async-grpo
    replay trains a batch again: the oldest batches go for new ones; 0: none is kept"""
    trackers: tuple[str, ...] = option(
        ("tensorboard",),
        none="",
        several=Several(","),
        aliases=("tracker",),
        change=Change.INCIDENTAL,
    )
    """where metrics go beside the files: tensorboard, wandb, mlflow, trackio, or another that
    accelerate can talk to; once for each, or with commas between them; empty: nowhere"""
    tracker_project: str = option("async-grpo", change=Change.INCIDENTAL)
    """project, or experiment, of the run in trackers"""
    run_name: str = option("", change=Change.INCIDENTAL)
    """name of the run in trackers; empty: that of the output folder"""
    push_to_hub: str = option("", none="", change=Change.INCIDENTAL)
    """NAME or ORGANISATION/NAME on a hub to which exports are sent, each once a checkpoint holds
    its batch, and the last; HF_TOKEN must be allowed to write there; empty: none is"""
    hub_public: bool = option(False, change=Change.INCIDENTAL)
    """show to everybody what --push-to-hub sends; else the model on the hub is private"""
    logging_level: str = option("INFO", choices=LOG_LEVELS, change=Change.INCIDENTAL)
    """log detail"""

    def check(self) -> None:
        """See `Options`."""
        if self.hub_public and not self.push_to_hub:
            raise self.refusal("hub_public", "goes with --push-to-hub", "give that too")

    @property
    def may_go_on(self) -> bool:
        """Whether a run that the output folder holds is resumed."""
        return not self.overwrite and self.resume != "never"

    @property
    def shown_name(self) -> str:
        """The name of the run in trackers."""
        return self.run_name or os.path.basename(os.path.abspath(self.output_dir))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions(Options):
    """The model, the cluster, the gateway, and how long a run waits for them."""

    model_name_or_path: str = required(group="The run and its data")
    """Hugging Face folder of a causal language model, or its name on a hub"""
    model_revision: str = option("", none="", change=Change.PLACE)
    """branch, tag or commit of a model on a hub; empty: its main branch"""
    init: str = option("pretrained", choices=("pretrained", "random"))
    """where the weights come from: pretrained, the model's folder; random: they are drawn from
    --infinite-sampler-seed as transformers draws those of its config.json, and it needs none"""
    gateway: str = option("", none="", change=Change.INCIDENTAL)
    """PORT, or HOST:PORT, of a gateway on the policy while it is trained, in OpenAI's protocol: on
    loopback unless HOST says otherwise; 0: any free port; empty: none"""
    ray_address: str = option("auto", change=Change.INCIDENTAL, group="Ray cluster")
    """host:port of the Ray cluster; auto: the one on this machine"""
    namespace: str = option("async-grpo")
    """Ray namespace that the run's actors share"""
    worker_timeout_s: float = option(1800.0, must=POSITIVE, change=Change.INCIDENTAL)
    """seconds to wait for the workers that the run needs, which may be loading a large model"""
    stall_timeout_s: float = option(900.0, change=Change.INCIDENTAL)
    """seconds without progress after which a request is tried again elsewhere, and without any in
    the whole run, after which it ends; tokens are progress: no output takes too long"""

    def check(self) -> None:
        """See `Options`."""
        if self.stall_timeout_s < deadlines.LEAST_STALL_S:
            raise self.refusal(
                "stall_timeout_s",
                f"must be at least {deadlines.LEAST_STALL_S:g}, workers tell of their tokens "
                f"every {deadlines.PING_S:g} s",
                "900 is usual",
            )
        is_place = re.fullmatch(r"([\w.-]+:)?\d{1,5}", self.gateway)
        if self.gateway and not (is_place and self.gateway_place[1] < 1 << 16):
            rule = "must be PORT or HOST:PORT, of a port below 65536"
            raise self.refusal("gateway", rule, "8000 is usual, and 0 takes any free port")

    @property
    def draws_weights(self) -> bool:
        """Whether the run makes its weights, so that the model's folder needs none."""
        return self.init == "random"

    @property
    def gateway_place(self) -> tuple[str, int]:
        """Host and port of --gateway, where it is given."""
        host, _, port = self.gateway.rpartition(":")
        return host or "127.0.0.1", int(port)
