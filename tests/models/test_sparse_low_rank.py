"""Layers of W = B A + S: places, forward and backward in float64, first weights, and what is counted."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from allocator import allocator_peak
from decoder_reference import FAMILIES, LLAMA, document_logits, filled, summed_loss, weights_of
from losses import next_token_loss
from states import states_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from scrimp.config import PRESETS, Architecture, Config, replace_values, resolve
from scrimp.errors import ConfigError
from scrimp.gemm.sparse_low_rank import SparseLowRankLinear, columns_of
from scrimp.models import spec_of
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model
from scrimp.optim import memory_of
from scrimp.optim.galore import GaLore
from scrimp.optim.muon import Muon
from scrimp.planner import count_flops

RANK, SHARE = 5, 0.1


def made_whole(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of layers that are one matrix, which can be differentiated."""
    whole = dict(weights)
    for name in [name for name in weights if name.endswith(".S")]:
        layer, values = name.removesuffix(".S"), whole.pop(name)
        product = whole.pop(f"{layer}.B.weight") @ whole.pop(f"{layer}.A.weight")
        places = columns_of(layer, values, product.shape[1])
        whole[f"{layer}.weight"] = product + torch.zeros_like(product).scatter(1, places, values)
    return whole


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_are_those_of_the_whole_matrices(family: str) -> None:
    """The reference is float64 and knows no parts."""
    architecture = replace(FAMILIES[family], rank=RANK, sparse_share=SHARE)
    model = filled(architecture)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, 61, (1, 24), generator=generator) for _ in range(2))
    sums = next_token_loss(model, tokens, targets, chunk=7)
    sums.total.backward()
    weights = weights_of(model)
    logits = document_logits(architecture, made_whole(weights), tokens[0])
    expected, _ = summed_loss(logits, targets.flatten())
    expected.backward()
    torch.testing.assert_close(sums.loss.double(), expected, atol=0, rtol=1e-5)
    for name, parameter in model.named_parameters():
        gradient = weights[name].grad
        assert parameter.grad is not None
        assert gradient is not None
        assert (parameter.grad.double() - gradient).norm() < 1e-5 * gradient.norm(), name


def noise(key: int, row: int, column: int) -> int:
    """The 20 bits that `scrimp.formats.noise` documents, from integers alone."""
    many, golden = 1 << 64, 0x9E3779B97F4A7C15

    def mixed(key: int, address: int) -> int:
        x = (key ^ address * golden) % many
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % many
        x = (x ^ x >> 27) * 0x94D049BB133111EB % many
        return x ^ x >> 31

    def of_int32(x: int) -> int:
        return (x + 2**31) % 2**32 - 2**31

    h = of_int32(mixed(key, row) + mixed(~key % many, column))
    for shift, multiplier in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        h = of_int32((h ^ h >> shift) * multiplier)
    return (h >> 12) + 2**19


@pytest.mark.parametrize(("rows", "entries", "inputs"), [(7, 3, 100), (5, 4, 4), (6, 1, 33), (3, 7, 11)])
def test_places_are_a_function_of_the_layers_name_for_ever(rows: int, entries: int, inputs: int) -> None:
    """Checkpoints have no places: other places would make another model of the same numbers."""
    name = "blocks.1.mlp.down"
    found = columns_of(name, torch.zeros(rows, entries), inputs).tolist()
    key = int.from_bytes(hashlib.sha256(f"{name}.S".encode()).digest()[:8], "little")
    for row in range(rows):
        for j in range(entries):
            first, end = inputs * j // entries, inputs * (j + 1) // entries
            assert found[row][j] == first + (noise(key, row, j) * (end - first) >> 20)
        assert found[row] == sorted(set(found[row]))


def test_every_column_is_as_likely_and_layers_differ() -> None:
    values = torch.zeros(2000, 3)
    one, other = (columns_of(f"blocks.{number}.mlp.down", values, 100) for number in (0, 1))
    counts = torch.bincount(one.flatten(), minlength=100).double()
    # 33 or 34 places share 2,000 numbers: a chi-squared of 97 degrees of freedom, below 160 but for one key in 20,000.
    expected = torch.cat([torch.full((size,), 2000 / size) for size in (33, 33, 34)]).double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 160
    assert 0.01 < float((one == other).double().mean()) < 0.06


@pytest.mark.parametrize("name", ["llama-3m", "qwen2.5-0.5b", "olmo2-1b", "gemma3-1b"])
def test_the_specification_counts_what_the_model_has(name: str) -> None:
    architecture = replace(PRESETS[name], rank=64, sparse_share=0.03)
    spec, dense = spec_of(architecture), spec_of(PRESETS[name])
    model = build_model(architecture, device="meta")
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    layers = {n: m for n, m in model.named_modules() if isinstance(m, SparseLowRankLinear)}
    assert layers.keys() == spec.layers().keys() - {"head"}
    for layer, module in layers.items():
        assert spec.linear(layer).parameters == sum(
            one.numel() for end, one in module.named_parameters() if end != "bias"
        )
        assert module.name == layer
        assert module.S.shape[1] == round(0.03 * module.in_features)
    assert count_flops(spec, 128) == count_flops(dense, 128)
    vectors = sum(one.numel() for one in model.parameters() if one.ndim == 1)
    assert architecture.matrix_parameters == spec.parameters - vectors


