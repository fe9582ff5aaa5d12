"""Real FSDP2 ranks over gloo against one float64 pass.

Held fixed: samples, weights, options. Free: the number of ranks, who has which sample in which
round, and whether each minibatch or only a closing one reduces gradients.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from adapted_models import ALL_KINDS, adapted, adapted_twin, scale_of, tiny
from effort import max_ranks
from formulas import objective
from fsdp_scenarios import (
    CHUNK_SIZE,
    CONFIG,
    NUM_PARTITIONS,
    NUM_TOKENS,
    VOCAB_SIZE,
    adapted_mixture,
    equip,
    make_pairs,
    make_samples,
    one_step,
    routed_samples,
    world,
)
from loading_scenarios import write_models
from oracle import (
    oracle_gradient,
    oracle_logprobs,
    oracle_outputs,
    relative_difference,
    tiny_config,
    tiny_model,
)
from peft import PeftModel
from ranks import run_ranks
from safetensors.torch import load_file
from test_experts import model_of
from test_held_out import oracle_loss

from async_grpo.devices.bill import Training, trainer_bill
from async_grpo.model.collate import collate
from async_grpo.model.loading import load_policy
from async_grpo.model.policy import PolicyModel, model_shape
from async_grpo.training.fsdp import compute_dtype
from async_grpo.training.schedule import Clocks
from async_grpo.training.step import NO_SAMPLES, NON_FINITE

WORLDS = [num_ranks for num_ranks in (1, 2, 4) if num_ranks <= max_ranks(2)]
F32, F64 = 1e-5, 1e-12
MIXED = 1e-6  # transformers' routers and norms compute in float32 inside
HYBRID = [
    "hybrid tied", "hybrid empty rank", "hybrid checkpointing", "hybrid untied f64",
    "hybrid deferred f64",
]  # fmt: skip
OFFLOADED = [
    "offloaded f64", "offloaded hybrid", "offloaded hybrid deferred", "host optimizer",
    "host optimizer hybrid f64",
]  # fmt: skip

WHOLE = [
    "whole", "whole empty rank", "whole untied f64", "whole offloaded", "whole deferred f64",
    "divided", "divided empty rank", "divided checkpointing", "divided untied f64",
    "divided deferred f64", "divided host optimizer f64",
]  # fmt: skip


@pytest.fixture(scope="module", params=WORLDS, ids=lambda num_ranks: f"{num_ranks}_ranks")
def ran(request, tmp_path_factory):
    """What every rank of each scenario says, and where the export is."""
    folder = tmp_path_factory.mktemp("ranks")
    source, target, models = folder / "source", folder / "target", folder / "models"
    tiny_model(tied=True).save_pretrained(source)
    tiny_model(tied=True).bfloat16().save_pretrained(f"{source}-bf16")
    write_models(models)
    paths = {"source": str(source), "target": str(target), "models": str(models)}
    ranks = run_ranks(world, num_ranks=request.param, folder=folder, **paths)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]} | {"target": target}


@functools.cache
def oracle_of(*, tied):
    model = tiny_model(tied=tied)
    return oracle_gradient(model, make_samples(model), CONFIG)


def norm_of(gradient):
    return torch.stack([value.norm() for value in gradient.values()]).norm().item()


def assert_equals_oracle(ranks, *, tied, tolerance):
    model = tiny_model(tied=tied)
    expected = oracle_of(tied=tied)
    for rank in ranks:
        result = rank["result"]
        assert relative_difference(rank["gradient"], expected) < tolerance
        assert result == ranks[0]["result"]
        assert (result.skipped, result.clocks) == ("", Clocks(1, 6))
        assert result.grad_norm == pytest.approx(norm_of(expected), rel=tolerance)
        assert result.metrics["trained_samples"] == 6
        for name, value in rank["parameters"].items():
            assert torch.equal(value, ranks[0]["parameters"][name])
    moved = ranks[0]["parameters"]
    assert any(not torch.equal(moved[name], value) for name, value in model.named_parameters())


@pytest.mark.integration
@pytest.mark.parametrize("sync", ["", "deferred "])
@pytest.mark.parametrize(
    "scenario", ["tied", "untied", "empty rank", "checkpointing", "tied f64", "untied f64"]
)
def test_ranks_give_the_oracle_s_gradient_and_stay_equal(scenario, sync, ran):
    tolerance = F64 if "f64" in scenario else F32
    assert_equals_oracle(ran[sync + scenario], tied="untied" not in scenario, tolerance=tolerance)


@pytest.mark.integration
def test_a_gradient_is_the_same_to_the_bit_whichever_layers_recompute_their_activations(ran):
    for others in zip(ran["tied"], ran["checkpointing"], ran["one layer in two"], strict=True):
        every = [each["gradient"] for each in others]
        for found in every[1:]:
            assert all(torch.equal(found[name], every[0][name]) for name in every[0])


@pytest.mark.integration
@pytest.mark.parametrize(
    "scenario", ["kept", "kept untied f64", "kept checkpointing", "deferred kept"]
)
def test_layers_that_stay_gathered_give_the_oracle_s_gradient(scenario, ran):
    tolerance = F64 if "f64" in scenario else F32
    assert_equals_oracle(ran[scenario], tied="untied" not in scenario, tolerance=tolerance)


@pytest.mark.integration
@pytest.mark.parametrize("scenario", HYBRID + OFFLOADED + WHOLE)
def test_groups_of_shards_and_memory_of_hosts_give_the_oracle_s_gradient(scenario, ran):
    """Sums over both dimensions of the mesh: a mean over replicas would be half of it."""
    tolerance = F64 if "f64" in scenario else F32
    assert_equals_oracle(ran[scenario], tied="untied" not in scenario, tolerance=tolerance)


@pytest.mark.integration
@pytest.mark.parametrize("scenario", ["adapted mixture", "adapted mixture checkpointing"])
def test_ranks_train_adapters_of_experts_as_one_process_does(scenario, ran):
    expected = adapted_mixture(sharded=False)
    for rank in ran[scenario]:
        for what, found in rank.items():
            assert relative_difference(found, expected[what]) < MIXED


@pytest.mark.integration
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_ranks_give_the_oracle_s_gradient_of_an_adapter(kind, ran):
    policy = adapted(tiny_model(tied=True, dtype=torch.float64), **ALL_KINDS[kind])
    twin, leaves = adapted_twin(tiny, policy, scale=scale_of(ALL_KINDS[kind]))
    samples = make_samples(tiny_model(tied=True))
    objective(oracle_outputs(twin, samples, CONFIG), CONFIG).backward()
    expected = {name: leaf.grad for name, leaf in leaves.items()}
    ranks = ran[f"adapter {kind}"]
    for rank in ranks:
        assert relative_difference(rank["gradient"], expected) < F64
        assert rank["parameters"].keys() == dict(tiny_model(tied=True).named_parameters()).keys()
        for name, value in rank["parameters"].items():
            assert torch.equal(value, ranks[0]["parameters"][name])


@pytest.mark.integration
@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("tied", {}),
        ("hybrid tied", {"hybrid": True}),
        ("host optimizer", {"offload": "optimizer"}),
        ("host optimizer hybrid f64", {"offload": "optimizer", "hybrid": True, "size": 2}),
        ("whole", {"is_whole": True}),
        ("divided", {"is_whole": True, "divides": True}),
        (
            "divided host optimizer f64",
            {"is_whole": True, "divides": True, "offload": "optimizer", "size": 2},
        ),
    ],
)
def test_a_rank_holds_what_its_bill_says(scenario, options, ran):
    num_ranks = len(ran[scenario])
    groups = 2 if options.get("hybrid") and num_ranks > 1 else 1
    shard_ranks = 1 if options.get("is_whole") else num_ranks // groups
    training = Training(
        shard_ranks=shard_ranks,
        moment_ranks=num_ranks if options.get("divides") else shard_ranks,
        offload=options.get("offload", "none"),
    )
    bill = trainer_bill(model_shape(PolicyModel(tiny_model(tied=True))), training)
    names = ("master weights", "gradients", "AdamW's moments")
    billed = sum(line.num_bytes for line in bill.lines if line.name in names and not line.on_host)
    for rank in ran[scenario]:
        assert rank["held"] == pytest.approx(billed * options.get("size", 1), rel=0.15)


@pytest.mark.integration
def test_an_optimizer_in_the_host_s_memory_moves_parameters_to_the_same_bits(ran):
    for plain, on_host in zip(ran["tied"], ran["host optimizer"], strict=True):
        for name, value in plain["parameters"].items():
            assert torch.equal(on_host["parameters"][name], value)


@pytest.mark.integration
def test_an_optimizer_divided_among_ranks_moves_parameters_to_the_same_bits(ran):
    for plain, divided in zip(ran["whole"], ran["divided"], strict=True):
        for name, value in plain["parameters"].items():
            assert torch.equal(divided["parameters"][name], value)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("strategy", "whole"),
    [
        *(("FULL_SHARD", False), ("SHARD_GRAD_OP", True), ("HYBRID_SHARD", False)),
        *(("NO_SHARD", False), ("ZERO1", False)),  # a copy of what lies on the rank
    ],
)
def test_a_learner_keeps_layers_gathered_when_the_run_asks_for_it(strategy, whole, ran):
    for rank in ran["whole layers"]:
        assert rank[strategy] == [whole] * len(rank[strategy]) != []


@pytest.mark.integration
@pytest.mark.parametrize("scenario", ["partitions", "deferred partitions", "divided partitions"])
def test_gradient_is_the_same_for_any_partition_into_ranks_and_rounds(scenario, ran):
    expected = oracle_of(tied=True)
    for rank in ran[scenario]:
        assert len(rank) == NUM_PARTITIONS
        for gradient, result in rank:
            assert relative_difference(gradient, expected) < F64
            assert result.grad_norm == pytest.approx(norm_of(expected), rel=F64)


@pytest.mark.integration
@pytest.mark.parametrize("scenario", ["tied", "untied", "empty rank", "checkpointing", "bf16"])
def test_deferral_gives_the_default_s_gradient(scenario, ran):
    """In bf16 too: each minibatch's gradient is rounded once, the sums are float32."""
    for default, deferred in zip(ran[scenario], ran[f"deferred {scenario}"], strict=True):
        assert relative_difference(deferred["gradient"], default["gradient"]) < F32
        assert deferred["result"].metrics == pytest.approx(default["result"].metrics, rel=1e-12)
        assert deferred["result"].num_minibatches == default["result"].num_minibatches
        assert (deferred["reduced"], default["reduced"]) == (False, True)


