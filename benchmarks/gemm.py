"""Speed and bytes of every GEMM, recipe and back end at the layers of real models, against bf16 and peers.

Question  Is a low-precision GEMM faster than bf16 at the shapes that models have, once the quantization of both
          operands is counted? How near are the quantizers to the memory's speed, and a layer to its peers?
Cases     qkv, out, gate_up and down of each model, for a number of tokens; operands distributed as in training.
GEMMs     fprop, dgrad and wgrad apart: quantize both operands, multiply, bf16 result; 2 M N K / seconds. Bytes:
          codes and scales of both operands as the format stores them; the least that quantizing them moves.
Linear    Forward and backward pass of one layer (bf16 weight, no bias): planned, plain, and the peers (peers.py).
Passes    Triton's quantizers alone, against bytes_moved / bandwidth of a large copy ("floor"), and against
          a copy of as many bytes in the same round.
Method    Rounds with every contender in turn, see stopwatch.py. A ratio to bf16 is the median of the ratios within
          each round, with their range. Rows named "emulated" do not multiply in the recipe's format: the
          reference, and Triton's E2M1 and group-scaled products; their speed says nothing of the format's.
Limits    Whether results are right is for `scrimp doctor`: here a back end whose probe fails is refused. Our layers
          run eager (their products are opaque to the compiler), torchao's compiled.
Run       python benchmarks/gemm.py                   # CPU: the 0.5B model, reference
          python benchmarks/gemm.py --device cuda     # every model, back end and peer
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from environment import RESULTS, cpu, facts, write_pair
from gemm_page import page, summary_lines
from peers import peers, plain_linear
from quantizer_bytes import bytes_moved, groups_moved
from stopwatch import CONTROL, Race, Stopwatch, Work, first_line
from torch import Tensor, nn

from scrimp.config import preset
from scrimp.errors import ScrimpError
from scrimp.formats import Noise
from scrimp.gemm import BackendChooser, backends_for, kernels, swap_in
from scrimp.gemm.backends import BACKENDS, Backend
from scrimp.gemm.backends.native import QUANTIZED
from scrimp.gemm.backends.operands import GROUPS, PAIRED
from scrimp.gemm.kernels.launch import Form, GroupsOf
from scrimp.gemm.probe import Sizes, Trial
from scrimp.gemm.problem import AXES, COLUMNS, Shape, operands_of
from scrimp.models import spec_of
from scrimp.precision import (
    GEMMS,
    HIGH_PRECISION,
    OPERANDS,
    RECIPES,
    Operand,
    lookup_scaling,
    storage_bytes,
)

MODELS = ("qwen2.5-7b", "llama-3.1-8b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")
"""Those with targets first, should the time not suffice."""
PARTS = ("gemms", "linear", "quantizers")
_TILES, _BF16_BYTES = ("tile", "block"), 2
_SCALES = {"x": 1.0, "w": 0.02, "g": 1e-4}


@dataclass(frozen=True)
class Case:
    """One layer of one model."""

    model: str
    layer: str
    sizes: Sizes

    def matrices(self, device: torch.device) -> dict[str, Tensor]:
        """X, W and G in bf16."""
        s = self.sizes
        shapes = {"x": (s.tokens, s.inputs), "w": (s.outputs, s.inputs), "g": (s.tokens, s.outputs)}
        generator = torch.Generator(device).manual_seed(0)

        def random(name: str) -> Tensor:
            values = torch.randn(shapes[name], generator=generator, device=device, dtype=torch.bfloat16)
            return values * _SCALES[name]

        return {name: random(name) for name in shapes}


@dataclass(frozen=True)
class Row:
    """One contender in one race."""

    model: str
    layer: str
    sizes: str
    what: str
    """fprop, dgrad, wgrad, linear (forward and backward), or a quantizer's name."""
    recipe: str
    runner: str
    """Back end or peer."""
    emulated: bool
    tflops_per_s: float | None
    seconds: list[float]
    host_s: float
    ratios: list[float]
    """Speed over the control's, round by round."""
    operand_bytes: int | None = None
    quantize_bytes: int | None = None


Found = tuple[list[Row], dict[str, str]]
"""Rows, and the reasons of what did not run."""


