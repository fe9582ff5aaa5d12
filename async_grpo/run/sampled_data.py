"""A sampled run's data on every rank: minibatches, across losses of the controller, and weights.

All ranks collect weights; rank 0 announces them. Ranks fetch what they need of teachers once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from threading import Event

import numpy as np
import torch
from numpy.typing import NDArray

from async_grpo.algorithms.base import Teacher
from async_grpo.checkpoint.resume import Start
from async_grpo.checkpoint.saving import Read
from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import WHO, RunClient
from async_grpo.config.roles import teacher
from async_grpo.model.adapters import adapter_text
from async_grpo.model.collate import collate_pairs, split_by_row, to_device
from async_grpo.model.lm_head import Head, Rescaling
from async_grpo.model.served import (
    FlatShards,
    Served,
    adapter_alone,
    changed,
    probing,
    samples,
    served,
)  # fmt: skip
from async_grpo.run.main_rank import MainRank, OtherRank
from async_grpo.training.fsdp import compute_dtype, iter_device_tensors, reshard
from async_grpo.training.learner import Learner
from async_grpo.training.ranks import Ranks
from async_grpo.training.stream import Express, RankStream
from async_grpo.types import CanaryRow, EndOfStep, StreamItem, WeightsSnapshot, WeightsVersion
from async_grpo.util import deadlines
from async_grpo.util.add_ons import add_on
from async_grpo.util.errors import DataError, RunLost, WeightSyncError
from async_grpo.weight_sync.gather import Shards, is_finite
from async_grpo.weight_sync.publisher import Collected, Collector, not_finite
from async_grpo.weight_sync.routes import OBJECT_STORE

CANARY_TEMPERATURE = 1.0  # vLLM scores prompts at this one only


class SampledData(Iterator[StreamItem]):
    """Iterates over the items that a rank trains; publishes weights, recovers the controller.

    Every rank has one. Each gradient step ends under the epoch of the run in which it began.
    """

    def __init__(
        self,
        ranks: Ranks,
        learner: Learner,
        main: MainRank | OtherRank,
        cluster: Cluster,
        stop: Event,
    ) -> None:
        self._cluster = cluster
        self._config = learner.config
        self._ranks = ranks
        self._learner = learner
        self._main = main
        self._stop = stop
        self._num_updates = -1  # of the parameters when they were last gathered
        self._stream: RankStream | None = None
        self._collector: Collector | None = None
        self._collected: Collected | None = None  # the weights gathered last
        self._express = self._make_express()
        # With --colocated: batches in the weights to announce, once the ranks leave the devices.
        self._unannounced: int | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the ranks have agreed to stop before the last batch."""
        return self._stream is not None and self._stream.is_stopped

    def __next__(self) -> StreamItem:
        while True:
            stream = self._stream or self._open()
            self._leave_devices()
            try:
                item = next(stream)
            except RunLost as error:
                self._recover(stream, str(error))
                continue
            except StopIteration:  # all ranks leave, after the collectives of their threads
                self._wait_collected()
                self._take_devices()
                raise
            finally:
                self._main.report.stood_still("seconds_waiting", stream.take_seconds_waiting())
            self._learner.unpark()  # the engines sleep, or the controller would send no item
            if isinstance(item, EndOfStep):
                self._main.run.step_agreed(item)
            return item

    def restore(self, start: Start) -> None:
        """Restore the reference's weights; collective.

        Call it before the learner is restored: the policy must still have the model folder's
        weights.
        """
        if not self._learner.algorithm.needs_reference:
            return
        if self._config.sampling.reference_of(start.batches) == 0:
            self._main.weights.restore_first_reference(self._collect(0).wait())
        self._main.weights.restore_moved_references(start)

    def publish(self, num_batches: int, *, evaluates: bool = False) -> float:
        """Collect the weights after `num_batches` batches; rank 0 then announces them in a thread.

        Collective. Returns the seconds that this rank waited. Raises the error of the previous
        weights' publication.
        """
        weights = self._main.weights
        self._main.report.doing("publishing weights")
        started = time.monotonic()
        self._wait_collected()
        weights.announcements.wait()
        # Where every step of the batch was skipped, the published weights get its version too; the
        # ranks agree, for they skip together.
        if self._num_updates != self._learner.step.clocks.steps:
            is_first = self._num_updates < 0
            if is_first and self._learner.policy.adapter and self._config.asks_questions:
                self._prove_delivery()
            self._num_updates = self._learner.step.clocks.steps
            self._gather(num_batches)
        self._main.report.published(num_batches, evaluates=evaluates)
        # The controller begins the evaluations of these weights.
        if self._config.memory.colocated:  # the ranks may yet save and export
            self._unannounced = num_batches
        else:
            weights.announce(self._main.client, num_batches)
        return time.monotonic() - started

    def finish(self) -> None:
        """Return when the last weights are served."""
        self._wait_collected()
        self._leave_devices()
        self._main.weights.announcements.wait()

    def _leave_devices(self) -> None:
        """With --colocated, leave the devices to the engines, and announce weights; collective."""
        if self._unannounced is None:
            return
        self._wait_collected()
        self._park()
        self._main.weights.announce(self._main.client, self._unannounced)
        self._unannounced = None

    def _park(self) -> None:
        self._learner.park()
        self._ranks.agree(0)  # all have parked

    def _take_devices(self) -> None:
        """Take the devices from engines that have them, whatever these do; collective."""
        if self._learner.parked is None:
            return
        client = self._ranks.share(lambda: self._main.client)
        rest = client.controller.rest
        self._ranks.on_main(lambda: client.answer(deadlines.DEVICES_TAKEN_S, rest, client.run))
        self._learner.unpark()

    def finish_evaluations(self) -> None:
        """Return when the last evaluation has ended or makes no progress; collective."""
        self._main.finish_evaluations(self._ranks, self._stop)

    def references_to_save(self, batches: int) -> Mapping[int, Read]:
        """Readers of the reference's weights for a checkpoint after `batches`; rank 0's only."""
        if not self._learner.algorithm.needs_reference:
            return {}
        self._wait_collected()
        return self._main.weights.references_to_save(batches) or {}

    def _wait_collected(self) -> None:
        """Return when the weights gathered last are stored; raises any rank's error on all."""
        if self._collected is not None:
            self._collected.wait()

    def _prepared(self) -> Collector:
        """What collects weights; the first call is collective."""
        if self._collector is None:
            self._incarnation, self._dtype, self._alone, self._served = self._ranks.share(
                lambda: self._main.weights.published_as
            )
            self._collector = Collector(
                Shards.of(self._learner.policy, self._tensors()),
                self._cluster,
                device=self._learner.device,
                dtype=self._dtype,
                with_deltas=self._config.memory.weight_delta,
                rest_of_folder=self._learner.policy.adapter is not None and not self._alone,
            )
        return self._collector

    def _collect(self, num_batches: int) -> Collected:
        """Collect the policy's current weights; collective."""
        collector = self._prepared()
        version = WeightsVersion(self._incarnation, num_batches)
        return collector.collect(FlatShards(self._tensors()), version=version)

    def _send(self, outline: WeightsSnapshot) -> None:
        """Send weights from rank 0's device, if that is asked for, before they are stored.

        Collective. Raises `WeightSyncError` on all ranks if they are not finite anywhere.
        """
        by_store = self._config.memory.weight_transport == OBJECT_STORE or self._alone
        if by_store or outline.version.batches < 0:
            return
        metas = zip(outline.tensors, FlatShards(self._tensors()), strict=True)
        on_device = ((meta.name, own.to(self._learner.device)) for meta, own in metas)
        infinite = (name for name, own in on_device if not is_finite(own.to(self._dtype)))
        if found := next(filter(None, self._ranks.gather(next(infinite, ""))), ""):
            raise WeightSyncError(not_finite(found, outline.version))
        tensors = iter_device_tensors(self._tensors(), self._dtype, device=self._learner.device)
        self._main.weights.send(self._main.client, outline, tensors)

    def _gather(self, num_batches: int) -> None:
        """Gather the current weights and what shows that they arrive; collective."""
        weights, policy = self._main.weights, self._learner.policy
        collector = self._prepared()
        outline = collector.outline(WeightsVersion(self._incarnation, num_batches))
        outline = replace(outline, canary=score_canary(self._learner, weights.canary))
        reshard(policy)  # the canary's forward leaves the root whole
        if policy.adapter:
            own = samples(
                policy, alone=self._alone, dtype=self._dtype, served=self._served,
                seed=num_batches, num_ranks=self._ranks.world_size,
            )  # fmt: skip
            found, lost, total = zip(*self._ranks.gather(own), strict=True)
            outline = replace(
                outline,
                samples=tuple(sample for of_rank in found for sample in of_rank),
                merge_loss=math.sqrt(sum(lost) / sum(total)) if sum(total) else None,
                adapter=adapter_text(policy) if self._alone else "",
            )
        self._send(outline)
        self._collected = self._collect(num_batches)
        weights.collected(self._collected, outline)

    def _prove_delivery(self) -> None:
        """Show, before weights are published, that workers compute with what they are sent.

        Collective. Raises `WorkerError` on all ranks when one does not.
        """
        before = score_canary(self._learner, self._main.weights.canary)
        with probing(self._learner.policy):
            self._gather(-1)  # before all versions of the run
            self._wait_collected()
        client = self._ranks.share(lambda: self._main.client)
        if self._config.memory.colocated:
            self._park()
        self._ranks.on_main(lambda: self._main.weights.prove(client, before))
        self._take_devices()

    def _tensors(self) -> dict[str, Served]:
        """What workers are sent of the current policy; collective."""
        policy = self._learner.policy
        reshard(policy)
        if self._alone:
            return adapter_alone(policy, divided=True)
        return (changed if policy.adapter else served)(policy, divided=True)

    def _open(self) -> RankStream:
        client = self._ranks.share(lambda: self._main.client)
        if self._stream is None:
            meet_teachers(
                self._learner, client, lambda: self._ranks.share(lambda: self._main.teacher_widths)
            )
        self._stream = RankStream(
            client,
            rank=self._ranks.rank,
            stall_timeout_s=self._config.places.stall_timeout_s,
            agree=self._ranks.agree,
            stop=self._stop,
            teachers=[teacher(name) for name in self._config.teacher_names],
            express=self._express,
        )
        return self._stream

    def _make_express(self) -> Express | None:
        """What fetches a teacher's logits without the object store; None without `--express`."""
        mesh = self._config.teaching.express_mesh
        if mesh is None:
            return None
        role = teacher(self._config.teacher_names[0])
        express: Express = add_on("express.receiver")(
            self._ranks,
            teachers=mesh,
            width=self._learner.policy.model.config.vocab_size,
            temperature=self._config.sampling.temperature,
            cluster=self._cluster,
            workers=lambda: self._main.client.answer(
                deadlines.ANSWER_S, self._main.client.controller.receivers, role
            ),
        )
        return express

    def _recover(self, stream: RankStream, reason: str) -> None:
        """Recover the run, which all ranks have lost before the same item."""
        self._learner.discard()
        if self._config.memory.colocated:  # the engines wake when the weights are announced again
            self._park()
        self._ranks.on_main(lambda: self._main.recover(stream.client, reason))
        self._stream = None


