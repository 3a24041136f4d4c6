"""Casts to element types, and their codes, against ml_dtypes, numpy, torch and torchao."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from slow_oracle import LARGEST, TYPES, Array, all_values, cast, to_type
from torch import Tensor
from torchao.prototype.mx_formats import kernels

from scrimp.formats import quantize
from scrimp.formats.codes import decode, encode
from scrimp.formats.rounding import round_
from scrimp.formats.scales import e8m0_value
from scrimp.precision import lookup_element

EACH_ELEMENT = pytest.mark.parametrize("element", list(TYPES))
ALL_BFLOAT16 = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def rounded(x: Tensor, element: str) -> Tensor:
    return round_(x.to(torch.float32, copy=True), lookup_element(element))


def same_bits(ours: Tensor, theirs: Array) -> bool:
    """Equal, the sign of zero included; any NaN equals any other."""
    bits, wanted = ours.numpy().view(np.int32), theirs.astype(np.float32).view(np.int32)
    return bool(np.all((bits == wanted) | (np.isnan(ours.numpy()) & np.isnan(theirs))))


@EACH_ELEMENT
def test_every_bfloat16_number_rounds_as_in_ml_dtypes(element: str) -> None:
    x = ALL_BFLOAT16.float()
    ours = rounded(ALL_BFLOAT16, element)
    assert same_bits(ours, cast(x.numpy(), element))
    assert not (torch.signbit(ours) & (ours == 0)).any()
    assert ours.isnan().equal(x.isnan())


@EACH_ELEMENT
def test_codes_of_every_bfloat16_number_are_those_of_ml_dtypes(element: str) -> None:
    x = ALL_BFLOAT16[~ALL_BFLOAT16.isnan()]
    values = rounded(x, element)
    clamped = x.float().clamp(-LARGEST[element], LARGEST[element]).numpy()
    theirs = torch.from_numpy(to_type(clamped, element).view(np.uint8).copy())
    # Their negative numbers that round to zero keep their sign; ours are +0.
    theirs[values == 0] = 0
    payload = encode(values, lookup_element(element)).view(torch.uint8)
    if element == "e2m1":
        payload = torch.stack([payload & 15, payload >> 4], -1).flatten()[: len(x)]
    assert payload.equal(theirs)


@EACH_ELEMENT
def test_midpoints_round_to_even_and_their_neighbours_to_the_nearer_value(element: str) -> None:
    grid = all_values(element).astype(np.float32)
    lower, upper = grid[:-1], grid[1:]
    middle = (lower + upper) / 2
    even = rounded(torch.from_numpy(middle), element).numpy()
    assert same_bits(torch.from_numpy(even), cast(middle, element))
    # To even: the code of the chosen neighbour ends in 0.
    assert not (to_type(np.abs(even), element).view(np.uint8) & 1).any()
    below, above = np.nextafter(middle, np.float32(-np.inf)), np.nextafter(middle, np.float32(np.inf))
    assert np.array_equal(rounded(torch.from_numpy(below), element).numpy(), lower)
    assert np.array_equal(rounded(torch.from_numpy(above), element).numpy(), upper)


@EACH_ELEMENT
def test_numbers_beyond_the_largest_saturate_and_nan_stays(element: str) -> None:
    largest = LARGEST[element]
    x = torch.tensor([np.nextafter(largest, np.inf), 1.03 * largest, 1e9, 3e38, torch.inf, torch.nan])
    ours = rounded(torch.cat([x, -x]), element)
    assert ours[:5].eq(largest).all()
    assert ours[6:11].eq(-largest).all()
    assert ours[[5, 11]].isnan().all()


@EACH_ELEMENT
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_input_type_gives_the_codes_of_its_float32_values(element: str, dtype: torch.dtype) -> None:
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    ours, wide = quantize(x, element, "tile"), quantize(x.to(torch.float32), element, "tile")
    assert ours.payload.view(torch.uint8).equal(wide.payload.view(torch.uint8))
    assert ours.scales.equal(wide.scales)


@EACH_ELEMENT
def test_every_code_survives_decoding_and_encoding(element: str) -> None:
    entry = lookup_element(element)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    payload = codes if element == "e2m1" else codes.view(encode(torch.zeros(2), entry).dtype)
    length = 512 if element == "e2m1" else 256
    values = decode(payload, entry, length)
    again = encode(values, entry).view(torch.uint8)
    kept = torch.ones(256, dtype=torch.bool) if element == "e2m1" else values.isfinite()
    assert again[kept].equal(codes[kept])
    assert int(kept.sum()) == {"e2m1": 256, "e4m3": 254, "e5m2": 248, "int8": 256}[element]
    theirs = np.arange(256, dtype=np.uint8)
    if element == "e2m1":
        theirs = np.stack([theirs & 15, theirs >> 4], -1).reshape(-1)
    assert same_bits(values, theirs.view(TYPES[element]).astype(np.float32))


@pytest.mark.parametrize(("element", "codes"), [("e2m1", [0x00, 0x07]), ("int8", [0, 0, 6, 0])])
def test_nan_has_the_code_0_whatever_its_sign_where_there_is_none_for_it(
    element: str, codes: list[int]
) -> None:
    values = torch.tensor([torch.nan, -torch.nan, 6.0, -torch.nan])
    values[1] = -values[1].abs()
    assert encode(values, lookup_element(element)).tolist() == codes


def test_integers_are_those_of_torchs_own_quantization() -> None:
    """Its scales are given here: powers of two, by which a division and a product with the reciprocal are the same."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).clamp(-4, 4)
    scales = torch.exp2(torch.randint(-20, 20, (64,), generator=torch.Generator().manual_seed(1)))
    x[:, ::128] = 127 * 2.0**-4
    x[:, 1::7] = (x[:, 1::7] * 16).floor().clamp(-100, 100) / 16 + 2.0**-5  # ties
    x = x.clamp(-127 * 2.0**-4, 127 * 2.0**-4) * scales[:, None]
    ours = quantize(x, "int8", "tile")
    assert ours.scales.equal((scales * 2.0**-4)[:, None].expand(-1, 2))
    theirs = torch.fake_quantize_per_channel_affine(
        x, ours.scales[:, 0].contiguous(), torch.zeros(64, dtype=torch.int32), 0, -127, 127
    )
    assert ours.dequantize().equal(theirs)
    assert ours.payload[:, 1::7].remainder(2).eq(0).all()  # ties, to even


def test_the_first_of_two_codes_takes_the_low_half_as_torchao_packs() -> None:
    x = torch.tensor([[0.5, 6.0, -1.0, 3.0, 0.0, -6.0]])
    ours = encode(x, lookup_element("e2m1"))
    assert ours.tolist() == [[0x71, 0x5A, 0xF0]]
    assert ours.equal(kernels.pack_uint4(kernels.f32_to_f4_unpacked(x)))
    assert encode(x[:, :3], lookup_element("e2m1")).tolist() == [[0x71, 0x0A]]


def test_e8m0_exponents_are_the_powers_of_two_of_ml_dtypes() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    theirs = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert same_bits(e8m0_value(codes), theirs)
    assert e8m0_value(codes)[255].isnan()
