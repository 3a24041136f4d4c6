"""Compiles every kernel for a GPU that need not be there, and prints what it takes, one JSON object a line.

Run by test_triton_compile.py in a process without TRITON_INTERPRET: `python compile_kernels.py 90`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from scrimp.gemm.kernels import (
    adamw,
    block_scaled,
    gates,
    groups,
    hashes,
    kept,
    loss,
    matmul,
    maxima,
    outer_scales,
    rounded_sums,
    rows,
    tiles,
)
from scrimp.gemm.kernels.launch import WARPS_NEAREST, WARPS_STOCHASTIC
from scrimp.precision.recipes import FALLBACK_SUM

E4M3 = {"ELEMENT": (448.0, 3, -6)}
E5M2 = {"ELEMENT": (57344.0, 2, -14)}
E2M1 = {"ELEMENT": (6.0, 1, 0)}
INT8 = {"ELEMENT": (127.0, 6, 6)}
TYPES = {
    "x": "*bf16",
    **dict.fromkeys(("row_out", "column_out"), "*u8"),
    **dict.fromkeys(("codes", "row_codes", "column_codes", "a", "b"), "*fp8e4nv"),
    **dict.fromkeys(("scales", "row_scales", "column_scales", "a_scales", "b_scales"), "*fp32"),
    **dict.fromkeys(("rotation", "row_amax", "column_amax"), "*fp32"),
    **dict.fromkeys(("row_tensor_scale", "column_tensor_scale"), "*fp32"),
    **dict.fromkeys(("row_hashes", "column_hashes", "second_row_hashes", "second_column_hashes"), "*i32"),
    **dict.fromkeys(("maxima", "row_maxima", "column_maxima"), "*i32"),
    **dict.fromkeys(("rest", "rest_codes"), "*i8"),
    "rest_scales": "*fp32",
    "rest_blocks": "*i32",
    "c": "*bf16",
}
NO_REST = dict.fromkeys(("rest", "rest_codes", "rest_scales", "rest_blocks"))
ANY_NUMBER = ("first_row", "first_column", "row_key", "column_key", "key", "second_key")
"""Addresses and keys, which need be multiples of nothing."""


def tile_cases() -> list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]]:
    """(kernel, label, warps, stages, constants, types other than the usual) of the quantizers of tiles and blocks."""
    cases: list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]] = []
    kernel = tiles.quantize_tiles_kernel
    for label, element, stochastic, types in (
        ("e4m3", E4M3, False, {}),
        ("e4m3 fp32", E4M3, False, {"x": "*fp32"}),
        ("e2m1 stochastic", E2M1, True, {}),
        ("e2m1, columns kept", E2M1, False, {"column_codes": "*u8"}),
        ("e5m2", E5M2, False, {"row_codes": "*fp8e5", "column_codes": "*fp8e5"}),
        ("int8 stochastic", INT8, True, {"row_codes": "*i8", "column_codes": "*i8"}),
    ):
        choice = {
            "STOCHASTIC": stochastic,
            "STOCHASTIC_COLUMN": stochastic,
            "BY_ROW": True,
            "BY_COLUMN": True,
            "HADAMARD": False,
            "HADAMARD_COLUMN": False,
            "LIMIT": FALLBACK_SUM,
        }
        warps = WARPS_STOCHASTIC if stochastic or "*u8" in types.values() else WARPS_NEAREST
        constants = {**choice, **without_rest(kernel), "BLOCK": 128, **element}
        cases.append((kernel, label, warps, 3, constants, types))
    falls_back = {name: value for name, value in constants.items() if name not in NO_REST}
    falls_back |= {"STOCHASTIC": False, "STOCHASTIC_COLUMN": False}
    cases.append((kernel, "int8 fallback", WARPS_STOCHASTIC, 3, falls_back, types))
    for label, by_row, noisy in (("X", True, False), ("G", True, True), ("X, columns", False, False)):
        rotated = {**constants, "BY_ROW": by_row, "HADAMARD": True, "HADAMARD_COLUMN": True}
        rotated |= {"STOCHASTIC": noisy and by_row, "STOCHASTIC_COLUMN": noisy}
        cases.append((kernel, f"int8 rotated {label}", WARPS_STOCHASTIC, 3, rotated, types))
    for label, element, types in (("e4m3", E4M3, {}), ("int8", INT8, {"codes": "*i8"})):
        for axis, along in ((1, "rows"), (0, "columns")):
            for rotated in (False, True) if label == "int8" else (False,):
                constants = {"AXIS": axis, "HADAMARD": rotated, "BLOCK": 128, **element}
                warps = WARPS_STOCHASTIC if rotated else WARPS_NEAREST
                name = f"{label} {along}" + " rotated" * rotated
                cases.append((block_scaled.quantize_blocks_kernel, name, warps, 3, constants, types))
    return cases


def without_rest(kernel: Any) -> dict[str, Any]:
    """A kernel's arguments for second codes, of which there are none."""
    return {name: value for name, value in NO_REST.items() if name in kernel.arg_names}


