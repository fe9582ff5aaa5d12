"""Evaluates a model without training: `async-grpo evaluate`.

With --loss there are no workers and nothing to wait for. Else it

consumes:     a model's folder, held-out questions, workers that have loaded the same folder
produces:     the same result as a run's last evaluation of these weights, by the same code
waits for:    workers, then the evaluation, as long as it makes progress
unblocked by: registrations, the last question
"""

from __future__ import annotations

import logging
import time

import torch

from async_grpo.batching.ledger import Ledger
from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import ControllerClient, RunClient
from async_grpo.config.roles import GENERATION
from async_grpo.config.train_config import TrainConfig
from async_grpo.controller.find import find_or_make_controller
from async_grpo.data.table import QuestionTable
from async_grpo.model.model_folder import check_model_folder
from async_grpo.model.scorer import Scorer
from async_grpo.run.companions import start_recorder, start_witness
from async_grpo.run.data import load_pairs, load_sets
from async_grpo.run.preparation import demand_of, plan_run
from async_grpo.run.recruitment import recruit
from async_grpo.run.reward_trial import try_all_rewards
from async_grpo.training.learner import HeldOutLoss
from async_grpo.training.stream import Standstill
from async_grpo.types import EvaluationResult, ResumePoint, WeightsSnapshot, WeightsVersion
from async_grpo.types.worker_info import confinement_in_words
from async_grpo.util import deadlines
from async_grpo.util.errors import WorkerError

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.5
ROW_TOKENS = 8192  # that are scored together, if a sequence has no more


def evaluate(cluster: Cluster, config: TrainConfig) -> EvaluationResult:
    """Evaluate the one set of `config`, as a run that has trained all of its batches would.

    The cluster's workers have loaded the model's folder. Raises `WorkerError` where no sample could
    be graded.
    """
    facts = check_model_folder(config.places.model_name_or_path)
    sets, none = load_sets(config, facts), QuestionTable.of(())
    end = ResumePoint(config.batching.num_training_batches, 0, Ledger().state())
    plan = plan_run(config, facts, none, none, sets=sets, num_ranks=1, resume=end)
    controller = ControllerClient(cluster, find_or_make_controller(cluster))
    for worker in recruit(controller, demand_of(config, facts, plan)):
        if any(worker.confinement.values()):
            logger.warning("%s", confinement_in_words(worker.confinement))
    try_all_rewards(controller, plan)
    witness = start_witness(cluster)
    recorder = start_recorder(config.recording, cluster, model=config.places.model_name_or_path)
    client = controller.begin_run(plan, witness, recorder, incarnation=plan.incarnation)
    _serve_own_weights(client, WeightsVersion(plan.incarnation, end.batch))
    (result,) = _evaluated(client, stall_timeout_s=config.places.stall_timeout_s)
    client.answer(deadlines.RUN_ENDED_S, client.controller.end_run, client.run)
    if not result.num_samples:
        raise WorkerError(
            f"at least one sample must be graded, but all of {result.num_failed} failed "
            f"({', '.join(result.failures)}): correct what the warnings above name"
        )
    return result


def _serve_own_weights(client: RunClient, version: WeightsVersion) -> None:
    """Publish the weights that the workers have already loaded as `version`."""
    timeout_s = deadlines.WEIGHTS_APPLIED_S
    empty = WeightsSnapshot(version, ())
    call = client.controller.publish.remote(client.run, empty, (GENERATION,), timeout_s)
    reports = client.wait(call, timeout_s=timeout_s + deadlines.PUBLISH_SLACK_S)
    if not reports[GENERATION].acks:
        raise WorkerError(f"no worker serves the model: {reports[GENERATION].failures}")
    client.answer(deadlines.ANSWER_S, client.controller.published, client.run, version)


def _evaluated(client: RunClient, *, stall_timeout_s: float) -> tuple[EvaluationResult, ...]:
    call = client.controller.evaluated.remote(client.run)
    standstill = Standstill(client, timeout_s=stall_timeout_s)
    while not client.cluster.is_ready(call):
        client.controller.heard.remote(client.run)  # a heartbeat
        standstill.check()
        time.sleep(POLL_INTERVAL_S)
    return client.cluster.wait(call, timeout_s=deadlines.STATUS_S, who="the evaluation")


def evaluate_loss(config: TrainConfig, *, dtype: str, limit: int) -> HeldOutLoss:
    """The loss of the model on the data of a supervised run, as it would train them.

    `dtype` auto: float32 on CPU, bfloat16 elsewhere; `limit` of sequences, 0: all.
    """
    started, path = time.monotonic(), config.places.model_name_or_path
    pairs, _ = load_pairs(config, check_model_folder(path))
    number = min(limit or len(pairs), len(pairs))
    read = ((each.prompt_token_ids, each.completion_token_ids) for each in pairs)
    longest = max(len(prompt) + len(output) for prompt, output in read)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scorer, at_once = Scorer(path, device=device, dtype=dtype), max(1, ROW_TOKENS // longest)
    loss_sum, num_tokens = 0.0, 0
    for first in range(0, number, at_once):
        together = [pairs[n] for n in range(first, min(first + at_once, number))]
        row = [(each.prompt_token_ids, each.completion_token_ids) for each in together]
        for logprobs in scorer.score(row, temperature=1.0):
            loss_sum -= float(logprobs.sum(dtype="float64"))
            num_tokens += len(logprobs)
    return HeldOutLoss(loss_sum, num_tokens, number, time.monotonic() - started)
