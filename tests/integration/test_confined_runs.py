"""A spy for a reward, under every way to start a run: it finds nothing and writes nowhere.

And in a container without namespaces, in which it would.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from commands import REPOSITORY, Command
from loops import read_lines
from no_namespaces import container
from private_cluster import PrivateCluster, environment

from async_grpo.cluster import head

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]
RUN_S = 900  # on a busy machine
MODEL = f"{REPOSITORY}/sample-data/tiny-countdown"
CLEAN, MILD = 0.625, 0.5  # rewards
SPY = """
import glob, json, os

def look(sample):
    seen = []
    for path in [{key!r}, *glob.glob({place!r} + "/**/auth_token", recursive=True)]:
        try:
            with open(path) as file:
                seen += [os.path.basename(path)] if file.read() else []
        except OSError:
            pass
    others = {{p for p in os.listdir("/proc") if p.isdigit()}} - {{str(os.getpid())}}
    seen += ["processes"] if others else []
    for folder in ({place!r}, {home!r}, "."):
        try:
            with open(os.path.join(folder, "leak"), "w"):
                seen.append("wrote")
        except OSError:
            pass
    if seen:
        raise RuntimeError(f"spied {{sorted(set(seen))}}")
    return {clean}
"""
FILE = """
[launch]
num_cpus = 4
[[worker]]
model_path = "{model}"
max_model_len = 256
max_num_seqs = 16
reward_fns = "{reward}"
[train]
model_name_or_path = "{model}"
data_path = "{folder}/questions.jsonl"
output_dir = "{folder}/run"
num_training_batches = 1
batch_size = 2
samples_per_question = 2
max_generation_tokens = 16
max_tokens_per_gpu = 512
trackers = ""
"""


# A pool on each of two raylets, and what it says after a look.
POOLS = """
import ray, sys
import numpy as np
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from async_grpo.cluster import cluster
from async_grpo.verification.pool import VerifierPool
from async_grpo.verification.config import VerifierConfig
from async_grpo.run.reward_trial import example_output
from async_grpo.types import GradingRequest, Question, VerificationRequest

own = dict(num_cpus=2, node_ip_address="127.0.0.1", object_store_memory=100 << 20)
two = Cluster(initialize_head=True, head_node_args=own)
two.add_node(**own)
cluster.Cluster.join(two.address, namespace="n")
question = Question(np.arange(3, dtype=np.int32), "1+1=", "2", {})
request = GradingRequest((VerificationRequest(0, 0, question, example_output(question)),))
config = VerifierConfig(reward_names=(sys.argv[1],))
for node in [node["NodeID"] for node in ray.nodes() if node["Alive"]]:
    place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    pool = ray.remote(VerifierPool).options(num_cpus=0, scheduling_strategy=place).remote(
        config, worker_id=node
    )
    info = ray.get(pool.info.remote(), timeout=300)
    (verdict,) = ray.get(pool.verify.remote(request), timeout=300)
    status = ray.get(pool.status.remote(), timeout=60)
    print(node == info.node_id, status.confinement, verdict.reward)
