"""scaled_matmul against float64: interpreted within the bound of float32 sums, on a GPU within that of tensor cores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from triton_cases import DEVICE, TILE, sums_step, written_codes

from scrimp.errors import PlanError
from scrimp.formats import Noise
from scrimp.gemm.kernels import add_scaled_matmul, quantize_blocks, quantize_tiles, scaled_matmul
from scrimp.gemm.kernels.launch import empty_rest
from scrimp.optim.targets import add_by_operators


def operands(
    m: int, n: int, k: int, element_a: str, element_b: str, is_block: bool, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=generator).to(DEVICE)
    b = torch.randn(n, k, generator=generator).to(DEVICE)
    tiles_a, _ = quantize_tiles(a, element_a, by_row=True, by_column=False)
    tiles_b, _ = quantize_tiles(b, element_b, by_row=True, by_column=False)
    assert tiles_a is not None
    assert tiles_b is not None
    right = quantize_blocks(b, element_b) if is_block else tiles_b
    return tiles_a.codes, tiles_a.scales, right.codes, right.scales


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """float64 values of codes with scales of tiles or of blocks."""
    if scales.shape[0] != codes.shape[0]:
        scales = scales.repeat_interleave(128, 0)[: codes.shape[0]]
    spread = scales.repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes.double().cpu() * spread.double().cpu()


@pytest.mark.parametrize(
    ("m", "n", "k"), [(64, 128, 256), (70, 200, 300), (1, 1, 128), (3, 130, 17)], ids=lambda size: str(size)
)
@pytest.mark.parametrize("is_block", [False, True], ids=["tiles", "blocks"])
@pytest.mark.parametrize("pair", [("e4m3", "e4m3"), ("e5m2", "e4m3")], ids="-".join)
@pytest.mark.every(6)
def test_the_product_lies_within_the_bound_of_its_sums(
    m: int, n: int, k: int, is_block: bool, pair: tuple[str, str]
) -> None:
    a, sa, b, sb = operands(m, n, k, *pair, is_block)
    c = scaled_matmul(a, sa, b, sb, torch.float32).cpu()
    left, right = values(a, sa), values(b, sb)
    # Beyond the sums of tiles one rounding to float32 per tile and per scale.
    bound = (sums_step() + (k // TILE + 3) * 2.0**-24) * (left.abs() @ right.abs().T)
    assert bool(((c - left @ right.T).abs() <= bound).all())
    assert torch.equal(scaled_matmul(a, sa, b, sb, torch.bfloat16).cpu(), c.bfloat16())


@pytest.mark.parametrize("is_block", [False, True], ids=["tiles", "blocks"])
def test_a_product_of_integers_has_exact_sums_of_tiles(is_block: bool) -> None:
    """Scales are powers of two, so that only the sums over tiles round: in float32, one tile after the other."""
    m, n, k = 70, 200, 300
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randint(-127, 128, (size, k), generator=generator, dtype=torch.float32) for size in (m, n)
    )
    for x in (left, right):
        x[:, ::TILE] = 127
        x *= torch.exp2(torch.randint(-9, 9, (1, 3), generator=generator)).repeat_interleave(TILE, 1)[:, :k]
    a, _ = quantize_tiles(left.to(DEVICE), "int8", by_row=True, by_column=False)
    b, _ = quantize_tiles(right.to(DEVICE), "int8", by_row=True, by_column=False)
    assert a is not None
    assert b is not None
    b = quantize_blocks(right.to(DEVICE), "int8") if is_block else b
    assert torch.equal(values(a.codes, a.scales), left.double())
    assert torch.equal(values(b.codes, b.scales), right.double())
    total = torch.zeros(m, n)
    for start in range(0, k, TILE):
        part = slice(start, start + TILE)
        total += (left[:, part].double() @ right[:, part].double().T).float()
    assert torch.equal(scaled_matmul(a.codes, a.scales, b.codes, b.scales, torch.float32).cpu(), total)


@pytest.mark.parametrize("is_block", [False, True], ids=["tiles", "blocks"])
@pytest.mark.parametrize("k", [300, 384])
@pytest.mark.every(3)
def test_second_codes_are_multiplied_where_a_block_has_them_and_read_nowhere_else(
    is_block: bool, k: int
) -> None:
    """Tile by tile in float32, of exact sums: bit for bit, interpreted."""
    m, n = 140, 130
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.rand(size, k, generator=generator) - 0.5 for size in (m, n))
    left[3, 5], left[131, 290], left[132, 299] = 10.0, 6.0, -8.0
    a, _ = quantize_tiles(left.to(DEVICE), "int8", by_row=True, by_column=False, fallback=True)
    b, _ = quantize_tiles(right.to(DEVICE), "int8", by_row=True, by_column=False)
    assert a is not None
    assert b is not None
    b = quantize_blocks(right.to(DEVICE), "int8") if is_block else b
    rest = a.rest
    assert rest is not None
    assert rest.blocks.cpu().tolist() == [[1, 0, 0], [0, 0, 1]]
    b_scales = (b.scales.repeat_interleave(TILE, 0)[:n] if is_block else b.scales).cpu()
    total, second = torch.zeros(m, n), written_codes(rest).cpu()
    for group, start in enumerate(range(0, k, TILE)):
        part = slice(start, start + TILE)
        for codes, scales in ((a.codes.cpu(), a.scales.cpu()), (second, rest.scales.cpu())):
            exact = codes[:, part].double() @ b.codes[:, part].cpu().double().T
            total += exact.float() * (scales[:, group, None] * b_scales[:, group])
    is_read = rest.blocks.repeat_interleave(TILE, 0)[:m].bool()
    rest.codes[~is_read.repeat_interleave(TILE, 1)[:, :k]] = 77
    rest.scales[~is_read] = torch.nan
    c = scaled_matmul(a.codes, a.scales, b.codes, b.scales, torch.float32, rest=rest).cpu()
    bound = 0 if DEVICE == "cpu" else 3 * 2.0**-24 * float(total.abs().max())
    assert float((c - total).abs().max()) <= bound
    without = scaled_matmul(a.codes, a.scales, b.codes, b.scales, torch.float32).cpu()
    exact = left.double() @ right.double().T
    changed = (c != without).any(1).nonzero().flatten().tolist()
    assert changed == [3, 131, 132]
    assert float((c - exact)[changed].norm()) < 0.5 * float((without - exact)[changed].norm())


def test_a_rest_that_does_not_lie_as_its_operand_is_refused() -> None:
    a, sa, b, sb = operands(8, 8, 256, "int8", "int8", False)
    whole, narrow = (empty_rest(8, size, "int8", torch.device(DEVICE)) for size in (256, 128))
    for rest in (
        narrow,
        replace(whole, codes=whole.codes.float()),
        replace(whole, scales=whole.scales.contiguous()),
        replace(whole, blocks=whole.blocks.bool()),
    ):
        with pytest.raises(PlanError, match="the rest does not fit"):
            scaled_matmul(a, sa, b, sb, rest=rest)
    wrong = operands(8, 8, 256, "e4m3", "e4m3", False)
    with pytest.raises(PlanError, match="the rest does not fit"):
        scaled_matmul(*wrong, rest=whole)


def of_tensor_cores(left: Tensor, right: Tensor, *, bits: int = 14, instructions: int = 4) -> Tensor:
    """A tile's product as reported of Hopper: at each instruction of 32 all addends, the sum so far among them, are cut
    to `bits` bits of the largest."""
    total = torch.zeros(len(left), len(right), dtype=torch.float64)
    for first in range(0, 32 * instructions, 32):
        part = slice(first, first + 32)
        addends = torch.cat([left[:, None, part] * right[None, :, part], total[..., None]], dim=-1)
        unit = torch.exp2(addends.abs().amax(-1, keepdim=True).log2().floor() - (bits - 1))
        total = ((addends / unit).trunc() * unit).sum(-1)
    return total


def test_the_bound_of_tensor_cores_passes_their_sums_and_finds_a_lost_instruction() -> None:
    """Emulated: 14 bits break the bound of float32 sums, which a GPU's test must therefore not ask for."""
    a, sa, b, sb = operands(32, 48, TILE, "e4m3", "e4m3", False)
    left, right = values(a, sa), values(b, sb)
    magnitudes = left.abs() @ right.abs().T
    errors = (of_tensor_cores(left, right) - left @ right.T).abs()
    assert bool((errors <= sums_step("cuda") * magnitudes).all())
    assert bool((errors > sums_step("cpu") * magnitudes).any())
    lost = (of_tensor_cores(left, right, instructions=3) - left @ right.T).abs()
    assert bool((lost > sums_step("cuda") * magnitudes).any())


