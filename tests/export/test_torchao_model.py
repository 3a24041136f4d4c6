"""Converted layers compute what the plan says: Scrimp's reference is the oracle, in both passes."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from scrimp.errors import DeviceError, ModelError
from scrimp.export import rename, to_torchao
from scrimp.export.fit import Triple
from scrimp.export.torchao import torchao_host
from scrimp.formats import quantize
from scrimp.gemm import reference_only, swap_in
from scrimp.precision import LinearPrecision

pytest.importorskip("torchao.float8", reason="torchao is not installed")
TOKENS, INPUTS, OUTPUTS = 96, 64, 128
EMULATED = [
    triple
    for triple in torchao_host("fp32").runs
    if triple != ("fp32", "fp32", "fp32") and not {"fp8", "nvfp4"} & set(triple)
]


def results(layer: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """Y, dX, dW and db."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(g)
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]  # type: ignore[list-item]


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("triple", EMULATED, ids="/".join)
def test_a_converted_layer_gives_the_numbers_of_the_plan(triple: Triple) -> None:
    torch.manual_seed(1)
    plain = nn.Linear(INPUTS, OUTPUTS)
    # Magnitudes that differ by row and column: another scaling, or the wrong axis, gives other numbers.
    x = (
        torch.randn(2, TOKENS // 2, INPUTS)
        * torch.logspace(-1, 1, INPUTS)
        * torch.logspace(0, 2, TOKENS // 2)[:, None]
    )
    g = torch.randn(2, TOKENS // 2, OUTPUTS) * torch.logspace(-2, 0, OUTPUTS)
    precision = LinearPrecision(*triple, "fp32")
    ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
    swap_in(ours, precision, choose=reference_only)
    converted = to_torchao({"": precision}, emulate=True).apply(theirs)
    expected, high = results(ours, x, g), results(plain, x, g)
    for index, (mine, other) in enumerate(zip(results(converted, x, g), expected, strict=True)):
        assert distance(mine, other) < 1e-5
        if index < 3 and triple[index] != "fp32":
            assert distance(mine, high[index]) > 5e-3  # it is quantized


def test_only_the_planned_layers_of_a_hugging_face_model_change() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config)
    plan = {
        "blocks.0.attention.qkv": LinearPrecision("fp8_row", "fp8_row", "fp32", "fp32"),
        "blocks.1.attention.qkv": LinearPrecision("fp8_tensor", "fp8_tensor", "fp8_tensor", "fp32"),
        "blocks.0.mlp.down": LinearPrecision("mxfp8", "mxfp8", "mxfp8", "fp32"),
        "blocks.1.mlp.down": LinearPrecision("fp4", "fp4", "fp4", "fp32"),
        "head": LinearPrecision.of("fp32"),
    }
    parameters, tokens = dict(model.named_parameters()), torch.randint(64, (2, 32))
    before = model(input_ids=tokens, labels=tokens).loss
    exported = to_torchao(rename(plan, "huggingface"), emulate=True)
    assert exported.apply(model) is model
    changed = {
        name: type(m).__name__
        for name, m in model.named_modules()
        if type(m).__module__.startswith("torchao")
    }
    attention = {
        f"model.layers.{i}.self_attn.{part}_proj": "Float8Linear" for i, part in product((0, 1), "qkv")
    }
    assert changed == attention | {"model.layers.0.mlp.down_proj": "MXFP8Linear"}
    assert all(dict(model.named_parameters())[name] is p for name, p in parameters.items())
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert 0 < abs(loss - before) < 0.1 * before
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_torchaos_own_tiles_and_blocks_are_scrimps_fp8() -> None:
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    torch.manual_seed(2)
    x = torch.randn(256, 384) * torch.logspace(-2, 2, 384)

    def assert_same(codes: Tensor, scales: Tensor, rows: int, columns: int, scaling: str, axis: int) -> None:
        spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        ours = quantize(x, element="e4m3", scaling=scaling, axis=axis).dequantize()
        assert distance(codes.float() * spread, ours) < 1e-3

    assert_same(*kernels.torch_blockwise_scale_act_quant_lhs(x), 1, 128, "tile", -1)
    assert_same(*kernels.torch_blockwise_scale_act_quant_rhs(x), 128, 1, "tile", 0)
    assert_same(*kernels.torch_blockwise_scale_weight_quant(x), 128, 128, "block", -1)


def test_nvfp4_layers_are_torchaos_and_keep_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))
    weight, bias = model[0].weight, model[0].bias
    exported = to_torchao({"0": LinearPrecision.of("nvfp4"), "1": LinearPrecision.of("bf16")})
    exported.apply(model)
    assert [type(layer).__name__ for layer in model] == ["NVFP4Linear", "Linear"]
    assert model[0].weight is weight
    assert model[0].bias is bias
    assert "2^-6" in exported.notes[0]


class Odd(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("layer", "recipe", "emulate", "message"),
    [
        (nn.ReLU(), "fp8_row", True, "no linear layer of the model"),
        (None, "fp8_row", True, "nothing of that name"),
        (Odd(64, 64), "fp8_row", True, "forward of its own"),
        (nn.Linear(64, 24), "fp8_row", False, "not multiples of 16"),
        (nn.Linear(48, 64), "mxfp8", True, "not multiples of 32"),
        (nn.Linear(128, 128), "fp8", False, "a bias"),
        (nn.Linear(128, 64, bias=False), "fp8", False, "not multiples of 128"),
        (nn.Linear(128, 128), "nvfp4", True, "emulate"),
    ],
)
def test_a_layer_that_torchao_cannot_take_is_refused_before_anything_changes(
    layer: nn.Module | None, recipe: str, emulate: bool, message: str
) -> None:
    model = nn.ModuleDict({"first": nn.Linear(64, 64)} | ({} if layer is None else {"second": layer}))
    plan = {"first": LinearPrecision.of("fp8_tensor"), "second": LinearPrecision.of(recipe)}
    with pytest.raises(ModelError, match=message):
        to_torchao(plan, emulate=emulate).apply(model)
    assert type(model["first"]) is nn.Linear


def test_a_layer_that_scrimp_runs_is_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    swap_in(model, "fp8_row", choose=reference_only)
    with pytest.raises(ModelError, match="swap_out"):
        to_torchao({"0": LinearPrecision.of("fp8_row")}, emulate=True).apply(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fp8_tiles_without_their_gpu_are_refused_before_anything_changes() -> None:
    model = nn.ModuleDict({"a": nn.Linear(128, 128), "b": nn.Linear(128, 128, bias=False)})
    plan = {"a": LinearPrecision.of("fp8_row"), "b": LinearPrecision.of("fp8")}
    with pytest.raises(DeviceError, match="SM90"):
        to_torchao(plan).apply(model)
    assert type(model["a"]) is nn.Linear


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.float8.config", None)
    with pytest.raises(DeviceError, match="pip install"):
        to_torchao({"": LinearPrecision.of("fp8_row")}).apply(nn.Linear(64, 64))
