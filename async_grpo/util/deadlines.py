"""Every wait of one process on another, in seconds, and how the waits nest. Imports nothing.

A wait that contains another is longer, so that the inner one ends first and names the cause:

    ping ──< lease ──< answer of an actor ──< publication ──< stall (--stall-timeout-s) ──< group
               bucket staged ──< weights applied ─┘                checkpoint ──────────────┘
    status of the batcher ──< least stall
    a rank's grace ──< all ranks of a machine ──< the trainer's command ──< checkpoint

A wait for known bytes is `for_bytes` longer. `tests/test_deadlines.py` holds the table to this. How
often a process looks at something itself (`…_INTERVAL_S`) stands beside the loop that does it.
"""

from __future__ import annotations

SLOWEST_RATE = 0.2e9  # bytes a second, of weights to other machines and checkpoints to a disk


def for_bytes(wait_s: float, num_bytes: int) -> float:
    """A wait of the table, in seconds, where so many bytes are on the way.

    >>> for_bytes(WEIGHTS_APPLIED_S, 141 * 10**9)  # 70B parameters in bfloat16
    1005.0
    """
    return wait_s + num_bytes / SLOWEST_RATE


# Signs of life.
PING_S = 5.0  # between two pings of a worker, which report the tokens it has made
LEASE_S = 30.0  # a worker that is silent for so long counts as lost (--worker-lease-s)
LEAST_STALL_S = 2 * PING_S  # no --stall-timeout-s is shorter: pings report progress

# Answers that are cheap for the other side.
HEAD_PROBE_S = 5.0  # of a Ray head's port
HUB_ANSWER_S = 10.0  # of a hub that does not answer, as behind a firewall
HUB_PUSH_S = 1800.0  # one export on its way to a hub
HUB_PUSHED_S = 1830.0  # of a run's end, until its last export is there
STATUS_S = 10.0  # of the batcher, to a rank that waits for samples
ANSWER_S = 60.0  # of an actor, which may be starting
SSH_S = 60.0  # of a machine whose metrics are plotted

# A process that joins a cluster.
CLUSTER_JOINED_S = 120.0  # of a run, whose machine may be starting everything at once
NODES_JOINED_S = 600.0  # of all nodes that a run waits for, which may import from a network disk
RUN_JOINED_S = 20.0  # by a command that asks a run something

# The controller.
CONTROLLER_SILENCE_S = 60.0  # of its process, which is frozen then: another is made
CONTROLLER_FOUND_S = 180.0  # by a process that makes one while another ends
CONTROLLER_IDLE_S = 120.0  # without workers and run, after which it ends itself
TRAINER_SILENCE_S = 60.0  # of rank 0, which sends a sign of life every second
UNWITNESSED_S = 10.0  # the same, once its witness is gone
OTHER_RUN_ENDED_S = 20.0  # of a run that another run has to wait for
OTHER_REWARDS_GONE_S = 5.0  # of verifier pools that are about to leave
WORK_ENDED_S = 30.0  # of a worker whose leases have ended
RELEASED_S = 5.0  # of the controller, when a worker deregisters; the worker ends anyway

# Workers of a dispatcher.
PLACED_S = 20.0  # a worker that was killed may hold its CPU for 6 s
IMPORTED_S = 600.0  # of a worker's process that imports before it joins Ray, on a busy machine
ROOM_S = 5.0  # in which workers that have just ended give back what they held
HEAD_SEEN_S = 2.0  # of a cluster's head that ends, once what was on it has failed
HEAD_ENDED_S = 5.0  # of a cluster that loses its workers before its head

# The dump of samples, which no step waits for longer than this.
RECORDER_FLUSH_S = 5.0
RECORDER_WRITE_S = 60.0
RECORDER_AGAIN_S = 1.0  # between two attempts to reach a recorder that has died

# Trackers, each in a thread of its own.
TRACKERS_START_S = 120.0  # of all of a run; W&B tries for 90 s
TRACKERS_ENDED_S = 10.0  # of all of a run, which may still send what they hold

# Weights.
BUCKET_STORED_S = 120.0  # checking one bucket, and putting it into this machine's object store
WEIGHTS_COLLECTED_S = 300.0  # of a rank that waits for what the others have stored
BUCKET_HERE_S = 60.0  # a bucket out of this machine's own object store
BUCKET_STAGED_S = 120.0  # verifying one bucket, with a step of generation before it
BUCKET_FETCH_S = 300.0  # a bucket out of another machine's object store
CANARY_S = 60.0  # the engine's log-probabilities of a few fixed tokens
WEIGHTS_APPLIED_S = 300.0  # the pause of an engine that takes new weights
ENGINE_SLEEPS_S = 80.0  # its weights on the way to the host's memory, or back
ENGINE_ASLEEP_S = 90.0  # of a worker that gives its devices to the trainer, or is fenced
DEVICES_TAKEN_S = 100.0  # by ranks, of engines that may be at work
LATE_LOADS_S = 30.0  # of workers that still load when others serve the new weights
FIRST_LOAD_S = 600.0  # of a worker that registers
PUBLISH_SLACK_S = 30.0  # after its deadline a publication is reported to the caller

