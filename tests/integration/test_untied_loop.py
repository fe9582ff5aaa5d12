"""A real DAPO run one batch ahead of itself, whose model has a head of its own."""

from collections import Counter

import pytest
from effort import updates
from loops import READY_S, Setup, check_rows, engine_differences, wait_until_registered
from tiny_models import make_model

# In `make test`, test_lifecycle syncs an untied model, test_train_config spells out presets.
pytestmark = [pytest.mark.integration, pytest.mark.slow]

TOLERANCE = 5e-6
UPDATES, QUESTIONS, GROUP = updates(10), 4, 4
OPTIONS = {
    "preset": "dapo",
    "num_training_batches": UPDATES + 2,
    "max_staleness": 1,
    "learning_rate": 2e-3,
    "min_samples_per_checkpoint": 1,  # an export of every version
    "max_tokens_per_gpu": 512,
}


@pytest.fixture(scope="module")
def setup(ray_cluster, long_questions, tmp_path_factory):
    """One generation worker; a reward that many groups share."""
    folder = tmp_path_factory.mktemp("untied")
    model = make_model(folder / "model", tied=False)
    setup = Setup(folder, ray_cluster, model, long_questions, namespace="untied",
                  reward="begins_with_a_digit")  # fmt: skip
    with setup.workers("generation", num_workers=1) as generation:
        wait_until_registered(generation, 1)
        yield setup


@pytest.fixture(scope="module")
def printed(setup):
    """What the run put out."""
    with setup.train("dapo", **OPTIONS) as command:
        assert command.wait(timeout_s=READY_S + UPDATES) == 0, command.err[-4000:]
        return command.out


def test_a_preset_is_spelt_out(printed):
    for words in (
        "--preset dapo stands for --advantage grpo --aggregation token-mean",
        "a mean over all tokens of the step",
        "clipped to [0.8, 1.28]",
        "the last 2 of 12 tokens cost up to 1 of the reward",
        "a question without variance is replaced up to 8 times",
    ):
        assert printed.count(words) == 1


def test_replaced_groups_are_counted_and_dumped_beside_those_that_were_trained(setup, printed):
    rows, samples = setup.rows("dapo"), setup.samples("dapo")
    check_rows(rows, questions=QUESTIONS, group=GROUP, max_staleness=1, unmeasured={"kl"})
    told = Counter(sample["fate"] for sample in samples)
    for fate in ("trained", "zero_contribution", "replaced"):
        assert sum(row[f"fate_{fate}"] for row in rows) == told[fate]
    assert told["replaced"] >= GROUP  # how many is the sampler's luck
    kept = [(s["ordinal"], s["index"]) for s in samples if s["fate"] != "replaced"]
    slots = QUESTIONS * (UPDATES + 2)
    assert sorted(kept) == [(o, i) for o in range(slots) for i in range(GROUP)]
    for sample in samples:
        assert sample["fate"] != "replaced" or sample["advantage"] == 0


def test_engine_and_trainer_agree_after_every_update_of_an_untied_model(setup, printed):
    """By the canary of the rows, and by all tokens against the weights that they name.

    Prefix caching is on, and the prompts are long enough for it.
    """
    rows = setup.rows("dapo")
    assert max(row["canary_max"] for row in rows) <= TOLERANCE
    assert len({row["sync_batches"] for row in rows}) > UPDATES / 2
    differences = engine_differences(setup.samples("dapo"), setup.versions("dapo"))
    assert set(differences) >= set(range(UPDATES + 1))
    assert max(map(max, differences.values())) <= TOLERANCE
