"""A frozen weight that lies in memory as codes, against its values as an ordinary weight."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn

from scrimp.errors import ModelError
from scrimp.formats import quantize
from scrimp.gemm import StoredWeight, adapt, merged, store, stored_values, swap_in
from scrimp.gemm.adapted import AdaptedLinear
from scrimp.gemm.stored_weight import stored_operand
from scrimp.precision import RECIPES, storage_bytes
from scrimp.precision.stored import STORABLE

OUTPUTS, INPUTS = 272, 160


def weight(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """With rows of different sizes."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(OUTPUTS, 1, generator=generator)
    return (torch.randn(OUTPUTS, INPUTS, generator=generator) * rows).to(dtype)


def stored(name: str, dtype: torch.dtype = torch.bfloat16, *, bias: bool = False) -> nn.Linear:
    """A layer whose weight is stored."""
    layer = nn.Linear(INPUTS, OUTPUTS, bias=bias, dtype=dtype).requires_grad_(False)
    store(layer, name)
    layer.weight.copy_(weight(dtype))
    return layer


def plain(layer: nn.Linear) -> nn.Linear:
    """The same layer with the values as an ordinary weight."""
    assert isinstance(layer.weight, StoredWeight)
    made = nn.Linear(INPUTS, OUTPUTS, bias=layer.bias is not None, dtype=layer.weight.dtype)
    made.weight.data = layer.weight.values()
    if layer.bias is not None:
        made.bias.data = layer.bias.data
    return made.requires_grad_(False)


@pytest.mark.parametrize("name", STORABLE)
def test_values_are_those_of_quantizing_and_bytes_those_of_the_formula(name: str) -> None:
    layer, operand = stored(name), stored_operand(name)
    assert operand is not None
    assert isinstance(layer.weight, StoredWeight)
    whole = quantize(weight(), operand.element, operand.scaling, four_over_six=operand.four_over_six)
    assert torch.equal(layer.weight.values(), whole.dequantize().bfloat16())
    assert torch.equal(stored_values(weight(), name), layer.weight.values())
    assert layer.weight.nbytes == storage_bytes((OUTPUTS, INPUTS), operand.element, operand.scaling)
    assert (layer.weight.shape, layer.weight.dtype) == ((OUTPUTS, INPUTS), torch.bfloat16)
    for rows in (slice(128, 256), slice(0, 3), slice(5, 200), slice(256, 999)):
        assert torch.equal(layer.weight[rows], layer.weight.values()[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["nvfp4", "fp8", "fp8_row"])
def test_products_are_those_of_the_values_and_keep_none_of_them(name: str, dtype: torch.dtype) -> None:
    layer = stored(name, dtype, bias=True)
    x, g = torch.randn(3, 7, INPUTS, dtype=dtype), torch.randn(3, 7, OUTPUTS, dtype=dtype)
    found = []
    for one in (layer, plain(layer)):
        inputs = x.clone().requires_grad_()
        y = one(inputs)
        y.backward(g)
        found.append((y, inputs.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] is not None
    assert torch.equal(found[0][1], found[1][1])
    made: list[weakref.ref[Tensor]] = []
    values = StoredWeight.values

    def watched(self: StoredWeight, dtype: torch.dtype | None = None) -> Tensor:
        one = values(self, dtype)
        made.append(weakref.ref(one))
        return one

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredWeight, "values", watched)
        y = layer(x.clone().requires_grad_())
    assert [one() for one in made] == [None], "the values outlive the product"
    assert y.requires_grad


def test_under_autocast_products_run_in_bf16() -> None:
    layer = stored("nvfp4", torch.float32)
    x = torch.randn(5, INPUTS, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = layer(x), plain(layer)(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_an_adapter_beside_it_is_merged_into_its_values(name: str) -> None:
    layer = stored(name, torch.float32)
    adapt(layer, 4, (OUTPUTS,), 1.5)
    assert isinstance(layer, AdaptedLinear)
    with torch.no_grad():
        layer.lora_a.normal_()
        layer.lora_b.normal_()
    x = torch.randn(9, INPUTS)
    whole = merged(layer.weight.values(), layer.lora_a, layer.lora_b, (OUTPUTS,), 1.5)
    torch.testing.assert_close(layer(x), x @ whole.T, rtol=1e-4, atol=1e-3)
    layer(x).sum().backward()
    assert layer.lora_b.grad is not None


@pytest.mark.parametrize("name", [one for one in STORABLE if RECIPES[one].dgrad is not None])
def test_a_plan_quantizes_the_values_as_it_would_any_weight(name: str) -> None:
    """In the recipe itself as well as in another one."""
    for runs in {name, "fp8", "bf16"}:
        layers = [stored(name), None]
        layers[1] = plain(layers[0])  # type: ignore[arg-type]
        x, found = torch.randn(32, INPUTS, dtype=torch.bfloat16), []
        for one in layers:
            assert one is not None
            swap_in(one, runs)
            inputs = x.clone().requires_grad_()
            y = one(inputs)
            y.sum().backward()
            found.append((y.detach(), inputs.grad))
        assert torch.equal(found[0][0], found[1][0]), runs
        assert torch.equal(found[0][1], found[1][1]), runs  # type: ignore[arg-type]


@pytest.mark.parametrize("name", STORABLE)
def test_the_values_are_quantized_to_the_same_codes_again(name: str) -> None:
    operand = stored_operand(name)
    assert operand is not None
    first = quantize(weight(torch.float32), operand.element, operand.scaling)
    again = quantize(first.dequantize(), operand.element, operand.scaling)
    assert torch.equal(again.payload.view(torch.uint8), first.payload.view(torch.uint8))
    assert torch.equal(again.scales.float(), first.scales.float())


def test_a_change_in_place_is_refused_not_lost() -> None:
    layer = stored("nvfp4")
    for change in (layer.weight.zero_, layer.weight.neg_, lambda: nn.init.normal_(layer.weight)):
        with pytest.raises(ModelError, match="by a copy into it alone"), torch.no_grad():
            change()


def test_memory_moves_and_is_made_with_the_model() -> None:
    with torch.device("meta"):
        layer = nn.Linear(INPUTS, OUTPUTS, bias=False).requires_grad_(False)
        store(layer, "nvfp4")
    assert layer.weight.is_meta
    layer.to_empty(device="cpu")
    assert isinstance(layer.weight, StoredWeight)
    assert not layer.weight.requires_grad
    assert layer.weight.codes.payload.device.type == "cpu"
    layer.weight.copy_(weight())
    assert torch.equal(layer.weight.values(), stored_values(weight().float(), "nvfp4"))
    copied = copy.deepcopy(layer)
    layer.weight.copy_(torch.zeros(OUTPUTS, INPUTS))
    assert torch.equal(copied.weight.values(), stored_values(weight().float(), "nvfp4"))
    assert not layer.weight.values().any()