def main() -> None:
    """Measure, write after every layer, print the summary last."""
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("NOT RUN: torch sees no CUDA device here")
    name = torch.cuda.get_device_name() if device.type == "cuda" else cpu()
    environment = facts("torch", "triton", "torchao", "transformer_engine") | {"device": name}
    watch = Stopwatch(device)
    found = peers(device)
    record: dict[str, Any] = {
        "environment": environment,
        "settings": {
            key: getattr(options, key) for key in ("device", "tokens", "repeats", "warm_up", "parts")
        },
        "copy_bytes_per_s": watch.copy_bandwidth(),
        "rows": [],
        "refused": {name: reason for name, reason in found.items() if isinstance(reason, str)},
        "left_out": [],
        "failed": [],
    }
    file = f"{options.date}-gemm-{options.device}{options.suffix}"
    for case in cases(options):
        if options.budget_s and time.perf_counter() - options.began > options.budget_s:
            record["left_out"].append(f"{case.model} {case.layer}")
            continue
        measure(case, watch, options, record)
        write_pair(options.out, file, record, page(record))  # now: a lease may end before the last
        print(f"{case.model} {case.layer}: {time.perf_counter() - options.began:.0f} s", flush=True)
    path = write_pair(options.out, file, record, page(record))
    print("\n".join(summary_lines(record)), f"written: {path.name}", sep="\n")
    if record["failed"]:
        raise SystemExit("failed: " + "; ".join(record["failed"]))


def parse() -> argparse.Namespace:
    """The command line, with what depends on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    quantized = [name for name in RECIPES if name not in HIGH_PRECISION]
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", help=f"presets; default: {', '.join(MODELS)}, on a CPU 0.5B")
    parser.add_argument("--layers", nargs="+", help="such as mlp.down; default: all four")
    parser.add_argument("--recipes", nargs="+", default=quantized, choices=quantized)
    parser.add_argument(
        "--backends", nargs="+", choices=list(BACKENDS), help="default: all, on a CPU reference"
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--tokens", type=int, help="default: 8192, on a CPU 256")
    parser.add_argument("--repeats", type=int, help="rounds; default: 15, on a CPU 5")
    parser.add_argument("--warm-up", type=int, default=2, help="calls before the rounds, not counted")
    parser.add_argument("--budget-s", type=float, help="seconds after which no other layer is begun")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--date", default=date.today().isoformat(), help="prefix of the result files")
    parser.add_argument("--suffix", default="", help="end of their names")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    is_cpu = options.device == "cpu"
    options.began = time.perf_counter()
    options.models = options.models or (["qwen2.5-0.5b"] if is_cpu else list(MODELS))
    options.backends = options.backends or (["reference"] if is_cpu else list(BACKENDS))
    options.tokens = options.tokens or (256 if is_cpu else 8192)
    options.repeats = options.repeats or (5 if is_cpu else 15)
    return options


def cases(options: argparse.Namespace) -> list[Case]:
    """The layers of the models."""
    found = []
    for model in options.models:
        try:
            shapes = {name: (one.outputs, one.inputs) for name, one in spec_of(preset(model)).shapes.items()}
        except ScrimpError as error:
            raise SystemExit(str(error)) from None
        shapes.pop("head")
        unknown = sorted(set(options.layers or ()) - set(shapes))
        if unknown:
            raise SystemExit(f"there is no layer {', '.join(unknown)}; there are {', '.join(shapes)}")
        for layer in options.layers or shapes:
            outputs, inputs = shapes[layer]
            found.append(Case(model, layer, Sizes(options.tokens, inputs, outputs)))
    return found


def measure(case: Case, watch: Stopwatch, options: argparse.Namespace, record: dict[str, Any]) -> None:
    """One layer in all parts; rows and refusals go into the record."""
    matrices = case.matrices(watch.device)
    measurements: list[Callable[[], Found]] = []
    if "gemms" in options.parts:
        measurements += [partial(measure_gemm, case, gemm, matrices, watch, options) for gemm in GEMMS]
    if "linear" in options.parts:
        measurements.append(partial(measure_linear, case, matrices, watch, options))
    if "quantizers" in options.parts:
        bandwidth = record["copy_bytes_per_s"]
        measurements.append(partial(measure_quantizers, case, matrices, watch, options, bandwidth))
    for take in measurements:
        try:
            rows, refused = take()
        except Exception as failure:  # out of memory in a round, say: the next may still run
            record["failed"].append(f"{case.model} {case.layer}: {first_line(failure)}")
            continue
        record["rows"] += [asdict(row) for row in rows]
        record["refused"] |= refused
        if watch.is_cuda:
            torch.cuda.empty_cache()


def rows_of(
    case: Case, what: str, race: Race, flops: float | None, extra: Callable[[str, str], dict[str, Any]]
) -> list[Row]:
    """A race as rows; contenders are named "recipe runner"."""
    rows = []
    for name, seconds in race.seconds.items():
        kind, _, runner = name.partition(" ")
        rate = None if flops is None else flops / statistics.median(seconds) / 1e12
        more = {"emulated": False} | extra(kind, runner)
        heading = (case.model, case.layer, str(case.sizes), what, kind, runner or "torch")
        rows.append(
            Row(
                *heading,
                tflops_per_s=rate,
                seconds=seconds,
                host_s=race.host_s[name],
                ratios=race.ratios(name, next(iter(race.seconds))),
                **more,
            )
        )
    return rows


# -- one GEMM ----------------------------------------------------------------------------------


def measure_gemm(
    case: Case, gemm: str, matrices: dict[str, Tensor], watch: Stopwatch, options: argparse.Namespace
) -> Found:
    """Every recipe and back end that runs one GEMM."""
    shape = case.sizes.shape(gemm)
    a, b = (matrices[name] for name in OPERANDS[gemm])
    control = Trial(gemm, CONTROL, a, b)
    works: dict[str, Work] = {CONTROL: partial(control.run, BACKENDS["torch"], torch.bfloat16)}
    refused = {}
    for recipe_name in options.recipes:
        for backend in (BACKENDS[name] for name in options.backends):
            reason = backends_for(watch.device).refusal(backend, recipe_name, gemm, (shape,))
            if reason is None:
                trial = Trial(gemm, recipe_name, a, b)
                works[f"{recipe_name} {backend.name}"] = partial(trial.run, backend, torch.bfloat16)
            else:
                refused[f"{recipe_name} {backend.name} {gemm}"] = reason
    race = watch.race(works, options.warm_up, options.repeats)
    refused |= {f"{name} {gemm} at {case.model} {case.layer}": why for name, why in race.failures.items()}

    def extra(kind: str, runner: str) -> dict[str, Any]:
        return {
            "emulated": is_emulated(kind, gemm, runner),
            "operand_bytes": operand_bytes(kind, gemm, shape),
            "quantize_bytes": quantize_bytes(kind, gemm, shape, runner, watch.device),
        }

    return rows_of(case, gemm, race, shape.flops, extra), refused


def is_emulated(recipe_name: str, gemm: str, runner: str) -> bool:
    """The product runs in another format than the recipe's."""
    operand = operands_of(gemm, recipe_name)[0]
    if operand is None:
        return False
    of_triton = operand.element == "e2m1" or operand.scaling not in _TILES
    return runner == "reference" or (runner == "triton" and of_triton)