def row_cases() -> list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]]:
    """The same of scales for rows, columns and whole tensors."""
    cases: list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]] = []
    short, long = rows.SMALLEST_CHUNK, rows.LARGEST_CHUNK
    for label, chunk, whole, stochastic, element, types in (
        ("e4m3 short", short, True, False, E4M3, {}),
        ("e4m3 one chunk", long, True, False, E4M3, {}),
        ("e4m3", long, False, False, E4M3, {}),
        ("e4m3 fp32", long, False, False, E4M3, {"x": "*fp32"}),
        ("e5m2 stochastic", long, False, True, E5M2, {"codes": "*fp8e5"}),
    ):
        constants = {"WHOLE": whole, "STOCHASTIC": stochastic, "CHUNK": chunk, **element}
        cases.append((rows.quantize_rows_kernel, label, chunk // rows.CHUNK_OF_WARP, 3, constants, types))
    for by_row in (False, True):
        constants = {"BY_ROW": by_row, "BLOCK": 128}
        label = "both ways" if by_row else "columns"
        cases.append((rows.largest_magnitudes_kernel, label, WARPS_NEAREST, 3, constants, {}))
    narrow = {"row_codes": "*fp8e5", "column_codes": "*fp8e5"}
    for label, by_row, by_column, transposed, tensor, stochastic, element, types in (
        ("columns e4m3", False, True, False, False, False, E4M3, {}),
        ("rows and columns e4m3", True, True, False, False, False, E4M3, {}),
        ("rows and columns e4m3 fp32", True, True, False, False, False, E4M3, {"x": "*fp32"}),
        ("rows and columns e5m2 stochastic", True, True, False, False, True, E5M2, narrow),
        ("tensor e4m3", True, False, False, True, False, E4M3, {}),
        ("tensor transposed e4m3", False, True, False, True, False, E4M3, {}),
        ("tensor both ways e5m2", True, False, True, True, False, E5M2, narrow),
        ("tensor both ways e4m3 stochastic", True, True, False, True, True, E4M3, {}),
    ):
        constants = {
            "BY_ROW": by_row,
            "BY_COLUMN": by_column,
            "TRANSPOSED": transposed,
            "TENSOR": tensor,
            "STOCHASTIC": stochastic,
            "STOCHASTIC_COLUMN": stochastic,
            "BLOCK": 128,
            **element,
        }
        warps = WARPS_STOCHASTIC if stochastic else WARPS_NEAREST
        cases.append((rows.write_codes_kernel, label, warps, 3, constants, types))
    return cases


def group_cases() -> list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]]:
    """The same of MX and NVFP4: codes, scales as cuBLASLt reads them, values, along each axis and both."""
    cases: list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]] = []
    plain, noisy, rotated, swizzled = (
        (False, False, False),
        (False, True, True),
        (True, True, True),
        (False, False, True),
    )
    values = {"row_out": "*bf16", "column_out": "*bf16"}
    of_mx = {"MAX_EXPONENT": 2, "BITS": 4, "NVFP4": False, "GROUP_ROWS": 1, "GROUP_COLUMNS": 32, **E2M1}
    of_mxfp8 = {**of_mx, "MAX_EXPONENT": 8, "BITS": 8, **E4M3}
    of_nvfp4 = {**of_mx, "NVFP4": True, "GROUP_COLUMNS": 16}
    of_blocks = {**of_nvfp4, "GROUP_ROWS": 16}
    for label, row, column, constants, types in (
        ("mxfp8 rows", plain, None, of_mxfp8, {}),
        ("mxfp8 columns", None, plain, of_mxfp8, {}),
        ("mxfp8 both ways fp32", swizzled, plain, of_mxfp8, {"x": "*fp32"}),
        ("mxfp4 both ways stochastic", noisy, noisy, of_mx, {}),
        ("mx values and codes", plain, plain, of_mx, {"row_out": "*bf16"}),
        ("nvfp4 columns stochastic rotated", None, rotated, of_nvfp4, {}),
        ("nvfp4 both ways stochastic rotated", noisy, rotated, of_nvfp4, {}),
        ("nvfp4 values columns stochastic rotated", None, rotated, of_nvfp4, values),
        ("nvfp4_2d columns", None, swizzled, of_blocks, {}),
        ("nvfp4_2d values", plain, None, of_blocks, values),
    ):
        choice = {"ROW": row, "COLUMN": column, "BLOCK": groups.BLOCK, **constants}
        types = {"row_scales": "*u8", "column_scales": "*u8", **types}
        cases.append((groups.quantize_groups_kernel, label, groups.WARPS, 3, choice, types))
    for label, by_row, by_column in (
        ("rows", True, False),
        ("columns", False, True),
        ("both ways", True, True),
    ):
        halves = {"BY_ROW": by_row, "BY_COLUMN": by_column, "HADAMARD": False, "HADAMARD_COLUMN": by_column}
        halves["BLOCK"] = maxima.BLOCK
        cases.append((maxima.largest_magnitude_kernel, label, maxima.WARPS, 3, halves, {}))
    return cases


