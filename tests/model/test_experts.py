"""Mixtures of experts: replayed choices and the balancing loss, against transformers in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from async_grpo.model.attention import PACKED
from async_grpo.model.collate import collate_pairs
from async_grpo.model.experts import Routing, shares_of
from async_grpo.model.loading import check_packing
from async_grpo.model.policy import PolicyModel, size_of

TOLERANCE = 1e-6  # norms and routers of transformers take float32 inside, whatever the model's type
LAYERS, EXPERTS, CHOSEN, VOCAB = 2, 6, 2, 48
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "qwen3_moe": {"norm_topk_prob": True},
    "mixtral": {},
    "glm4_moe": {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1,
                 "first_k_dense_replace": 0, "n_shared_experts": 1},
}  # fmt: skip


def model_of(family, *, dtype=torch.float64, attention=PACKED):
    config = CONFIG_MAPPING[family](**SIZES | FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # torch groups products up to float32 alone
    return model.to(dtype)


def routers_of(model):
    return [m for m in model.modules() if type(m).__name__.endswith("Router")]


def pairs_of(seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda size: rng.integers(VOCAB, size=size, dtype=np.int32)  # noqa: E731
    shared = draw(5)
    return [(shared, draw(7)), (shared, draw(4)), (draw(3), draw(6))]


def choices_of(pairs, seed=0):
    """[P+L-1, R * K] for each sequence: experts that no router would choose all of."""
    rng = np.random.default_rng(seed)
    lengths = [len(prompt) + len(output) - 1 for prompt, output in pairs]
    return [
        np.stack(
            [
                np.concatenate([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(LAYERS)])
                for _ in range(length)
            ]
        ).astype(np.uint8)
        for length in lengths
    ]


def replay(model, choices):
    """The routers of a plain model take these [T, R * K], by the papers' own formulas."""
    for layer, router in enumerate(routers_of(model)):
        given = torch.from_numpy(choices.astype(np.int64)).view(-1, LAYERS, CHOSEN)[:, layer]

        def forward(hidden, router=router, given=given):
            logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
            if hasattr(router, "routed_scaling_factor"):
                gates = logits.sigmoid().gather(1, given)
                scale = router.routed_scaling_factor
            else:
                gates, scale = logits.softmax(-1).gather(1, given), 1.0
            return logits, gates / gates.sum(-1, keepdim=True) * scale, given

        router.forward = forward


def alone(model, prompt, output):
    ids = torch.from_numpy(np.concatenate([prompt, output])[:-1]).long()
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 :]
    targets = torch.from_numpy(output).long()
    return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(own, other):
    found, expected = gradients(own), gradients(other)
    for name in found.keys() | expected.keys():
        difference = (found.get(name, torch.zeros(())) - expected[name]).norm()
        assert difference <= TOLERANCE * expected[name].norm() + 1e-9, name


@pytest.mark.parametrize("family", FAMILIES)
def test_given_choices_are_taken_forward_and_backward_and_gates_stay_the_routers_own(family):
    twin, policy = model_of(family, attention="eager"), PolicyModel(model_of(family))
    pairs = pairs_of()
    choices = choices_of(pairs)
    packed = collate_pairs(pairs, dtype=torch.float64, experts=choices)
    policy(packed, temperature=1.0, chunk_size=4).logprobs.sin().sum().backward()
    for pair, own in zip(pairs, choices, strict=True):
        replay(twin, own)
        alone(twin, *pair).sin().sum().backward()
    assert_same_gradients(policy.model, twin)
    sums = policy.routing.take()
    num_choices = LAYERS * CHOSEN * packed.input_ids.numel()
    assert sums["replayed_choices"] == num_choices > sums["differing_choices"] > num_choices / 4


def test_the_models_own_choices_change_nothing_and_differ_nowhere():
    policy, pairs = PolicyModel(model_of("qwen3_moe")), pairs_of()
    own = []
    for router in routers_of(policy.model):
        inner = router.forward
        router.forward = lambda hidden, inner=inner: own.append(inner(hidden)) or own[-1]
    plain = policy(collate_pairs(pairs, dtype=torch.float64), temperature=1.0, chunk_size=4)
    row = torch.cat([indices for *_, indices in own[:LAYERS]], dim=1).numpy().astype(np.uint8)
    ends = np.cumsum([len(p) + len(o) - 1 for p, o in pairs])[:-1]
    packed = collate_pairs(pairs, dtype=torch.float64, experts=np.split(row, ends))
    policy.routing.take()
    again = policy(packed, temperature=1.0, chunk_size=4)
    assert torch.equal(plain.logprobs, again.logprobs)
    assert policy.routing.take()["differing_choices"] == 0


def test_a_prompt_that_was_computed_with_other_experts_is_not_shared():
    (prompt, first), (_, second), _ = pairs_of()
    pairs = [(prompt, first), (prompt, second)]
    one, other = choices_of(pairs)
    other[: len(prompt)] = one[: len(prompt)]
    same = collate_pairs(pairs, share_prompts=True, experts=[one, other])
    other = other.copy()
    other[0, 0] = (other[0, 0] + 1) % EXPERTS
    differing = collate_pairs(pairs, share_prompts=True, experts=[one, other])
    assert differing.input_ids.numel() - same.input_ids.numel() == len(prompt)
    assert same.experts.shape[0] == same.input_ids.numel()
    assert (same.num_rerouted, differing.num_rerouted) == (0, 1)


