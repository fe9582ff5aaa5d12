"""Which threads of ranks and workers call a device: they must choose it, or have device 0."""

import ast
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import async_grpo
from async_grpo.devices.current import use_device

PACKAGE = Path(async_grpo.__file__).parent
MAKERS = {"Thread", "ThreadPoolExecutor", "in_background", "run_in_executor", "to_thread"}
CALL_A_DEVICE = {  # {file: what of it makes its threads use the rank's device}
    "checkpoint/saving.py": "use_device(self._learner.device)",  # DCP's loader waits for a stream
    "weight_sync/publisher.py": "initializer=use_device, initargs=(device,)",  # waits for copies
    "weight_sync/transport.py": "",  # its links: nccl.py, below
    "weight_sync/nccl.py": "torch.accelerator.device_index(self._sender.device.index)",
    # Forwards of rank 0, whose device is the first that Ray shows to its process.
    "rollout/logprob_worker.py": "options = RankOptions(",
}
CALL_NONE = {
    "bridges/agent.py", "checkpoint/disk.py",  # hashing
    "cli/run_processes.py",
    "cli/use_model.py", "cluster/cluster.py", "controller/controller.py",
    "environments/environment_worker.py", "environments/episode.py", "environments/service.py",
    "environments/tools/code.py", "environments/tools/function.py", "gateway/answer_plan.py",
    "gateway/run_gateway.py", "launch/child_processes.py", "launch/interrupts.py", "model/hub.py",
    "rollout/engine.py",  # vLLM's core is a process of its own
    "rollout/engine_adapters.py", "rollout/weights_update.py",  # files and memory of the host
    "rollout/scorer_ranks.py",  # waits for the end of processes
    "run/preparation.py", "run/publication.py", "run/watch.py", "telemetry/trackers.py",
    "util/waiting.py", "verification/sandbox.py",
}  # fmt: skip


def makers(path):
    """The names in `MAKERS` that a file calls."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    called = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
    return called & MAKERS


def test_every_thread_of_the_package_is_known_to_call_a_device_or_none():
    """A new thread has device 0: whatever it calls there takes 0.5 GB of another's memory."""
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if makers(path)}
    assert files - {*CALL_A_DEVICE, *CALL_NONE} == set(), "say what its threads call"
    assert CALL_NONE - files == set(), "these make no thread any more"


@pytest.mark.parametrize(("file", "how"), CALL_A_DEVICE.items())
def test_a_thread_that_calls_a_device_uses_that_of_its_rank(file, how):
    assert how in (PACKAGE / file).read_text()


def test_on_cpus_a_thread_is_left_as_it_is():
    with ThreadPoolExecutor(1, initializer=use_device, initargs=(torch.device("cpu"),)) as threads:
        assert threads.submit(torch.zeros, 2).result(10).device.type == "cpu"


@pytest.mark.gpu
def test_a_thread_uses_its_rank_s_device_and_a_stream_of_its_own():
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    with ThreadPoolExecutor(1, initializer=use_device, initargs=(device,)) as threads:
        index, stream = threads.submit(
            lambda: (torch.cuda.current_device(), torch.cuda.current_stream())
        ).result(60)
    assert index == device.index
    assert stream != torch.cuda.default_stream(device)
