"""async-grpo: train a language model with GRPO while it generates.

The path of one batch. `room/file.name` is a function or method in that file; `─▶` is its call.
Rank 0 and the other ranks, the controller and each worker are processes of their own.

    new weights    run/loop.train ─▶ run/sampled_data.publish ─▶ weight_sync/publisher.collect
    (all ranks)      ─▶ weight_sync/gather.rounds, then in a thread of rank 0:
                     run/publication.begin ─▶ controller/controller.publish ─▶
                     controller/registry.publish
                     ─▶ rollout/generation_worker.load_weights of every worker
    may be used    controller/controller.published ─▶ controller/served_run.published ─▶
                   batching/batcher.published
                     ─▶ batching/admission.start: the staleness window moves
    a question     ─▶ batching/slots.start, one a question ─▶ batching/records.draw;
                   a share of the slots has given pairs instead, which nobody samples or grades:
                   batching/records.given ─▶ batching/pipeline.finish
    its episodes   ─▶ batching/pipeline.run ─▶ batching/pipeline.play; each worker is asked by
                   batching/leased_work.answer ─▶ controller/registry.lease ─▶
                   controller/leases.call
      one turn       ─▶ rollout/generation_worker.generate, then verification/pool.verify
      or more        ─▶ environments/environment_worker.play, which asks for each turn and for
                     the verdicts by ask_controller ─▶ controller/controller.ask
    a visitor      ─▶ gateway/run_gateway.sample ─▶ controller/controller.ask, beside all this
    advantages     ─▶ algorithms/base.finish_group; of a whole step batching/rounds.join
    scores         ─▶ rollout/logprob_worker.logprobs: the reference's, a teacher's
    rounds         ─▶ batching/rounds.offer; batching/batcher._send_rounds
                     ─▶ batching/rounds.next_round ─▶ batching/rounds.put
    every rank     training/stream.__next__ ─▶ controller/controller.next_items
                     ─▶ batching/rounds.take
      by express   ─▶ training/express_receiver.fill
                     ─▶ rollout/logprob_worker.serve_express of teachers
                     ─▶ algorithms/express.exchange: a teacher's logits, straight to the ranks
    gradient       run/loop.train_steps ─▶ training/learner.accumulate ─▶ model/collate.collate
                     ─▶ training/step.accumulate ─▶ algorithms/base.loss
    held-out       ─▶ batching/evaluations.published, of the same news ─▶ controller/registry.held
    questions      ─▶ batching/evaluations.run ─▶ batching/pipeline.play, as above, beside all this;
                   training/stream.__next__ brings rank 0 what came of them
    step           ─▶ training/learner.update ─▶ training/recorder.audit ─▶ training/step.finish
    its record     training/recorder.end_step; async-grpo replay: run/replaying.replay
    a request      ─▶ controller/controller.control ─▶ batching/records.ask, beside all this
      its batch ends ─▶ batching/records.take ─▶ run/loop.train_steps ─▶ training/learner.set
    batch          ─▶ run/sampled_data.publish, checkpoint/saving.batch_ended: from the top

Every loop of it, what it waits for, and what unblocks it:

    batching/slots._run             a worker of each role      a lease that is returned; new weights
    batching/evaluations._run       its worker, verifiers      a lease, a verdict; nobody waits for
                                                               it but run/loop.train at its end
    batching/batcher._send_rounds   every rank to ask          training/stream.__next__
      then                          enough finished samples    batching/slots._run;
                                                               controller/controller.hungry
    controller/registry.lease       a worker that is free and  a returned lease, a registration,
                                    serves such weights        controller/updates.publish
    batching/scoring.with_scores    a reference that is due    controller/controller.published
    training/stream.__next__        its next item              batching/rounds.put, or Ctrl-C
    algorithms/express.exchange   the next chunk's end       sends in the plan's order; a loss
    run/sampled_data.publish            the announcement before    the workers' acknowledgements
    run/recruitment.recruit         a worker of each role      controller/controller.register
    launch/dispatcher.check         nothing: once a second     its workers' deaths, the controller's

All of these end when the controller is lost: `errors.RunLost` or `errors.ProcessLostError` on the
ranks, and run/main_rank.recover begins the run again at the last whole gradient step. How long
anybody waits stands in util/deadlines.

`types/` and `config/` are what rooms exchange; `algorithms/` and `environments/` are the seams for
code of yours, `bridges/` plays other people's environments, `config/roles` names the roles. `data/`
reads questions, `checkpoint/` saves and resumes, `telemetry/` watches, `devices/` says what a
machine has and who gets which of it, `check/` finds what is wrong with a run and `planning/` what
it takes, before it begins: planning/service.simulate is the path above on a virtual clock.
`launch/` starts and ends processes and the workers in them, `cli/` is the commands, `api/` the same
from a script or a notebook: `async_grpo.train`, which is imported when it is asked for. `viewing/`
draws what a run has written. `cluster/` asks Ray, `util/` is what any room may use.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from async_grpo.util import RELEASE, errors

if TYPE_CHECKING:
    from async_grpo.api.result import Result, Step
    from async_grpo.api.running import Run, start, train
    from async_grpo.config.train_config import TrainConfig
    from async_grpo.config.worker_config import WorkerConfig

sys.modules[f"{__name__}.errors"] = errors  # the name by which users know it
__version__ = RELEASE
__all__ = ["Result", "Run", "Step", "TrainConfig", "WorkerConfig", "__version__", "start", "train"]
_PLACES = {
    **dict.fromkeys(("Result", "Step"), "api.result"),
    **dict.fromkeys(("Run", "start", "train"), "api.running"),
    "TrainConfig": "config.train_config",
    "WorkerConfig": "config.worker_config",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