ray.shutdown()
two.shutdown()
"""


class Place:
    """A home with a key, a place for temporary files, a folder with questions and rewards."""

    def __init__(self, folder):
        self.folder = folder
        # Short: sockets below it may have names of 107 bytes.
        self.temporary = tempfile.mkdtemp(prefix="ag-")
        home = folder / "home"
        (home / ".ssh").mkdir(parents=True)
        (home / ".ssh" / "id").write_text("hush")
        self.environment = environment(HOME=str(home), TMPDIR=self.temporary)
        texts = {"key": str(home / ".ssh" / "id"), "place": self.temporary, "home": str(home)}
        (folder / "spy.py").write_text(SPY.format(clean=CLEAN, **texts))
        (folder / "mild.py").write_text(f"def grade(sample):\n    return {MILD}\n")
        questions = ({"input": f"{n}+2=", "answer": str(n + 2)} for n in range(8))
        (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)) + "\n")
        self.write("spy.py:look")

    def write(self, reward):
        values = {"model": MODEL, "folder": self.folder, "reward": self.folder / reward}
        (self.folder / "run.toml").write_text(FILE.format(**values))

    def done(self, *words, before=(), **variables):
        """Exit code, and all that a command said."""
        program, *rest = (*before, sys.executable, *words)
        env = self.environment | variables
        # In the folder of the file, which from elsewhere would ask for --trust.
        with Command(*rest, program=program, env=env, cwd=self.folder) as command:
            code = command.wait(timeout_s=RUN_S)
            return code, command.out + command.err

    def launched(self, *options, **settings):
        words = ("-m", "async_grpo.cli.main", "launch", self.folder / "run.toml", *options)
        return self.done(*words, **settings)

    def rewards(self, run="run"):
        return {
            row["avg_reward"] for row in read_lines(self.folder / run / "training_metrics.jsonl")
        }

    def confinement(self, run="run"):
        told = json.loads((self.folder / run / "training_params.json").read_text())["confinement"]
        return [*told.values()]


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    yield place
    shutil.rmtree(place.temporary, ignore_errors=True)


def check_blind(place, outcome, *, run="run"):
    """That the run has gone through with the spy, which tells of nothing."""
    code, said = outcome
    assert code == 0, said[-4000:]
    assert place.rewards(run) == {CLEAN}
    assert place.confinement(run) == ["own rewards run confined"]
    assert "own rewards run confined" in said and "UNCONFINED" not in said


def test_under_launch(place):
    check_blind(place, place.launched())


def test_under_the_quick_start(place):
    text = Path(REPOSITORY, "examples/quickstart.toml").read_text()
    own = place.folder / "quick.toml"
    own.write_text(text.replace('"countdown"', f'"{place.folder}/spy.py:look"'))
    options = ("--config", own, "--num-batches", 1, "--num-ranks", 1)
    output = ("--output-dir", place.folder / "quick")
    words = ("-m", "async_grpo.cli.main", "quickstart", *options, *output)
    check_blind(place, place.done(*words), run="quick")


def test_from_python(place):
    script = place.folder / "script.py"
    script.write_text(
        "import sys, async_grpo\n"
        f"sys.path.insert(0, {str(place.folder)!r})\n"
        "from spy import look\n"
        f"async_grpo.train({str(place.folder / 'run.toml')!r}, reward=look)\n"
    )
    code, said = place.done(script)
    log = (place.folder / "run" / "logs" / "launch.log").read_text()
    check_blind(place, (code, said + log))


@contextlib.contextmanager
def by_hand(place):
    """A cluster whose token lies where Ray has it; and the variables that lead there."""
    token = Path(place.environment["HOME"], ".ray", "auth_token")
    with head.private_cluster() as variables:
        token.parent.mkdir()
        shutil.copy(variables["RAY_AUTH_TOKEN_PATH"], token)
        leads = place.environment | variables | {"RAY_AUTH_TOKEN_PATH": str(token)}
        cluster = PrivateCluster(env=leads)
        try:
            yield cluster.address, leads
        finally:
            cluster.stop()


def test_by_hand(place):
    with by_hand(place) as (address, leads):
        command = ("-m", "async_grpo.cli.main")
        common = ("--config", place.folder / "run.toml", "--ray-address", address)
        with Command(*command, "worker", *common, env=leads) as worker:
            worker.wait_for("registered", timeout_s=RUN_S)
            check_blind(place, place.done(*command, "train", *common, **leads))


def test_on_two_raylets(place):
    with head.private_cluster() as variables:
        script = ("-c", POOLS, f"{place.folder}/spy.py:look")
        code, said = place.done(*script, **variables)
    assert code == 0, said[-4000:]
    told = [line for line in said.splitlines() if line.startswith(("True", "False"))]
    assert told == [f"True {{'own rewards': ''}} {CLEAN}"] * 2


@pytest.fixture(scope="module")
def words_of_container():
    found = container()
    if os.geteuid() != 0:
        pytest.skip("its root must be this user")
    return found


def test_a_container_without_namespaces_refuses_a_users_reward(place, words_of_container):
    code, said = place.launched(before=words_of_container)
    assert code == 1
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert re.search(r"spy\.py:look must grade in bubblewrap's confinement, .*\(bwrap: ", line)
    assert "--unconfined-rewards" in line and "seccomp profile" in line


def test_there_an_option_permits_it_and_each_start_says_so(place, words_of_container):
    """The spy is no blind one: what it finds there refuses the run."""
    before = words_of_container
    code, said = place.launched("--unconfined-rewards", before=before)
    assert code == 1
    assert "spied ['auth_token', 'id', 'processes', 'wrote']" in said
    place.write("mild.py:grade")
    for number in range(2):
        code, said = place.launched("--unconfined-rewards", "--overwrite", before=before)
        assert code == 0, said[-4000:]
        assert len(re.findall(r"WARNING .*own rewards run UNCONFINED.* for bwrap: ", said)) == 1
        assert place.rewards() == {MILD}
        [told] = place.confinement()
        assert told.startswith("own rewards run UNCONFINED"), number
        log = (place.folder / "run" / "logs" / "generation.log").read_text()
        assert len(re.findall(r"WARNING verifier-\w+: own rewards run UNCONFINED", log)) == 1


def test_there_shipped_graders_grade_and_say_so(place, words_of_container):
    output = ("--output-dir", place.folder / "quick")
    words = ("quickstart", "--num-batches", 1, "--num-ranks", 1, *output)
    before = words_of_container
    code, said = place.done("-m", "async_grpo.cli.main", *words, before=before)
    assert code == 0, said[-4000:]
    assert len(re.findall(r"WARNING .*shipped rewards run UNCONFINED.* for bwrap: ", said)) == 1
    [told] = place.confinement("quick")
    assert told.startswith("shipped rewards run UNCONFINED")