def gate_cases() -> list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]]:
    """The quantizers of what a gate makes, and of its gradients, and the kernel that writes these; blocks of 128 by as
    many warps as with noise."""
    usual = ("e4m3", "rows and columns e4m3", "tensor both ways e5m2", "mxfp8 both ways fp32", "both ways")
    usual += ("nvfp4 both ways stochastic rotated",)
    cases = []
    for kernel, label, warps, stages, constants, types in (*tile_cases(), *row_cases(), *group_cases()):
        if label not in usual or "GATE" not in kernel.arg_names:
            continue
        for name, gate in (("silu", (False, False)), ("gradients of gelu", (True, True))):
            if constants.get("BLOCK") == 128:
                warps = WARPS_STOCHASTIC
            own = {**constants, "GATE": gate}
            cases.append((kernel, f"gate {name} {label}", warps, stages, own, {**types, "x": "*bf16"}))
    for name, gate in (("silu", (False, False)), ("gradients of gelu", (True, True))):
        choice = {"GATE": gate, "BLOCK": 128}
        cases.append(
            (gates.gate_matrix_kernel, f"gate {name}", WARPS_STOCHASTIC, 3, choice, {"out": "*bf16"})
        )
    return cases


def matmul_cases() -> list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]]:
    """Every configuration that autotuning tries, storing and adding; other types and promotion once each."""
    kernel = matmul.scaled_matmul_kernel.fn
    common = {
        "a_scales_row": 1,
        "EVEN_K": True,
        "PROMOTE_EVERY": 128,
        "ADDS": False,
        "BLOCK_SCALED": True,
        "b_scales_group": 1,
        **without_rest(kernel),
    }
    address = dict.fromkeys(ANY_NUMBER, "i64")
    cases: list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]] = []
    for config in matmul.scaled_matmul_kernel.configs:
        label = f"{config.kwargs['BLOCK_M']}x{config.kwargs['BLOCK_N']} stages {config.num_stages}"
        cases.append(
            (kernel, label, config.num_warps, config.num_stages, {**common, **config.kwargs}, address)
        )
    _, _, warps, stages, first, _ = cases[0]
    by_tile = {key: value for key, value in first.items() if key != "b_scales_group"}
    by_tile = {**by_tile, "BLOCK_SCALED": False, "b_scales_row": 1}
    ragged, every_32 = {**by_tile, "EVEN_K": False}, {**by_tile, "PROMOTE_EVERY": 32}
    cases.append((kernel, "tiles", warps, stages, by_tile, address))
    cases.append((kernel, "tiles e5m2", warps, stages, by_tile, {"a": "*fp8e5", **address}))
    cases.append((kernel, "tiles ragged", warps, stages, ragged, {"c": "*fp32", **address}))
    cases.append((kernel, "tiles promoted every 32", warps, stages, every_32, address))
    for config in matmul.scaled_matmul_kernel.configs:
        for kind in ("bf16", "fp32"):
            label = f"{config.kwargs['BLOCK_M']}x{config.kwargs['BLOCK_N']} stages {config.num_stages} adds {kind}"
            adds = {**by_tile, **config.kwargs, "ADDS": True}
            types = {"c": f"*{kind}", **address}
            cases.append((kernel, label, config.num_warps, config.num_stages, adds, types))
    for label, constants in (("blocks", first), ("tiles", by_tile)):
        for kind in ("ragged", "even"):
            own = {**constants, "EVEN_K": kind == "even"}
            types = {"a": "*i8", "b": "*i8", **address}
            cases.append((kernel, f"{label} int8 {kind}", warps, stages, own, types))
    integers = {"a": "*i8", "b": "*i8", **address}
    for config in matmul.scaled_matmul_kernel.configs:
        name = f"{config.kwargs['BLOCK_M']}x{config.kwargs['BLOCK_N']} stages {config.num_stages}"
        plain = {**common, **config.kwargs}
        twice = {name: value for name, value in plain.items() if name not in NO_REST}
        ragged = {**twice, "EVEN_K": False}
        for label, own in (("alone", plain), ("fallback", twice), ("fallback ragged", ragged)):
            case = (kernel, f"{name} int8 {label}", config.num_warps, config.num_stages, own, integers)
            cases.append(case)
    return cases