@pytest.mark.integration
def test_a_learner_defers_when_the_run_asks_for_it(ran):
    for reduced, result in ran["learner"]:
        assert not reduced
        assert result.grad_norm == pytest.approx(norm_of(oracle_of(tied=True)), rel=F32)


@pytest.mark.integration
def test_a_learner_trains_uncompiled_where_there_is_no_compiler(ran):
    for _, result in ran.get("learner without a compiler", ()):  # of one rank
        assert result.grad_norm == pytest.approx(norm_of(oracle_of(tied=True)), rel=F32)


@pytest.mark.integration
def test_a_learner_divides_its_optimizer_when_the_run_asks_for_it(ran):
    for reduced, result in ran["learner that divides"]:
        assert reduced
        assert result.grad_norm == pytest.approx(norm_of(oracle_of(tied=True)), rel=F32)


@pytest.mark.integration
def test_metrics_of_ranks_are_those_of_one_process(ran):
    step, policy, _ = equip(PolicyModel(tiny_model(tied=True)))
    samples = make_samples(policy.model)
    step.accumulate(collate(samples, aggregation="sample-mean"))
    expected = step.finish(len(samples)).metrics
    assert expected["mismatch_max"] > 1
    assert ran["tied"][0]["result"].metrics == pytest.approx(expected, rel=1e-4)


