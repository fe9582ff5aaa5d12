"""The predecessor's README, typed: its command blocks end in its picture.

The blocks are as they stand there. `SUBSTITUTES` has all that is typed otherwise: sizes and counts
for a machine of two cores, ports that are free, and what only a cluster of one's own needs. The
model is a tiny one, at a hub of this machine under the name that the blocks give. The lines that
install are left out, and `ray start` on a second node.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from commands import Command
from private_cluster import environment
from stand_in_hub import StandInHub

from async_grpo.util.ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.slow]  # a minute; .ci/run asks for it
REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "sample-data" / "tiny-countdown"
MODEL = "Qwen/Qwen2-1.5B-Instruct"
TYPED = ("trainer_core.py", "worker_dispatcher.py", "plot.py", "reward_registry.py")
OF_TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
READY_S, RUN_S = 240, 400  # on a busy machine

HEAD = r"""
ray start --head \
--port 6379 
"""  # noqa: W291 - as it stands there

GENERATION = r"""
export num_inference_workers_in_node=1
export vllm_max_num_seqs=64
export vllm_overhead_seqs=16
export reward_fns=countdown
export base_model_path=Qwen/Qwen2-1.5B-Instruct

for i in $(seq 0 $num_inference_workers_in_node); do
  python worker_dispatcher.py \
    --model_path "$base_model_path" \
    --mode generation \
    --tensor_parallel_size 1 \
    --max_num_seqs "$vllm_max_num_seqs" \
    --overhead_seqs "$vllm_overhead_seqs" \
    --write_failed_generation_samples \
    --reward_fns "$reward_fns" \
    --global_num_verifiers 50 2>&1 | tee ~/grpo_vllm_"$i".log
done
"""

LOGPROB = r"""
export num_workers=1
export base_model_path=Qwen/Qwen2-1.5B-Instruct
export temperature=1.0
export logprob_max_tokens_per_gpu=100000

for i in $(seq 1 $num_workers); do
torchrun --nproc_per_node=1 --master_port=1234$i worker_dispatcher.py \
--model_path $base_model_path \
--mode logprob \
--temperature $temperature \
--max_tokens_per_gpu $logprob_max_tokens_per_gpu 2>&1 | tee ~/grpo_logprob_$i.log
done
"""

DATASET = "python sample-data/create_count_down.py"

TRAINING = r"""
CUDA_VISIBLE_DEVICES=2,3 torchrun \
  --nnodes=1 \
  --node_rank=0 \
  --nproc_per_node=2 \
  --rdzv_id=101 \
  --rdzv_endpoint=localhost:54367 \
  trainer_core.py \
    --model-name-or-path         Qwen/Qwen2-1.5B-Instruct \
    --learning-rate              2e-6 \
    --batch-size                 128 \
    --lr-scheduler              constant_with_warmup \
    --num-warmup-steps           5 \
    --max-tokens-per-gpu         30000 \
    --samples-per-question       32 \
    --temperature                1.0 \
    --max-generation-tokens      16384 \
    --data-path                  sample-data/count_down_tasks_3to4.jsonl \
    --min-samples-per-checkpoint 20000 \
    --output-dir                 dummy_output/ \
    --dump-samples-filename      dummy_output/dump_samples.jsonl \
    --infinite-sampler-seed      223 \
    --train-minibatch-size       32 \
    --num-training-batches       1000000 \
    --logging-level              INFO \
    --use-torch-compile \
  2>&1 | tee train.log
"""

PLOT = r"""
python plot.py plot <PATH/TO/training_metrics.jsonl> \
  --remote YOUR_SSH_ALIAS \
  -n YOUR_EXPERIMENT_NAME \
  -v avg_reward \
  -v avg_max_reward_in_group \
  -v avg_output_tokens \
  -v entropy \
  -v perc_truncated_samples \
  -v perc_with_0_advantage \
  -x total_samples_accumulated \
  -s --smooth-window 40 \
  -o experiment_plots.svg