def other_cases() -> list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]]:
    """Hashes of noise; sums of gradients, and the loss, of either type."""
    cases: list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]] = []
    for in_pieces in (False, True):
        types = {"out": "*i32", "addresses": "*i64", **dict.fromkeys(ANY_NUMBER, "i64")}
        choice = {"IN_PIECES": in_pieces, "BLOCK": hashes.BLOCK}
        label = "in pieces" if in_pieces else "in one piece"
        cases.append((hashes.address_hashes_kernel, label, hashes.WARPS, 3, choice, types))
    for kind in ("bf16", "fp32"):
        size = {"ROWS": rounded_sums.ROWS, "COLUMNS": rounded_sums.COLUMNS}
        types = {"total": "*bf16", "gradient": f"*{kind}", **dict.fromkeys(ANY_NUMBER, "i64")}
        cases.append((rounded_sums.add_rounded_kernel, kind, rounded_sums.WARPS, 3, size, types))
        choice = {"TRAINING": True, "CHUNK": loss.CHUNK}
        types = {"logits": f"*{kind}", "targets": "*i64", "losses": "*fp32", "z_loss": "fp32"}
        cases.append((loss.cross_entropy_kernel, kind, loss.WARPS, 3, choice, types))
    return cases


def kept_cases() -> list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]]:
    """Codes that were kept, read; products times scales of whole tensors."""
    cases: list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]] = []
    of_bytes = {"codes": "*u8", "scales": "*u8"}
    size = {"BLOCK": kept.BLOCK}
    cases.append((kept.widen_codes_kernel, "kept e2m1", kept.WARPS, 3, size, {**of_bytes, "out": "*u8"}))
    for label, nvfp4, group, bits, element in (
        ("kept nvfp4", True, (1, 16), 4, E2M1),
        ("kept nvfp4_2d", True, (16, 16), 4, E2M1),
        ("kept mxfp4", False, (1, 32), 4, E2M1),
        ("kept mxfp8", False, (1, 32), 8, E4M3),
    ):
        choice = {"NVFP4": nvfp4, "GROUP_ROWS": group[0], "GROUP_COLUMNS": group[1], "BITS": bits, **element}
        types = {**of_bytes, "out": "*bf16"}
        cases.append((kept.group_values_kernel, label, kept.WARPS, 3, {**choice, **size}, types))
    for kind in ("bf16", "fp32"):
        choice = {"FIRST": True, "SECOND": True, "BLOCK": outer_scales.BLOCK}
        types = {**dict.fromkeys(("product", "first", "second"), "*fp32"), "out": f"*{kind}"}
        kernel = outer_scales.apply_scales_kernel
        cases.append((kernel, f"kept scales {kind}", outer_scales.WARPS, 3, choice, types))
    return cases