def operand_bytes(recipe_name: str, gemm: str, shape: Shape) -> int:
    """Codes and scales of both operands, as the format stores them; without second codes, which normal numbers have
    none of."""
    operands = zip(operands_of(gemm, recipe_name), (shape.m, shape.n), strict=True)
    return sum(
        _BF16_BYTES * rows * shape.k
        if operand is None
        else storage_bytes((rows, shape.k), operand.element, operand.scaling)
        for operand, rows in operands
    )


def quantize_bytes(recipe_name: str, gemm: str, shape: Shape, runner: str, device: torch.device) -> int:
    """The least that quantizing both operands moves: by Triton's kernels where they do it, else in one ideal pass."""
    found = 0
    sides = zip(operands_of(gemm, recipe_name), (shape.m, shape.n), AXES[gemm], strict=True)
    for operand, rows, axis in sides:
        if operand is None:
            continue
        has_kernel = operand.scaling in QUANTIZED and device.type == "cuda" and runner == "torch"
        if runner == "triton" or has_kernel:
            found += _kernel_bytes(
                operand, rows, shape.k, axis, "values" if runner == "triton" else "swizzled"
            )
        else:
            # The largest element of a whole tensor must be known before the first is rounded.
            readings = 2 if _spans_tensor(operand) else 1
            found += readings * _BF16_BYTES * rows * shape.k
            found += storage_bytes((rows, shape.k), operand.element, operand.scaling)
    return found


def _spans_tensor(operand: Operand) -> bool:
    return operand.scaling == "tensor" or lookup_scaling(operand.scaling).has_tensor_scale


