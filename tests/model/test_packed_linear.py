"""A packed weight is what the folder says, engines serve the same, and gradients are exact."""

import pytest
import torch
from adapted_models import CPU
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from oracle import tiny_model

from async_grpo.cli.main import main
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.training_options import AdapterOptions
from async_grpo.devices.bill import trainer_bill
from async_grpo.model.adapters import Adapter
from async_grpo.model.loading import load_sharded
from async_grpo.model.packed_linear import packed, packed_layers, rounded, unpacked
from async_grpo.model.policy import model_shape, size_of, trained_parameters
from async_grpo.model.served import changed, samples, served
from async_grpo.util.errors import ConfigError, UnfitModel

pytest.importorskip("bitsandbytes", reason="requirements/dev.txt has it")
KINDS = ("nf4", "int8")
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{kind: folder of the tiny model, rounded by the command}; "none": as it is."""
    base = tmp_path_factory.mktemp("folders")
    tiny_model(tied=True).float().save_pretrained(base / "none")
    for kind in KINDS:
        command = ["quantize", str(base / "none"), str(base / kind), "--kind", kind]
        found = CliRunner().invoke(main, command, catch_exceptions=False)
        assert found.exit_code == 0 and f"rounded to {kind}" in found.output, found.output
    return base


def loaded(folder, packs, *, dtype=torch.float32, **options):
    """The policy of a folder with an adapter whose B is random."""
    options = AdapterOptions(lora_rank=2, base_quantization=packs, **options)
    adapter = Adapter.of(options, model=str(folder), seed=1)
    policy = load_sharded(
        str(folder), attention="packed", dtype=dtype, device=CPU, shard=None, adapter=adapter
    )
    torch.manual_seed(3)
    for name, each in trained_parameters(policy):
        if "lora_B" in name:
            each.data.normal_(std=0.1)
    return policy


@given(
    rows=st.integers(1, 7), columns=st.integers(1, 150), seed=st.integers(0, 99),
    kind=st.sampled_from(KINDS), dtype=st.sampled_from(TYPES),
)  # fmt: skip
def test_a_rounded_weight_stays_what_it_is(rows, columns, seed, kind, dtype):
    torch.manual_seed(seed)
    weight = (torch.randn(rows, columns) * 10 ** torch.randn(rows, 1)).to(dtype)
    weight[0] = 0
    once = rounded(weight, kind)
    codes, scales = packed(once, kind)
    assert torch.equal(unpacked(codes, scales, kind, like=once), once)
    bits = 4 if kind == "nf4" else 8
    assert codes.nbytes == -(-weight.numel() * bits // 8) and codes.dtype == torch.uint8
    # Half of the widest gap between levels, of the largest number of a block, rounded twice.
    largest = weight.float().abs().max()
    gap = 0.31 if kind == "nf4" else 1 / 127
    assert (once.float() - weight.float()).abs().max() <= (gap / 2 + 0.01) * largest + 1e-30


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_the_same_weights_in_whole(kind, folders):
    whole = loaded(folders / kind, "none").double()
    short = loaded(folders / kind, kind)
    for _, parameter in (*short.named_parameters(),):
        parameter.data = parameter.data.double()
    assert len([*packed_layers(short.model)]) == 14
    ids = torch.arange(1, 12)[None]
    for policy in (whole, short):
        policy.model.set_attn_implementation("eager")
        policy.model(input_ids=ids).logits.log_softmax(-1)[0, :, 3].sum().backward()
    own = dict(trained_parameters(short))
    for name, parameter in trained_parameters(whole):
        off_by = (parameter.grad - own[name].grad).abs().max()
        assert off_by <= 1e-12 * max(1, parameter.grad.abs().max()), name


@pytest.mark.parametrize("kind", KINDS)
def test_what_leaves_a_packed_policy_is_that_of_the_folder(kind, folders):
    whole, short = (loaded(folders / kind, packs) for packs in ("none", kind))
    for leaves in (served, changed):
        wanted = {name: each.make() for name, each in leaves(whole).items()}
        found = {name: each.make() for name, each in leaves(short).items()}
        assert wanted.keys() == found.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    seen = [
        samples(policy, alone=False, dtype=torch.float32, served=torch.float32, seed=1)[0]
        for policy in (whole, short)
    ]
    for one, other in zip(*seen, strict=True):
        assert one.name == other.name and (one.values == other.values).all()


def test_a_half_folder_is_unpacked_in_its_own_type(tmp_path):
    tiny_model(tied=True).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    command = ["quantize", str(tmp_path / "half"), str(tmp_path / "nf4")]
    assert CliRunner().invoke(main, command).exit_code == 0
    whole, short = (loaded(tmp_path / "nf4", packs) for packs in ("none", "nf4"))
    pairs = zip(whole.model.modules(), short.model.modules(), strict=True)
    weights = [(a.weight, b.weight) for a, b in pairs if type(b).__name__ == "PackedLinear"]
    assert weights and all(torch.equal(a, b) for a, b in weights)


def test_weights_that_packing_would_change_are_refused_with_the_command(folders):
    with pytest.raises(UnfitModel, match=r"q_proj.weight does not: .*async-grpo quantize MODEL"):
        loaded(folders / "none", "nf4")
    with pytest.raises(UnfitModel, match=r"what that can say, .* --kind int8"):
        loaded(folders / "nf4", "int8")


def test_packed_weights_are_counted_and_billed(folders):
    whole, short = (loaded(folders / "nf4", packs) for packs in ("none", "nf4"))
    assert size_of(short.model) == size_of(whole.model)
    counted, plain = model_shape(short), model_shape(whole)
    assert counted.num_parameters == plain.num_parameters
    held = sum(layer.codes.nbytes + layer.scales.nbytes for _, layer in packed_layers(short.model))
    assert counted.trained.packed_bytes == held
    from async_grpo.devices.bill import Training

    saved = trainer_bill(plain, Training()).total - trainer_bill(counted, Training()).total
    assert saved > 0


REFUSED = [
    ({"base_quantization": "nf4"}, "--base-quantization goes with --lora-rank"),
    ({"lora_rank": 2, "base_quantization": "nf4", "use_dora": True}, "none with --use-dora"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_options_that_cannot_be_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        AdapterOptions(**options)


def test_a_packed_base_needs_devices():
    config = TrainConfig(model_name_or_path="m", data_path="d", lora_rank=2)
    config.check_devices(on_cpu=True)
    for option, value in (("base_quantization", "nf4"), ("optim", "adamw_8bit")):
        found = config.but(**{option: value})
        found.check_devices(on_cpu=False)
        name = option.replace("_", "-")
        with pytest.raises(ConfigError, match=f"--{name} needs trainer ranks on devices"):
            found.check_devices(on_cpu=True)
        with pytest.raises(ConfigError, match=f"--{name} goes neither with .*--offload"):
            found.but(offload="parameters").check_devices(on_cpu=False)