def update_cases() -> list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]]:
    """AdamW of bf16 weights and of masters, with averages in every format."""
    cases: list[tuple[Any, str, int, int, dict[str, Any], dict[str, str]]] = []
    size = {"ROWS": adamw.ROWS, "COLUMNS": adamw.COLUMNS}
    numbers = dict.fromkeys(
        ("clip", "beta1", "rest1", "beta2", "rest2", "root", "eps", "rate", "kept"), "fp32"
    )
    for weight, gradient in (("bf16", "bf16"), ("fp32", "fp32")):
        for label, mean, square in (("fp32", "fp32", "fp32"), ("bf16", "bf16", "bf16"), ("8bit", "i8", "u8")):
            types = {"weight": f"*{weight}", "gradient": f"*{gradient}", "mean": f"*{mean}"}
            types |= {"square": f"*{square}", **numbers, **dict.fromkeys(ANY_NUMBER, "i64")}
            scales = ("mean_scales", "square_scales")
            choice: dict[str, Any] = {} if label == "8bit" else dict.fromkeys(scales)
            types |= dict.fromkeys(scales, "*bf16")
            cases.append((adamw.adamw_kernel, f"{weight} {label}", adamw.WARPS, 3, {**choice, **size}, types))
    return cases


def compile_one(
    case: tuple[Any, str, int, int, dict[str, Any], dict[str, str]], capability: int
) -> dict[str, Any]:
    """Compile to a binary; registers, stack and shared memory by cuobjdump, instructions by PTX."""
    kernel, label, warps, stages, constants, types = case
    if "GATE" in kernel.arg_names:
        constants = {"GATE": None, **constants}
        types = {"halves": types.get("x", TYPES["x"]), **types}
    signature = {
        name: "constexpr" if name in constants else types.get(name, TYPES.get(name, "i32"))
        for name in kernel.arg_names
    }
    # Sizes and addresses as in training: multiples of 16.
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (index,): aligned
        for index, kind in enumerate(signature.values())
        if kind[0] in "*i" and kind != "constexpr" and kernel.arg_names[index] not in ANY_NUMBER
    }
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages}
    options["enable_fp_fusion"] = kernel is matmul.scaled_matmul_kernel.fn
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = done.asm["ptx"]
    used = resources(done.asm["cubin"])
    counts = {name: len(re.findall(pattern, ptx)) for name, pattern in INSTRUCTIONS.items()}
    return {"kernel": kernel.fn.__name__, "case": label, **used, "shared": done.metadata.shared, **counts}


INSTRUCTIONS = {
    "div_rn": r"\bdiv\.rn\.f32",
    "div_approximate": r"\bdiv\.(full|approx)",
    "sqrt_rn": r"\bsqrt\.rn\.f32",
    "sqrt_approximate": r"\bsqrt\.approx",
    "fused": r"\bfma\.rn\.f32",
    "to_e4m3": r"\bcvt\.rn\.satfinite\.e4m3x2",
    "flush": r"\.ftz",
    "wgmma": r"\bwgmma\.mma_async",
    "integer_products": r"\b(wgmma\.mma_async|mma\.sync)\S*\.s32\.s8\.s8",
    "tf32": r"tf32",
}


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack (spilled registers live there) of a binary."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = subprocess.run(
            [tool, "--dump-resource-usage", str(path)], check=True, capture_output=True, text=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    assert found, text
    return {"registers": int(found[1]), "stack": int(found[2]) + int(found[3])}


def main(capability: int, only: str = "") -> None:
    """All kernels, or those cases whose label has a word."""
    for case in (
        *tile_cases(),
        *row_cases(),
        *group_cases(),
        *gate_cases(),
        *other_cases(),
        *kept_cases(),
        *update_cases(),
        *matmul_cases(),
    ):
        if only in case[1]:
            print(json.dumps(compile_one(case, capability)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
