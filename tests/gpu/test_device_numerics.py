"""The numbers of the trainer on an NVIDIA device against float64 on the host.

Never run on a device so far. Needs torch 2.11 or later and transformers; no Ray, no vLLM:
`pytest -m gpu tests/gpu/test_device_numerics.py`. A rounding of bfloat16 is 0.4 %.
"""

import pytest
import torch

from async_grpo.model.attention import packed_attention
from async_grpo.model.lm_head import Head
from async_grpo.model.logprobs import token_logprobs
from async_grpo.training.fsdp import iter_full_tensors, shard
from async_grpo.training.ranks import Ranks
from benchmarks.gpu import attention, clock, numerics, trainer
from benchmarks.gpu.isolation import NotHereError
from benchmarks.gpu.shapes import TOY

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROUNDING = 0.01  # of bfloat16 operands, by norm
DEVICE = clock.find_device()
SHAPE = numerics.SHAPE


@pytest.fixture
def ranks():
    ranks = Ranks.start(timeout_s=120, device_index=0)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("way", numerics.WAYS, ids=lambda way: way.name)
def test_the_gradient_is_float64s_but_for_rounding(way, ranks):
    assert numerics.gradient_distance(way, SHAPE, ranks) < way.goal


@pytest.mark.parametrize("name", sorted(attention.WAYS.keys() - {"padded"}))
def test_every_way_of_attention_computes_the_same(name):
    try:
        found = numerics.attention_distance(name, SHAPE)
    except NotHereError as reason:
        pytest.skip(str(reason))
    assert found < ROUNDING


def bf16_row(num_tokens):
    torch.manual_seed(2)
    return attention.random_row(SHAPE, num_tokens, device=DEVICE, dtype=torch.bfloat16)


def attend(row, segments, **options):
    where = attention.boundaries(segments, DEVICE)
    lengths = {"cu_seq_lens_q": where, "max_length_q": max(segments)}
    return packed_attention(torch.nn.Identity(), *row, None, **lengths, **options)[0]


@pytest.mark.parametrize("window", [1, 7, 64])
def test_a_sliding_window_is_float64s_but_for_rounding(window):
    segments = [150, 1, 40]
    row = bf16_row(sum(segments))
    exact = [tensor.detach().cpu().double() for tensor in row]
    host = attention.boundaries(segments, torch.device("cpu"))
    expected, _ = packed_attention(
        *(torch.nn.Identity(), *exact, None),
        cu_seq_lens_q=host,
        max_length_q=150,
        sliding_window=window,
    )
    found = numerics.flat([attend(row, segments, sliding_window=window)])
    assert numerics.distance(found, expected.flatten()) < ROUNDING


@pytest.mark.parametrize("is_trie", [False, True])
def test_a_shared_token_attends_as_in_whole_sequences(is_trie):
    """Three sequences: the second goes on behind 100 tokens of the first, the third behind 130."""
    segments = [150, 140, 135]
    row = bf16_row(150 + 40 + 5)
    places = [*range(150), *range(100), *range(150, 190), *range(130), *range(190, 195)]
    repeat = torch.tensor(places, device=DEVICE)
    first = torch.tensor([*range(150), *range(250, 290), *range(420, 425)], device=DEVICE)
    whole = [tensor.index_select(2, repeat) for tensor in row]
    expected = attend(whole, segments)[:, first]
    got = attend(row, segments, repeat_index=repeat, first_index=first, is_trie=is_trie)
    assert numerics.distance(numerics.flat([got]), expected.cpu().double().flatten()) < ROUNDING


def test_a_sequence_does_not_depend_on_its_neighbours_by_a_single_bit():
    segments = [70, 33, 90]
    row = bf16_row(sum(segments))
    before = attend(row, segments)
    with torch.no_grad():
        for tensor in row:
            tensor[:, :, :70].neg_()
            tensor[:, :, 103:].mul_(3.0)
    after = attend(row, segments)
    assert torch.equal(before[:, 70:103], after[:, 70:103])
    assert not torch.equal(before[:, :70], after[:, :70])


def hidden_head_ids(num_tokens, vocabulary):
    torch.manual_seed(3)
    hidden = torch.randn(num_tokens, 256, device=DEVICE, dtype=torch.bfloat16)
    head = torch.randn(vocabulary, 256, device=DEVICE, dtype=torch.bfloat16) * 0.1
    return hidden.requires_grad_(), head.requires_grad_(), torch.arange(num_tokens, device=DEVICE)


@pytest.mark.parametrize("compiled", [False, True])
def test_log_probabilities_and_entropy_have_float32s_accuracy(compiled):
    hidden, head, ids = hidden_head_ids(300, 5000)
    scored = token_logprobs(
        hidden, Head(head), ids, temperature=0.7, chunk_size=128, compile=compiled
    )
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in (hidden, head)]
    every = (exact[0] @ exact[1].T / 0.7).log_softmax(-1)
    logprobs = every.gather(1, ids.cpu()[:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    assert (scored.logprobs.cpu() - logprobs).abs().max() < 1e-4
    assert (scored.entropy.cpu() - entropy).abs().max() < 1e-4
    (scored.logprobs.sum() + scored.entropy.sum()).backward()
    (logprobs.sum() + entropy.sum()).backward()
    for found, expected in zip((hidden, head), exact, strict=True):
        got = numerics.flat([found.grad])
        assert numerics.distance(got, expected.grad.flatten()) < ROUNDING


def test_no_tensor_of_all_logits_lives_forward_or_backward():
    num_tokens, vocabulary, chunk = 8192, 32_000, 512
    hidden, head, ids = hidden_head_ids(num_tokens, vocabulary)

    def work():
        scored = token_logprobs(hidden, Head(head), ids, temperature=1.0, chunk_size=chunk)
        scored.logprobs.sum().backward()

    gradients = hidden.nbytes + 3 * head.nbytes  # the head's are summed in float32, then rounded
    few_chunks = 6 * chunk * vocabulary * 4
    assert few_chunks < num_tokens * vocabulary * 4 / 2
    assert clock.peak_bytes(work, device=DEVICE) < gradients + few_chunks


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("bf16_weights", [False, True])
def test_a_gradient_step_of_every_kind_runs(checkpointing, bf16_weights):
    variant = trainer.Variant(TOY, 512, checkpointing=checkpointing, bf16_weights=bf16_weights)
    figures = {figure.name: figure.value for figure in trainer.measure(variant, repeats=3)}
    weights = figures[f"{variant.name}, weights"]
    moments = figures[f"{variant.name}, optimizer"]
    assert moments == pytest.approx(2 * weights, rel=0.01)  # AdamW's two, and its counts
    assert figures[f"{variant.name}, gradients"] == pytest.approx(weights)


def test_whole_weights_come_back_as_they_went_in(ranks):
    policy = numerics.peaked_policy(TOY).to(DEVICE)
    before = {name: value.detach().cpu().clone() for name, value in policy.model.named_parameters()}
    policy = shard(policy, ranks.mesh, mixed_precision="bf16")
    after = {name: value.clone() for name, value in iter_full_tensors(policy)}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