def test_tokens_without_choices_route_by_themselves():
    policy, pairs = PolicyModel(model_of("qwen3_moe")), pairs_of()
    plain = policy(collate_pairs(pairs, dtype=torch.float64), temperature=1.0, chunk_size=4)
    choices = [*choices_of(pairs)[:2], None]
    packed = collate_pairs(pairs, dtype=torch.float64, experts=choices)
    mixed = policy(packed, temperature=1.0, chunk_size=4)
    assert torch.equal(mixed.logprobs[-6:], plain.logprobs[-6:])
    assert not torch.equal(mixed.logprobs[:-6], plain.logprobs[:-6])


def balance(model, pairs, shares, weights, coefficient):
    """α E Σ_l Σ_n w_n Σ_e f_le p_nle in one plain pass a sequence."""
    total = 0.0
    for (prompt, output), own in zip(pairs, weights, strict=True):
        found = []
        handles = [
            router.register_forward_hook(lambda _, __, out, found=found: found.append(out[0]))
            for router in routers_of(model)
        ]
        alone(model, prompt, output)
        for handle in handles:
            handle.remove()
        for layer, logits in enumerate(found):
            logits = logits.double()
            scores = (
                logits.sigmoid() if "Glm" in type(model).__name__ else logits.softmax(-1).clone()
            )
            p = scores / scores.sum(-1, keepdim=True)
            total = total + own * (p[len(prompt) - 1 :] @ shares[layer]).sum()
    return coefficient * EXPERTS * total


@settings(max_examples=10)
@given(cut=st.integers(0, 3), seed=st.integers(0, 3), family=st.sampled_from([*FAMILIES]))
def test_the_balancing_loss_is_a_sum_over_tokens_however_they_are_divided(cut, seed, family):
    twin, policy = model_of(family, attention="eager"), PolicyModel(model_of(family))
    pairs, weights = pairs_of(seed), [0.5, 1.0, 0.25]
    shares = torch.softmax(torch.randn(LAYERS, EXPERTS, dtype=torch.float64), -1)
    policy.routing.coefficient, policy.routing.shares = 0.3, shares
    value = 0.0
    for part in (slice(0, cut), slice(cut, 3)):
        if pairs[part]:
            packed = collate_pairs(pairs[part], dtype=torch.float64)
            own = torch.repeat_interleave(
                torch.tensor(weights[part], dtype=torch.float64),
                torch.tensor([len(output) for _, output in pairs[part]]),
            )
            packed.weights.copy_(own)
            scored = policy(packed, temperature=1.0, chunk_size=4)
            (scored.logprobs * own).sum().backward()
            value += policy.routing.take()["balance_loss_sum"].item()
    expected = balance(twin, pairs, shares, weights, 0.3)
    (expected + sum(w * alone(twin, *p).sum() for w, p in zip(weights, pairs))).backward()  # noqa: B905
    assert value == pytest.approx(expected.item(), rel=TOLERANCE)
    assert_same_gradients(policy.model, twin)


def test_a_filler_adds_neither_choices_nor_balance():
    policy = PolicyModel(model_of("qwen3_moe"))
    policy.routing.coefficient = 1.0
    scored = policy(collate_pairs([], dtype=torch.float64), temperature=1.0, chunk_size=4)
    (scored.logprobs.sum() * 0).backward()
    assert not policy.routing.take_choices().any()
    assert all(value == 0 for value in policy.routing.take().values())
    assert all(not grad.any() for grad in gradients(policy.model).values())


def test_recomputed_layers_count_once_and_have_the_same_gradient():
    pairs = pairs_of()
    choices = choices_of(pairs)
    packed = collate_pairs(pairs, dtype=torch.float64, experts=choices)
    plain, saving = (PolicyModel(model_of("qwen3_moe")) for _ in range(2))
    saving.model.gradient_checkpointing_enable({"use_reentrant": False})
    saving.train()
    for policy in (plain, saving):
        policy.routing.coefficient = 0.3
        policy(packed, temperature=1.0, chunk_size=4).logprobs.sum().backward()
    assert_same_gradients(saving.model, plain.model)
    assert torch.equal(saving.routing.take_choices(), plain.routing.take_choices())


def test_shares_are_of_all_choices_and_equal_without_any():
    shares = shares_of(torch.tensor([[3.0, 1.0], [0.0, 0.0]]))
    assert shares.tolist() == [[0.75, 0.25], [0.5, 0.5]]


def test_flops_are_of_the_chosen_experts():
    model = model_of("qwen3_moe", dtype=torch.float32)
    body = sum(p.numel() for p in model.model.layers.parameters()) + model.model.norm.weight.numel()
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    head = model.lm_head.weight.numel()
    size = size_of(model)
    assert size.num_parameters == body - experts + experts * CHOSEN / EXPERTS + head


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_admits_them(family):
    config = model_of(family, dtype=torch.float32).config
    check_packing(config, family)
    if hasattr(config, "n_shared_experts"):
        config.n_shared_experts = 0  # their matrices stay, and are empty
        check_packing(config, family)


def test_a_dense_model_has_no_routing():
    assert Routing.of(torch.nn.Linear(2, 2)) is None