def test_sums_of_e2m1_codes_within_a_tile_are_exact() -> None:
    a, sa, b, sb = operands(40, 72, 128, "e2m1", "e2m1", False)
    sa, sb = torch.full_like(sa, 0.25), torch.full_like(sb, 8.0)
    c = scaled_matmul(a, sa, b, sb, torch.float32).cpu()
    assert torch.equal(c.double(), values(a, sa) @ values(b, sb).T)


@pytest.mark.parametrize("is_block", [False, True], ids=["tiles", "blocks"])
@pytest.mark.every(2)
def test_with_e2m1_codes_only_the_scales_and_the_sum_over_tiles_round(is_block: bool) -> None:
    m, n, k = 16, 130, 384
    a, sa, b, sb = operands(m, n, k, "e2m1", "e2m1", is_block)
    c = scaled_matmul(a, sa, b, sb, torch.float32).cpu()
    sb_of_row = (sb.repeat_interleave(128, 0)[:n] if is_block else sb).cpu()
    expected = torch.zeros(m, n)
    for group in range(k // 128):
        ours = slice(group * 128, (group + 1) * 128)
        exact = a[:, ours].double().cpu() @ b[:, ours].double().cpu().T
        expected += exact.float() * (sa[:, group].cpu()[:, None] * sb_of_row[:, group])
    # A fused multiply-add may skip a rounding on a GPU; interpreted there is none.
    bound = 0 if DEVICE == "cpu" else 3 * 2.0**-24 * float(expected.abs().max())
    assert float((c - expected).abs().max()) <= bound


def test_promotion_within_a_tile_changes_no_exact_sum() -> None:
    a, sa, b, sb = operands(16, 16, 256, "e2m1", "e2m1", False)
    kept = scaled_matmul(a, sa, b, sb, torch.float32)
    assert torch.equal(scaled_matmul(a, sa, b, sb, torch.float32, promote_every=32), kept)


def test_a_nan_scale_spoils_its_row_and_no_other() -> None:
    a, sa, b, sb = operands(8, 8, 128, "e4m3", "e4m3", False)
    sa[3] = torch.nan
    is_nan = scaled_matmul(a, sa, b, sb, torch.float32).cpu().isnan()
    assert bool(is_nan[3].all())
    assert int(is_nan.sum()) == 8


def test_an_empty_product_is_zero() -> None:
    a, b = (torch.zeros(3, 0, dtype=torch.float8_e4m3fn, device=DEVICE) for _ in range(2))
    scales = torch.zeros(3, 0, device=DEVICE)
    assert torch.equal(scaled_matmul(a, scales, b, scales).cpu(), torch.zeros(3, 3, dtype=torch.bfloat16))


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    a, sa, b, sb = operands(8, 300, 256, "e4m3", "e4m3", False)
    for arguments, reason in (
        ((a.float(), sa, b, sb), "a_codes must be a matrix of float8 or int8"),
        ((a, sa, b.view(torch.int8), sb), "no tensor core multiplies these codes"),
        ((a, sa, b[:, ::2], sb), "b_codes must be row-major"),
        ((a[:, :128].contiguous(), sa, b, sb), "differ in K"),
        ((a, sa[:, :1], b, sb), "a_scales do not fit"),
        ((a, sa, b, sb[:2]), "b_scales do not fit"),
        ((a, sa.double(), b, sb), "float64"),
    ):
        with pytest.raises(PlanError, match=reason):
            scaled_matmul(*arguments)
    with pytest.raises(PlanError, match="result type"):
        scaled_matmul(a, sa, b, sb, torch.float16)
    with pytest.raises(PlanError, match="promote_every"):
        scaled_matmul(a, sa, b, sb, promote_every=64)


@pytest.mark.parametrize(("m", "n", "k"), [(70, 200, 300), (3, 130, 17)], ids=lambda size: str(size))
@pytest.mark.parametrize("is_block", [False, True], ids=["tiles", "blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.every(3)
def test_a_product_that_adds_is_one_in_float32_that_is_added_and_rounded(
    m: int, n: int, k: int, is_block: bool, dtype: torch.dtype
) -> None:
    """Bit for bit, by torch's operators, with NaN and infinity in the sum and in the operands."""
    codes = operands(m, n, k, "e5m2", "e4m3", is_block)
    codes[1][1, 0] = float("nan")
    generator = torch.Generator().manual_seed(3)
    total = (torch.randn(m, n, generator=generator) * 1e3).to(dtype)
    total[0, :3] = torch.tensor([float("inf"), float("nan"), -float("inf")])
    total[2, :2] = torch.tensor([-0.0, 3e38])
    product, found = scaled_matmul(*codes, torch.float32).cpu(), total.to(DEVICE, copy=True)
    noise = Noise(2**63 + 5, 2**40, 7) if dtype == torch.bfloat16 else None
    add_scaled_matmul(found, *codes, noise)
    expected = total.clone()
    if noise is None:
        expected += product
    else:
        add_by_operators(expected, product, noise)
    assert expected.isnan().sum() > n
    assert torch.equal(found.cpu().nan_to_num(0.125), expected.nan_to_num(0.125))
    assert torch.equal(found.cpu().isnan(), expected.isnan())


def test_sums_that_a_product_does_not_fit_are_refused() -> None:
    codes = operands(6, 5, 128, "e4m3", "e4m3", is_block=False)
    sums = torch.zeros(6, 5, device=DEVICE)
    for total, noise in (
        (sums[:, :4], None),
        (sums[:5], None),
        (sums, Noise()),
        (sums.bfloat16(), None),
        (sums.bfloat16(), Noise(columns=(range(2), range(6, 9)))),
        (sums.half(), None),
    ):
        with pytest.raises(PlanError):
            add_scaled_matmul(total, *codes, noise)