"""

SUBSTITUTES = {
    HEAD: {
        "--port 6379": "--port {port} --block --temp-dir={ray} --num-cpus=8 "
        "--node-ip-address=127.0.0.1 --include-dashboard=false --disable-usage-stats "
        "--object-store-memory=268435456 --ray-client-server-port={client_port}"
    },
    GENERATION: {"--global_num_verifiers 50": "--global_num_verifiers 2"},
    LOGPROB: {"--master_port=1234$i": "--master_port={logprob_port}"},
    # Questions that a tiny model has learnt; the bare command: tests/data/test_sample_data.py.
    DATASET: {
        "create_count_down.py": "create_count_down.py --style compact --num-questions 200 "
        "--max-numbers 3 --max-number 9 --operators=+-"
    },
    TRAINING: {
        "localhost:54367": "localhost:{trainer_port}",
        "--batch-size                 128": "--batch-size 4",
        "--samples-per-question       32": "--samples-per-question 4",
        "--max-generation-tokens      16384": "--max-generation-tokens 16",
        "--train-minibatch-size       32": "--train-minibatch-size 2",
        "--num-training-batches       1000000": "--num-training-batches 2",
        "--min-samples-per-checkpoint 20000": "--min-samples-per-checkpoint 16",
    },
    PLOT: {
        "<PATH/TO/training_metrics.jsonl>": "dummy_output/training_metrics.jsonl",
        "  --remote YOUR_SSH_ALIAS \\\n": "",  # "if your file is already local, omit the flag"
    },
}


@pytest.fixture
def desk(tmp_path):
    """A working directory with the scripts, a home of its own, and names for what is free."""
    (tmp_path / "sample-data").mkdir()
    (tmp_path / "home").mkdir()
    scripts = [*TYPED, "sample-data/create_count_down.py"]
    for name in scripts:
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return tmp_path


def typed(block, **names):
    """The block with its substitutes, each in place of something that stands there once."""
    for original, substitute in SUBSTITUTES[block].items():
        assert block.count(original) == 1, original
        block = block.replace(original, substitute.format(**names))
    return block


def user_environment(desk, hub, *, port):
    """A user's own: nothing of ours but the cluster, the hub, and no compiler for minutes."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return environment(
        HOME=str(desk / "home"),
        PATH=path,
        RAY_ADDRESS=f"127.0.0.1:{port}",
        HF_ENDPOINT=hub.endpoint,
        HF_HUB_OFFLINE="0",
        TORCHDYNAMO_DISABLE="1",
    )


def test_every_block_of_the_predecessor_s_readme_works_as_typed(desk, tmp_path_factory):
    ports = {"port": free_port(), "client_port": free_port(), "logprob_port": free_port()}
    names = ports | {"trainer_port": free_port(), "ray": tmp_path_factory.mktemp("r")}
    with StandInHub({MODEL: TINY}) as hub:
        env = user_environment(desk, hub, port=names["port"])

        def bash(block):
            return Command("-c", typed(block, **names), program="bash", cwd=desk, env=env)

        with bash(HEAD) as head:
            head.wait_for("Ray runtime started")
            with bash(GENERATION) as generation, bash(LOGPROB) as logprob:
                with bash(DATASET) as dataset:
                    assert dataset.wait(timeout_s=READY_S) == 0
                for worker in (generation, logprob):
                    worker.wait_for("registered", timeout_s=READY_S)
                assert_apart_from_torchrun(head.family())
                with bash(TRAINING) as training:
                    training.wait(timeout_s=RUN_S)
            with bash(PLOT) as plot:
                assert plot.wait(timeout_s=READY_S) == 0, plot.err
        downloads = dict(hub.downloads)
    assert_all_is_there(desk, training.out)
    assert set(downloads.values()) == {1}  # of two dispatchers and two ranks


def assert_apart_from_torchrun(family):
    """No worker takes itself for a rank of its dispatcher's torchrun."""
    workers = [pid for pid in family if b"ray::LogprobWorker" in read(pid, "cmdline")]
    assert workers
    for pid in workers:
        assert not OF_TORCHRUN & {
            line.split("=")[0] for line in read(pid, "environ").decode().split("\0")
        }


def read(pid, name):
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def assert_all_is_there(desk, said):
    for log in ("grpo_vllm_0.log", "grpo_logprob_1.log"):
        assert re.search(r"^.*worker \S+ registered", (desk / "home" / log).read_text(), re.M)
    assert (desk / "train.log").read_text() == said
    output = desk / "dummy_output"
    rows = [json.loads(line) for line in (output / "training_metrics.jsonl").open()]
    assert [row["total_samples_accumulated"] for row in rows] == [8, 16, 24, 32], said
    assert len((output / "dump_samples.jsonl").read_text().splitlines()) == 32
    assert {folder.name for folder in (output / "hf_format").iterdir()} == {
        "samples_16",
        "samples_32",
    }
    assert (desk / "experiment_plots.svg").read_text().startswith("<?xml")
