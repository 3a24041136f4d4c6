"""Formats as data: against ml_dtypes, against counting groups one by one, and free of torch."""

from __future__ import annotations

import itertools
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from scrimp.errors import PlanError
from scrimp.precision import ELEMENTS, SCALINGS, lookup_element, lookup_scaling, scale_shape, storage_bytes

TYPES = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
SHAPES = [(1,), (0,), (127,), (3, 5), (128, 256), (129, 257), (2, 131, 33), (3, 0, 17), (2, 2, 17, 31)]


@pytest.mark.parametrize("name", list(TYPES))
def test_elements_are_those_of_ml_dtypes(name: str) -> None:
    element, theirs = ELEMENTS[name], ml_dtypes.finfo(TYPES[name])
    assert element.name == name
    assert element.bits == theirs.bits
    assert element.mantissa_bits == theirs.nmant
    assert element.max_value == float(theirs.max)
    assert 2.0**element.min_exponent == float(theirs.smallest_normal)
    assert 2.0**element.max_exponent <= element.max_value < 2.0 ** (element.max_exponent + 1)
    assert 2.0 ** (element.min_exponent - element.mantissa_bits) == float(theirs.smallest_subnormal)


def test_int8_has_every_integer_up_to_127_and_nothing_else() -> None:
    """The values that a float of these exponents and mantissas has, one by one."""
    element = ELEMENTS["int8"]
    assert set(ELEMENTS) == {*TYPES, "int8"}
    step = 2.0 ** (element.min_exponent - element.mantissa_bits)
    small = [step * number for number in range(2**element.mantissa_bits)]
    large = [
        2.0**exponent * (1 + number / 2**element.mantissa_bits)
        for exponent in range(element.min_exponent, element.max_exponent + 1)
        for number in range(2**element.mantissa_bits)
    ]
    assert small + large == list(range(128))
    assert (element.bits, element.max_value) == (8, large[-1])


def groups_by_counting(shape: tuple[int, ...], scaling: str) -> int:
    """Give every element the name of its group, and count the names."""
    width = {"row": 10**9, "tile": 128, "block": 128, "mx": 32, "nvfp4": 16, "nvfp4_2d": 16}
    names = set()
    for index in itertools.product(*map(range, shape)):
        if scaling == "tensor":
            names.add(())
            continue
        *leading, column = index
        if scaling in ("block", "nvfp4_2d"):
            leading[-1] //= width[scaling]
        names.add((*leading, column // width[scaling]))
    return len(names)


@pytest.mark.parametrize("scaling", list(SCALINGS))
@pytest.mark.parametrize("shape", SHAPES)
def test_scales_and_bytes_are_those_of_counting(scaling: str, shape: tuple[int, ...]) -> None:
    kind = lookup_scaling(scaling)
    if kind.rows not in (1, None) and len(shape) < 2:
        return
    num_groups = groups_by_counting(shape, scaling)
    if 0 not in shape:
        assert np.prod(scale_shape(shape, kind)) == num_groups
    for element, entry in ELEMENTS.items():
        num_rows = int(np.prod(shape[:-1]))
        payload = num_rows * (shape[-1] if entry.bits == 8 else (shape[-1] + 1) // 2)
        scales = int(np.prod(scale_shape(shape, kind))) if 0 in shape else num_groups
        wanted = payload + scales * {"mx": 1, "nvfp4": 1, "nvfp4_2d": 1}.get(scaling, 4)
        wanted += 4 if scaling.startswith("nvfp4") else 0
        assert storage_bytes(shape, element, scaling) == wanted


@pytest.mark.parametrize(
    ("element", "scaling", "bytes_per_element"),
    [
        ("e4m3", "tensor", 1.0),
        ("e2m1", "tensor", 0.5),
        ("int8", "tile", 1 + 4 / 128),
        ("int8", "block", 1 + 4 / 128**2),
        ("e4m3", "row", 1 + 4 / 4096),
        ("e2m1", "row", 0.5 + 4 / 4096),
        ("e4m3", "tile", 1 + 4 / 128),
        ("e2m1", "tile", 0.5 + 4 / 128),
        ("e5m2", "block", 1 + 4 / 128**2),
        ("e2m1", "block", 0.5 + 4 / 128**2),
        ("e4m3", "mx", 1 + 1 / 32),
        ("e2m1", "mx", 0.5 + 1 / 32),
        ("e2m1", "nvfp4", 0.5625),
        ("e2m1", "nvfp4_2d", 0.5 + 1 / 256),
    ],
)
def test_bytes_per_element_are_the_published_ones(
    element: str, scaling: str, bytes_per_element: float
) -> None:
    ours = storage_bytes((1024, 4096), element, scaling) / (1024 * 4096)
    assert ours == pytest.approx(bytes_per_element, abs=2e-6)


def test_only_nvfp4_has_a_scale_of_the_whole_tensor_beside_those_of_groups() -> None:
    assert {name for name, kind in SCALINGS.items() if kind.has_tensor_scale} == {"nvfp4", "nvfp4_2d"}
    assert all(kind.name == name for name, kind in SCALINGS.items())


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    for call, known in (
        (lambda: lookup_element("e3m4"), list(ELEMENTS)),
        (lambda: storage_bytes((2, 2), "fp8", "tile"), list(ELEMENTS)),
        (lambda: lookup_scaling("tiles"), list(SCALINGS)),
        (lambda: storage_bytes((2, 2), "e4m3", ""), list(SCALINGS)),
    ):
        with pytest.raises(PlanError) as refused:
            call()
        assert all(name in str(refused.value) for name in known)


def test_formats_and_recipes_need_no_torch() -> None:
    code = "import sys, scrimp.precision; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