@pytest.mark.integration
def test_bf16_compute_keeps_float32_weights_and_stays_near(ran):
    ranks = ran["bf16"]
    assert_equals_oracle(ranks, tied=True, tolerance=0.1)
    assert all(value.dtype == torch.float32 for value in ranks[0]["parameters"].values())
    assert all(value.dtype == torch.float32 for value in ranks[0]["gradient"].values())


@pytest.mark.integration
def test_in_bf16_head_terms_see_a_teacher_s_float32_as_it_was_sent(ran):
    for rank in ran["taught in bf16"]:
        assert set(rank) == {"teacher.logprobs", "teacher.tail"}
        for sent, seen in rank.values():
            assert seen.dtype == torch.float32
            assert torch.equal(seen, sent)


@pytest.mark.integration
@pytest.mark.parametrize("scenario", ["compiled", "compiled checkpointing"])
def test_what_is_traced_for_a_compiler_gives_the_oracle_s_gradient(scenario, ran):
    if scenario in ran:  # of one rank: tracing takes seconds
        assert_equals_oracle(ran[scenario], tied=True, tolerance=F32)
        assert ran["compiled graphs"][0] > 3


@pytest.mark.integration
@pytest.mark.slow  # for its compiler, half a minute
@pytest.mark.timeout(900)
def test_compiled_layers_give_the_same_gradient(tmp_path):
    ranks = run_ranks(one_step, num_ranks=1, folder=tmp_path, compile=True)
    assert_equals_oracle(ranks, tied=True, tolerance=F32)