# References and teachers.
SCORER_RANKS_S = 600.0  # of ranks that share a model: their start, and the longest forward of one
PAYLOADS_FETCHED_S = 120.0  # by a rank, out of other machines' object stores

# Verifiers.
GRADER_ENDED_S = 2.0  # of a fork server that was asked to end
GRADER_SILENCE_S = 15.0  # of one that does not report a request, beyond the request's limit
GRADERS_LOADED_S = 60.0  # of the user's functions, which import what they like
SHARE_TAKEN_S = 120.0  # by a pool, whose verifier processes are started meanwhile
CONFINED_S = 60.0  # of a first confined process, which shows that confinement works
JAIL_TRIED_S = 30.0  # of a first program in a jail

# Tools of environments.
TOOL_S = 60.0  # one call, with its wait for a free thread
TOOL_SERVER_S = 30.0  # of a server of tools that is started or called up
SERVER_PROBE_S = 5.0  # of the port of a server that was away

# The gateway.
GATEWAY_READY_S = 180.0  # of its process, which imports transformers while a run starts
GATEWAY_HEAD_S = 10.0  # of a connection whose request has no head yet
GATEWAY_BODY_S = 30.0  # of a request's body, which takes one of its places
GATEWAY_ENDED_S = 5.0  # of requests that run when it ends
AGENT_SAID_S = 2.0  # of the last output of an agent that was killed

# Other people's environments.
AGENT_CONNECTED_S = 10.0  # of an agent served elsewhere, which may then take its time
BRIDGE_READY_S = 180.0  # of a process that imports them, which may be large
OPENENV_ANSWER_S = 60.0  # of a server, to one action

# Services that environments ask.
JUDGE_ANSWER_S = 120.0  # of a judge at an address, with the tries that its client makes
SERVICE_ANSWER_S = 180.0  # of a service of the user that gives no limit of its own

# Devices.
DRIVER_ANSWER_S = 60.0  # of nvidia-smi, which wakes every device of a machine

# A run at the controller.
BEGIN_RUN_S = 120.0  # while another run may still be ending
RUN_ENDED_S = 5.0  # of the controller, when rank 0 ends its run; rank 0 ends anyway
RANKS_TOLD_S = 60.0  # between two messages of rank 0 that an evaluation goes on

# Ranks.
RANKS_START_S = 300.0  # in which all ranks have started
CHECKPOINT_S = 1800.0  # for one save, and for one rank that waits for another
CHECKPOINT_ROOM_S = 10.0  # of a save that is due, for the one before; then it is left out
FILE_SEEN_S = 10.0  # by all machines of a shared folder, which may show a new file late
GROUP_SLACK_S = 600.0  # of a collective, beyond what rank 0 may wait for samples and workers

# Logits from teacher ranks to trainer ranks.
EXPRESS_FORMED_S = 60.0  # in which all members of a group have come
EXPRESS_CHUNK_S = 120.0  # one chunk of logits, with the teacher's forward before the first
EXPRESS_LAST_WORD_S = 2.0  # of a teacher whose group is lost, which may report the cause

# The end of processes, which are killed after their wait.
OTHERS_ENDED_S = 3.0  # of the other ranks of a machine, once one has failed
RANKS_LEAVING_S = 5.0  # of rank 0, which ends by itself because another rank has ended
RANK_BREAK_OFF_S = 8.0  # of a rank that lets go of the workers, when nothing is to be saved
RANK_GRACE_S = 25.0  # of a rank that was asked to end, for its step and checkpoint
RANKS_ENDED_S = 30.0  # of all ranks of a machine that were asked to end
TRAINER_ENDED_S = 40.0  # of the command that starts them
JOB_ENDED_S = 900.0  # of a job that its queue asks to end before its time is up: batch, checkpoint
LAUNCHED_ENDED_S = 180.0  # of `async-grpo launch`, which ends the trainer, workers and a Ray head
CHILD_ENDED_S = 20.0  # of any other command

# The start of a whole run.
HEAD_READY_S = 300.0  # of a Ray head
SCRIPT_S = 3600.0  # of what prepares a run: data may be large