def _kernel_bytes(operand: Operand, rows: int, k: int, axis: int, form: Form) -> int:
    by_row, is_stochastic = axis == COLUMNS, operand.rounding == "stochastic"
    sizes = (rows, k, _BF16_BYTES) if by_row else (k, rows, _BF16_BYTES)
    if operand.scaling == "block":
        return bytes_moved("quantize_blocks", *sizes)
    if operand.scaling in GROUPS:
        one = GroupsOf(operand, form)
        return groups_moved(*sizes, *((one, None) if by_row else (None, one)))
    noise = "stochastic" if by_row else "stochastic_column"
    directions = {"by_row": by_row, "by_column": not by_row, noise: is_stochastic}
    return bytes_moved(PAIRED[operand.scaling], *sizes, **directions)


# -- a whole linear layer ----------------------------------------------------------------------


def measure_linear(
    case: Case, matrices: dict[str, Tensor], watch: Stopwatch, options: argparse.Namespace
) -> Found:
    """Forward and backward pass, planned and by peers."""
    x, weight, g = matrices["x"].detach().requires_grad_(), matrices["w"], matrices["g"]
    works: dict[str, Work] = {CONTROL: partial(step, plain_linear(weight), x, g)}
    for recipe_name in options.recipes:
        for runner, choose in choosers(recipe_name, case.sizes, watch.device, options.backends).items():
            layer = plain_linear(weight)
            swap_in(layer, recipe_name, choose=choose)
            works[f"{recipe_name} {runner}"] = partial(step, layer, x, g)
    refused = {}
    for name, make in peers(watch.device).items():
        if isinstance(make, str):
            continue
        try:
            works[f"peer {name}"] = partial(step, make(weight), x, g)
        except Exception as failure:  # a peer that cannot be made is listed, as one that cannot run
            refused[f"{name} at {case.model} {case.layer}"] = first_line(failure)
    race = watch.race(works, options.warm_up, options.repeats)
    refused |= {f"{name} linear at {case.model} {case.layer}": why for name, why in race.failures.items()}
    flops = sum(case.sizes.shape(gemm).flops for gemm in GEMMS)

    def extra(kind: str, runner: str) -> dict[str, Any]:
        runners = runner.split("/") if kind in RECIPES else []
        gemms = zip(GEMMS, runners * len(GEMMS) if len(runners) == 1 else runners, strict=False)
        return {"emulated": any(is_emulated(kind, gemm, name) for gemm, name in gemms)}

    return rows_of(case, "linear", race, flops, extra), refused


def step(layer: nn.Module, x: Tensor, g: Tensor) -> object:
    """Forward and backward pass; gradients of the input and the weight."""
    return torch.autograd.grad(layer(x), (x, *layer.parameters()), g)


def choosers(
    recipe_name: str, sizes: Sizes, device: torch.device, names: list[str]
) -> dict[str, BackendChooser]:
    """Each back end that runs all three GEMMs, and the choice that training makes where it mixes them."""
    selection = backends_for(device)
    found: dict[str, BackendChooser] = {}
    for name in names:
        shapes = {gemm: (sizes.shape(gemm),) for gemm in GEMMS}
        backend = BACKENDS[name]
        if all(selection.refusal(backend, recipe_name, gemm, shapes[gemm]) is None for gemm in GEMMS):
            found[name] = partial(_always, backend)
    mixed = [selection(recipe_name, gemm, sizes.shape(gemm), device).name for gemm in GEMMS]
    if len(set(mixed)) > 1 and set(mixed) <= set(names):
        found["/".join(mixed)] = selection
    return found


def _always(backend: Backend, *site: object) -> Backend:
    return backend


# -- quantizers --------------------------------------------------------------------------------