@pytest.mark.integration
@pytest.mark.parametrize("scenario", ["skipped", "deferred skipped", "divided skipped"])
def test_all_ranks_skip_together_when_one_is_not_finite_or_all_groups_were_dropped(scenario, ran):
    for number, rank in enumerate(ran[scenario]):
        first, second, third = rank["results"]
        assert [step.skipped for step in rank["results"]] == [NON_FINITE, NO_SAMPLES, ""]
        assert rank["unmoved"]
        assert first.learning_rate == second.learning_rate == third.learning_rate
        assert first.clocks == second.clocks == Clocks(0, 0)
        is_last = number == len(ran[scenario]) - 1
        assert first.suspects == ((1,) if is_last else ())


@pytest.mark.integration
@pytest.mark.parametrize("scenario", ["skipped", "deferred skipped", "divided skipped"])
def test_nothing_of_a_skipped_step_is_left(scenario, ran):
    expected = oracle_of(tied=True)
    for rank in ran[scenario]:
        (gradient,) = rank["gradients"]
        assert relative_difference(gradient, expected) < F32


@pytest.mark.integration
@pytest.mark.parametrize("scenario", ["zero", "deferred zero"])
def test_all_advantages_zero_is_a_step(scenario, ran):
    for rank in ran[scenario]:
        assert all(value.count_nonzero() == 0 for value in rank["gradient"].values())
        assert rank["result"].skipped == ""
        assert rank["result"].grad_norm == 0.0
        assert rank["result"].clocks == Clocks(2, 12)
        assert rank["moved"]  # by the moments of the step before


@pytest.mark.integration
@pytest.mark.parametrize("tied", [True, False])
def test_no_tensor_of_tokens_by_vocabulary_lives_on_a_rank(tied, ran):
    """The largest is what FSDP gathers of the root: embedding, head and last norm."""
    config = tiny_config(tied=tied)
    root = VOCAB_SIZE * config.hidden_size * (1 if tied else 2) + config.hidden_size
    for largest in ran["largest"]:
        assert CHUNK_SIZE * VOCAB_SIZE < largest[tied] <= root < NUM_TOKENS * VOCAB_SIZE / 4


@pytest.mark.integration
def test_rank_0_receives_whole_parameters_and_exports_them(ran):
    received, *others = ran["gathered"]
    model = tiny_model(tied=True)
    assert all(nothing == [] for nothing in others)
    assert [name for name, _ in received] == [name for name, _ in model.named_parameters()]
    exported = load_policy(str(ran["target"]), attention="packed", dtype=torch.float32).model
    for (_, got), stored, want in zip(
        received, exported.parameters(), model.parameters(), strict=True
    ):
        assert torch.equal(got, want)
        assert torch.equal(stored, want)


@pytest.mark.integration
@torch.no_grad()
def test_an_export_is_cast_before_it_is_gathered_to_the_same_bits(ran):
    assert ran["in bf16"] == [{torch.bfloat16}] * len(ran["in bf16"])
    stored = load_file(f"{ran['target']}-bf16/model.safetensors")
    wanted = dict(tiny_model(tied=True).named_parameters())
    assert stored.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert torch.equal(stored[name], parameter.to(torch.bfloat16)), name