def test_products_cost_full_rank_and_the_making_of_each_matrix() -> None:
    """8 r n m of a micro-batch: B A in forward and backward, and both factors' gradients."""
    architecture = replace(LLAMA, rank=RANK, sparse_share=SHARE)
    model = filled(architecture)
    with FlopCounterMode(display=False) as counter:
        model.logits(model(torch.arange(24).view(1, 24))).sum().backward()
    products = sum(
        n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm")
    )
    spec = spec_of(architecture)
    flops = count_flops(spec, 24)
    matrices = sum(block.parameters_per_token for block in spec.blocks)
    assert products == 24 * (flops.blocks + flops.head) + 8 * RANK * matrices


def test_one_matrix_at_a_time_is_there_and_no_pass_keeps_any() -> None:
    """A chain of layers, on one token: whatever is large is a matrix, or a factor's gradient."""
    width, rank, layers = 512, 8, 6
    chain = torch.nn.Sequential(
        *(
            SparseLowRankLinear(
                f"blocks.{number}.mlp.down",
                torch.nn.Linear(width, rank, bias=False),
                torch.nn.Linear(rank, width, bias=False),
                15,
                bias=False,
            )
            for number in range(layers)
        )
    )
    for parameter in chain.parameters():
        torch.nn.init.uniform_(parameter, -0.1, 0.1)
        parameter.grad = torch.zeros_like(parameter)
    x = torch.ones(1, width, requires_grad=True)
    matrix = 4 * width * width
    peak = allocator_peak(lambda: chain(x).sum().backward())
    assert matrix < peak < 1.5 * matrix


def test_first_weights() -> None:
    """Those of the factors as without S, those of S uniform on +- 1 / sqrt(inputs)."""
    architecture = replace(PRESETS["llama-3m"], rank=16, sparse_share=0.03)
    model, plain = build_model(architecture), build_model(replace(architecture, sparse_share=None))
    initialise(model, 3)
    initialise(plain, 3)
    named = dict(plain.named_parameters())
    numbers = {name: one for name, one in model.named_parameters() if name.endswith(".S")}
    assert len(numbers) == 4 * architecture.num_layers
    for name, one in model.named_parameters():
        assert name in numbers or torch.equal(one, named[name]), name
    for name, one in numbers.items():
        module = model.get_submodule(name.removesuffix(".S"))
        assert isinstance(module, SparseLowRankLinear)
        scaled = one.detach() * module.in_features**0.5
        assert float(scaled.abs().max()) <= 1
        assert float(scaled.var()) == pytest.approx(1 / 3, rel=0.1)
        assert abs(float(scaled.mean())) < 0.05


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rank": None}, "sparse_share is of a matrix beside the product"),
        ({"rank": 33}, "1 to 32, the smaller side"),
    ],
)
def test_a_matrix_beside_no_product_is_refused(changes: dict[str, int | None], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        replace(LLAMA, **({"rank": RANK, "sparse_share": SHARE} | changes))  # type: ignore[arg-type]


def test_it_is_written_and_read_and_left_out_where_there_is_none() -> None:
    architecture = replace(LLAMA, rank=4, sparse_share=SHARE)
    values = architecture.to_json()
    assert (values["rank"], values["sparse_share"]) == (4, SHARE)
    assert not {"rank", "sparse_share"} & LLAMA.to_json().keys()
    assert "sparse_share" not in replace(LLAMA, rank=4).to_json()


@pytest.mark.parametrize(
    ("name", "kind"), [("muon", Muon), ("galore", GaLore), ("fira", GaLore)], ids=["muon", "galore", "fira"]
)
def test_optimizers_of_matrices_take_the_factors_and_leave_s_to_adamw(
    name: str, kind: type[Muon | GaLore]
) -> None:
    def held(architecture: Architecture) -> dict[str, int]:
        settings = {"optimizer.name": name} | ({} if name == "muon" else {"optimizer.rank": 3})
        config = resolve(replace_values(Config(), settings), architecture, device_type="cpu").config
        model = filled(architecture)
        named = dict(model.named_parameters())
        found = {n: s.nbytes for n, s in states_of(kind(named, config.optimizer, model.spec)).items()}
        assert memory_of(config, architecture).state_bytes(named) == sum(found.values())
        return found

    architecture = replace(LLAMA, rank=RANK, sparse_share=SHARE)
    without, beside = held(replace(LLAMA, rank=RANK)), held(architecture)
    added = {state: size for state, size in beside.items() if ".S." in state}
    assert {state: size for state, size in beside.items() if state not in added} == without
    numbers = [
        p
        for n, p in build_model(replace(LLAMA, rank=RANK, sparse_share=SHARE)).named_parameters()
        if n.endswith(".S")
    ]
    assert sum(added.values()) == 8 * sum(one.numel() for one in numbers)