def measure_quantizers(
    case: Case,
    matrices: dict[str, Tensor],
    watch: Stopwatch,
    options: argparse.Namespace,
    bandwidth: float,
) -> Found:
    """Triton's quantizers on the layer's matrices, each beside a copy of as many bytes."""
    if not watch.is_cuda:
        return [], {"triton's quantizers alone": "triton kernels need a CUDA device"}
    rows: list[Row] = []
    refused = {}
    for name, (num_bytes, work) in (quantizers(matrices) | group_quantizers(matrices)).items():
        half = torch.ones(num_bytes // 2, dtype=torch.uint8, device=watch.device)
        works: dict[str, Work] = {CONTROL: partial(torch.empty_like(half).copy_, half), "kernel": work}
        race = watch.race(works, options.warm_up, options.repeats)
        if "kernel" in race.failures:
            refused[f"{name} at {case.model} {case.layer}"] = race.failures["kernel"]
            continue
        floor = num_bytes / bandwidth
        row = Row(
            *(case.model, case.layer, str(case.sizes), name, "floor", "triton", False, None),
            seconds=race.seconds["kernel"],
            host_s=race.host_s["kernel"],
            ratios=[floor / seconds for seconds in race.seconds["kernel"]],
            quantize_bytes=num_bytes,
        )
        rows += [row, replace(row, recipe="copy", ratios=race.ratios("kernel"))]
    return rows, refused


def quantizers(matrices: dict[str, Tensor]) -> dict[str, tuple[int, Work]]:
    """Bytes and call of each quantizer on the tensors that it meets in this layer."""
    x, w, g = (matrices[name] for name in "xwg")
    noises = {"noise": Noise(1), "noise_column": Noise(2)}
    both, random = {"by_row": True, "by_column": True}, {"stochastic": True, "stochastic_column": True}

    def of(function: str, tensor: Tensor, *arguments: Any, options: dict[str, bool], **more: Any) -> Any:
        num_bytes = bytes_moved(function, *tensor.shape, tensor.element_size(), **options)
        return num_bytes, partial(getattr(kernels, function), tensor, *arguments, **more)

    row, column = {"by_row": True, "by_column": False}, {"by_row": False, "by_column": True}
    return {
        "tiles by row": of("quantize_tiles", x, "e4m3", options=row, **row),
        "tiles both ways": of("quantize_tiles", x, "e4m3", options=both, **both),
        "tiles both ways, noise": of("quantize_tiles", g, "e2m1", options=both | random, **both, **noises),
        "rows by row": of("quantize_rows", x, "e4m3", options=row, **row),
        "rows by column": of("quantize_rows", w, "e4m3", options=column, **column),
        "rows both ways": of("quantize_rows", g, "e4m3", options=both, **both),
        "tensor by row": of("quantize_tensor", w, "e4m3", options=row, **row),
        "tensor both ways": of("quantize_tensor", g, "e5m2", options=both, **both),
        "blocks by row": of("quantize_blocks", w, "e4m3", options={}),
        "blocks by column": of("quantize_blocks", w, "e4m3", -2, options={}),
        "largest of a tensor": of("tensor_amax", x, options={}),
    }


def group_quantizers(matrices: dict[str, Tensor]) -> dict[str, tuple[int, Work]]:
    """The same of groups, as products and kept codes need them."""
    x, w, g = (matrices[name] for name in "xwg")
    both = {name: _pair(name, "swizzled", "codes") for name in ("mxfp8", "nvfp4")}
    gradient = _pair("nvfp4", "swizzled", "swizzled", of_gradient=True)
    weight = operands_of("dgrad", "nvfp4")[1]
    assert weight is not None
    cases: dict[str, tuple[Tensor, GroupsOf | None, GroupsOf | None]] = {
        "groups mxfp8 by row": (x, both["mxfp8"][0], None),
        "groups mxfp8 by column": (w, None, both["mxfp8"][1]),
        "groups mxfp8 both ways": (x, *both["mxfp8"]),
        "groups mxfp8, values and codes": (x, *_pair("mxfp8", "values", "codes")),
        "groups nvfp4 both ways, rotated": (x, *both["nvfp4"]),
        "groups nvfp4 both ways, rotated, noise": (g, *gradient),
        "groups nvfp4, blocks of 16 x 16 by column": (w, None, GroupsOf(weight, "swizzled")),
    }
    return {
        name: (
            groups_moved(*matrix.shape, matrix.element_size(), *sides),
            partial(kernels.quantize_groups, matrix, *sides),
        )
        for name, (matrix, *sides) in cases.items()
    }


def _pair(
    recipe_name: str, form: Form, form_column: Form, *, of_gradient: bool = False
) -> tuple[GroupsOf, GroupsOf]:
    """X for fprop and wgrad, or G for dgrad and wgrad."""
    first = operands_of("dgrad" if of_gradient else "fprop", recipe_name)[0]
    second = operands_of("wgrad", recipe_name)[0 if of_gradient else 1]
    assert first is not None
    assert second is not None
    return GroupsOf(first, form, Noise(1)), GroupsOf(second, form_column, Noise(2))


if __name__ == "__main__":
    main()