def meet_teachers(
    learner: Learner, client: RunClient, widths: Callable[[], Mapping[str, int]]
) -> None:
    """Give a rank's learner the loss terms of the teachers that its algorithm uses.

    `widths` is collective and returns {teacher: width of its vocabulary}. Where the algorithm needs
    the teachers' heads, which never change, every rank fetches them.
    """
    need, config = learner.algorithm.teacher_need, learner.config
    if need is None:
        return
    # The controller may itself wait `stall_timeout_s` for a teacher to be free.
    limit_s = config.places.stall_timeout_s + deadlines.ANSWER_S
    width_of, teachers = widths(), []
    for name in config.teacher_names:
        head = None
        if need.fetches_heads:
            head = _head(client, name, learner.device, timeout_s=limit_s)
        teachers.append(Teacher(width_of[name], head))
    learner.step.head_terms += learner.algorithm.teacher_terms(teachers)


def _head(client: RunClient, name: str, device: torch.device, *, timeout_s: float) -> Head:
    teacher_head = client.controller.teacher_head
    references = client.answer(timeout_s, teacher_head, client.run, teacher(name))
    (arrays,) = client.cluster.fetch(references, timeout_s=deadlines.BUCKET_FETCH_S, owner=WHO)
    if arrays is None:
        raise DataError(f"the head of teacher {name} did not come: look at its worker's node")
    tensors = {key: torch.from_numpy(array.copy()) for key, array in arrays.items()}
    factor, softcap = tensors.pop("rescaling").tolist()
    on_device = {
        key: (t.view(torch.bfloat16) if t.dtype == torch.uint16 else t).to(device)
        for key, t in tensors.items()
    }
    return Head(**on_device, rescaling=Rescaling(factor, softcap or None))


@torch.no_grad()
def score_canary(learner: Learner, rows: tuple[NDArray[np.int32], ...]) -> tuple[CanaryRow, ...]:
    """Score the canary's rows with the current weights; collective, also for ranks without rows.

    Leaves the root module gathered, which `reshard` undoes.
    """
    config, device = learner.config, learner.device
    dtype = str(compute_dtype(config.memory.mixed_precision, device)).removeprefix("torch.")
    packed = to_device(collate_pairs([(row[:1], row[1:]) for row in rows]), device)
    scored = learner.policy(packed, temperature=CANARY_TEMPERATURE, chunk_size=config.chunk_size)
    parts = split_by_row(scored.logprobs, packed)
    routing, lengths = learner.policy.routing, [len(part) for part in parts]
    chosen = routing.own if routing is not None and rows else {}
    own = {layer: tokens.cpu().split(lengths) for layer, tokens in chosen.items()}
    experts = [{k: of_rows[n].numpy() for k, of_rows in own.items()} for n in range(len(rows))]
    return tuple(
        CanaryRow(row, part.float().cpu().numpy(), dtype, of_row)
        for row, part, of_row in zip(rows, parts, experts, strict=True)
    )
