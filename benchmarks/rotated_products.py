"""Errors of products in int8: as they are, with second codes for outliers, and rotated.

Question  int8 loses small numbers beside outliers. Which helps more, a second code for tiles that have them
          (`int8_fallback`) or a rotation of 16 numbers (`int8_hadamard`)?
Method    A trained Llama, exported to a Hugging Face folder, makes a forward and a backward pass in float32 on source
          text (`argparse`). Each linear layer's operands are rounded to bf16 and quantized as by the recipe; an error
          is that of the product, |P' - P| / |P| in Frobenius norms, mean over the blocks.
Run       scrimp export RUN folder && python benchmarks/rotated_products.py folder
"""

from __future__ import annotations

import argparse
import inspect
from collections import defaultdict
from pathlib import Path

import torch
from environment import markdown_table
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from scrimp.formats import quantize
from scrimp.precision import GEMMS, OPERANDS, Operand, recipe

RECIPES = ("int8", "int8_fallback", "int8_hadamard", "fp8", "fp4")
ROWS, SEQUENCE = 8, 256


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokens = torch.tensor(tokenizer(inspect.getsource(argparse))["input_ids"][: ROWS * SEQUENCE])
    errors: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, tensors in seen(model, tokens.view(ROWS, SEQUENCE)).items():
        for gemm in GEMMS:
            for one in RECIPES:
                errors[name.rpartition(".")[2]][gemm, one].append(error(gemm, one, tensors))
    columns = [(gemm, one) for gemm in GEMMS for one in RECIPES]
    rows = [
        [layer, *(f"{100 * sum(found[key]) / len(found[key]):.2f}" for key in columns)]
        for layer, found in errors.items()
    ]
    heads = ["layer", *(f"{gemm}: {one}" for gemm, one in columns)]
    Console(width=240).print("\n".join(markdown_table(heads, rows)), markup=False)


def seen(model: nn.Module, tokens: Tensor) -> dict[str, dict[str, Tensor]]:
    """x, w and g of the blocks' linear layers, in float32 with the values of bf16."""
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)

    def keep(name: str, tensor: str, value: Tensor) -> None:
        found[name][tensor] = value.detach().flatten(0, -2).bfloat16().float()

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers" in name:
            keep(name, "w", module.weight)
            module.register_forward_pre_hook(lambda _, inputs, name=name: keep(name, "x", inputs[0]))
            module.register_full_backward_hook(lambda _m, _i, grads, name=name: keep(name, "g", grads[0]))
    model(tokens, labels=tokens).loss.backward()
    return found


def error(gemm: str, name: str, tensors: dict[str, Tensor]) -> float:
    """The relative error of a product."""
    entry, (a, b) = recipe(name).gemm(gemm), OPERANDS[gemm]
    assert entry is not None
    axes = {"fprop": (-1, -1), "dgrad": (-1, -2), "wgrad": (-2, -2)}[gemm]
    exact = product(gemm, tensors[a], tensors[b])
    low = product(gemm, values(tensors[a], entry.a, axes[0]), values(tensors[b], entry.b, axes[1]))
    return float((low - exact).norm() / exact.norm())


def product(gemm: str, a: Tensor, b: Tensor) -> Tensor:
    """What a GEMM makes of its operands."""
    return {"fprop": lambda: a @ b.T, "dgrad": lambda: a @ b, "wgrad": lambda: a.T @ b}[gemm]()


def values(x: Tensor, o: Operand, axis: int) -> Tensor:
    """What an operand stands for."""
    how = {"hadamard": o.hadamard, "fallback": o.fallback}
    return quantize(x, o.element, o.scaling, axis, o.rounding, **how).dequantize()


if __name__ == "__main__":
    main()