@pytest.mark.integration
@torch.no_grad()
def test_stock_peft_loads_an_adapter_s_export_with_the_trainer_s_logprobs(ran):
    base = tiny_model(tied=True)
    loaded = PeftModel.from_pretrained(base, f"{ran['target']}-adapter")
    samples = make_samples(tiny_model(tied=True))
    masks = torch.from_numpy(np.concatenate([s.episode.rows[0].loss_mask for s in samples]))
    theirs = torch.cat([oracle_logprobs(loaded, each, temperature=1.0) for each in samples])[masks]
    for mine in ran["adapter"]:
        assert (mine - theirs).abs().max() <= 5e-6
    as_it_was = torch.cat(
        [oracle_logprobs(tiny_model(tied=True), each, temperature=1.0) for each in samples]
    )
    assert (as_it_was[masks] - theirs).abs().max() > 1e-3  # the adapter tells
    merged = load_policy(f"{ran['target']}-merged", attention="packed", dtype=torch.float32).model
    own = dict(loaded.merge_and_unload().named_parameters())
    for name, parameter in merged.named_parameters():
        assert (parameter - own[name]).abs().max() <= 1e-6, name


@pytest.mark.integration
def test_every_rank_holds_slices_of_the_very_bits_that_from_pretrained_reads(ran):
    for found in ran["loaded"]:
        assert len(found) == 6
        assert not any(found.values()), found


@functools.cache
def mixture_alone():
    """The same two steps by one process, whose gradient `test_experts.py` proves."""
    config = CONFIG.but(balance_coefficient=0.3, kl_coefficient=0.0)
    step, _, gradients = equip(PolicyModel(model_of("qwen3_moe")), config)
    samples = routed_samples()
    for _ in range(2):
        step.accumulate(collate(samples, aggregation="sample-mean", dtype=torch.float64))
        result = step.finish(len(samples))
    return gradients, result, step.expert_shares


@pytest.mark.integration
@pytest.mark.parametrize("scenario", ["mixture", "mixture checkpointing"])
def test_a_mixture_s_gradient_balance_and_counts_are_those_of_one_process(scenario, ran):
    expected, result, shares = mixture_alone()
    for rank in ran[scenario]:
        for found, own in zip(rank["gradients"], expected, strict=True):
            assert relative_difference(found, own) < MIXED
        assert rank["shares"] == shares
        metrics = rank["results"][-1].metrics
        for name in ("balance_loss_sum", "router_entropy_sum", "expert_load_max", "dead_experts"):
            assert metrics[name] == pytest.approx(result.metrics[name], rel=MIXED)
        for name in ("differing_choices", "replayed_choices"):
            assert metrics[name] == result.metrics[name] > 0


@pytest.mark.integration
def test_the_gain_of_replay_is_measured_on_the_first_minibatch_of_a_tenth_step(ran):
    policy = PolicyModel(model_of("qwen3_moe"))
    packed = collate(routed_samples(), aggregation="sample-mean", dtype=torch.float64)

    def kl(row):
        with torch.no_grad():
            scored = policy(row, temperature=CONFIG.sampling.temperature, chunk_size=CHUNK_SIZE)
        difference = scored.logprobs - packed.behaviour_logprobs
        return float((difference.exp() - 1 - difference).sum())

    gain = kl(replace(packed, experts=None)) - kl(packed)
    for rank in ran["mixture"]:
        first, second = (result.metrics for result in rank["results"])
        assert first["replay_gain_sum"] == pytest.approx(gain, rel=1e-5)
        assert first["gain_tokens"] == packed.target_ids.numel()
        assert "replay_gain_sum" not in second


def test_precision_follows_the_option_and_the_device():
    cpu = torch.device("cpu")
    types = [compute_dtype(choice, cpu) for choice in ("auto", "no", "bf16")]
    assert types == [torch.float32, torch.float32, torch.bfloat16]


def test_the_held_out_loss_is_exact_over_ranks_and_sees_the_weights_of_its_moment(ran):
    model = tiny_model(tied=True)
    for moment in ("before", "after"):
        loss_sum, num_tokens = oracle_loss(make_pairs(7), model)
        for rank in ran["held out"]:
            assert (rank[moment].num_tokens, rank[moment].num_pairs) == (num_tokens, 7)
            assert rank[moment].loss_sum == pytest.approx(loss_sum, rel=F32)
        model.load_state_dict(ran["held out"][0]["weights"], strict=False)
    assert abs(rank["after"].mean - rank["before"].mean) > 1e-3
