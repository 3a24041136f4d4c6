"""Which of a plan's recipes torchao runs, against torchao's own checks, and the file that is written."""

from __future__ import annotations

import copy
import subprocess
import sys
from itertools import product

import pytest
import torch
from torch import nn

from scrimp.export import Inexpressible, to_torchao
from scrimp.export.fit import Triple
from scrimp.export.torchao import TorchaoExport
from scrimp.precision import GEMMS, RECIPES, LinearPrecision

float8 = pytest.importorskip("torchao.float8.config", reason="torchao is not installed")
RECIPES_WITH_BF16 = [name for name in RECIPES if name != "fp32"]
SEVERAL = {
    "blocks.0.up": ("fp8_row", "fp8_row", "bf16"),
    "blocks.1.up": ("fp8_row", "fp8_row", "bf16"),
    "blocks.0.down": ("mxfp8", "mxfp8", "mxfp8"),
    "blocks.1.down": ("mxfp8", "mxfp8", "bf16"),
    "head": ("bf16", "bf16", "bf16"),
}


def export(triples: dict[str, Triple], compute: str = "bf16", **options: bool) -> TorchaoExport:
    return to_torchao(
        {name: LinearPrecision(*triple, compute) for name, triple in triples.items()}, **options
    )


def named(exported: TorchaoExport) -> list[Inexpressible]:
    return list(exported.inexpressible)


@pytest.mark.parametrize("triple", product(("bf16", "fp8_tensor", "fp8_row"), repeat=3))
def test_float8_recipes_mix_freely_but_for_the_gradients_element(triple: Triple) -> None:
    exported = export({"layer": triple})
    if {"fp8_tensor", "fp8_row"} == set(triple[1:]):
        assert not exported.groups
        assert "E4M3 or E5M2" in named(exported)[0].why
    elif triple == ("bf16", "bf16", "bf16"):
        assert exported.plain == ("layer",)
    else:
        (group,) = exported.groups
        assert group.recipes == triple
        assert not named(exported)
        assert not group.config.round_scales_to_power_of_2


def test_torchao_itself_refuses_two_elements_for_the_gradient() -> None:
    with pytest.raises(AssertionError, match="grad_output must be cast to the same dtype"):
        float8.Float8LinearConfig(
            cast_config_grad_output=float8.CastConfig(target_dtype=torch.float8_e5m2),
            cast_config_grad_output_for_grad_weight=float8.CastConfig(target_dtype=torch.float8_e4m3fn),
        )


def test_tensorwise_is_torchaos_own_recipe() -> None:
    (group,) = export({"layer": ("fp8_tensor",) * 3}).groups
    assert group.config == float8.Float8LinearConfig.from_recipe_name("tensorwise")


def test_exactly_these_other_triples_are_expressed() -> None:
    float8_names = {"bf16", "fp8_tensor", "fp8_row"}
    others = [triple for triple in product(RECIPES_WITH_BF16, repeat=3) if not set(triple) <= float8_names]
    expressed = {triple: export({"layer": triple}).groups for triple in others}
    kinds = {triple: groups[0].kind for triple, groups in expressed.items() if groups}
    assert kinds == {
        ("fp8",) * 3: "blockwise",
        ("mxfp8",) * 3: "mxfp8",
        ("mxfp8", "mxfp8", "bf16"): "mxfp8",
        ("nvfp4",) * 3: "nvfp4",
    }


@pytest.mark.parametrize(
    "triple", [t for t in product(RECIPES_WITH_BF16, repeat=3) if "fp4" in t or "mxfp4" in t][::7]
)
def test_what_torchao_cannot_run_is_named_and_left_in_bf16(triple: Triple) -> None:
    exported = export({"layer": triple})
    assert not exported.groups
    assert exported.plain == ("layer",)
    assert {(e.gemm, e.recipe, e.instead) for e in named(exported)} == {
        (gemm, name, "bf16") for gemm, name in zip(GEMMS, triple, strict=True) if name != "bf16"
    }
    assert all("trains no linear layer in" in entry.why for entry in named(exported))
    assert "# Not as planned: layer: " in exported.text


@pytest.mark.parametrize(
    ("planned", "runs"),
    [
        (("fp8", "fp8", "bf16"), ("fp8_row", "fp8_row", "bf16")),
        (("fp4", "fp4", "fp4"), ("nvfp4", "nvfp4", "nvfp4")),
        (("mxfp4", "mxfp4", "bf16"), ("fp8_row", "fp8_row", "bf16")),
        (("fp8", "mxfp8", "mxfp8"), ("mxfp8", "mxfp8", "mxfp8")),
        (("fp8_tensor", "fp8_row", "fp8_tensor"), ("fp8_tensor", "fp8_row", "fp8_row")),
    ],
)
def test_approximate_takes_the_nearest_and_says_what_changed(planned: Triple, runs: Triple) -> None:
    exported = export({"layer": planned}, approximate=True)
    assert exported.groups[0].recipes == runs
    assert {(e.gemm, e.recipe, e.instead) for e in named(exported)} == {
        (gemm, want, have) for gemm, want, have in zip(GEMMS, planned, runs, strict=True) if want != have
    }


def test_layers_that_give_bf16_are_not_exported_from_a_plan_in_fp32() -> None:
    exported = export({"a": ("fp8",) * 3, "b": ("fp8_row", "fp8_row", "fp32")}, "fp32")
    assert [group.layers for group in exported.groups] == [("b",)]
    assert "computes in fp32" in named(exported)[0].why


def test_mxfp8_has_the_floor_rule_and_wgrad_as_planned() -> None:
    groups = {group.layers: group.config for group in export(SEVERAL).groups}
    assert groups["blocks.0.down",].wgrad_with_hp is False
    assert groups["blocks.1.down",].wgrad_with_hp is True
    assert {
        groups[layers].scale_calculation_mode.value for layers in groups if "blocks.0.up" not in layers
    } == {"floor"}


def test_the_file_converts_as_apply_does() -> None:
    exported = export(SEVERAL, emulate=True)
    model = nn.ModuleDict(
        {
            "blocks": nn.ModuleList(
                nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in "ab"
            ),
            "head": nn.Linear(32, 16),
        }
    )
    applied = exported.apply(copy.deepcopy(model))
    namespace: dict[str, object] = {}
    exec(compile(exported.text, "torchao_precision.py", "exec"), namespace)
    by_file = namespace["convert"](copy.deepcopy(model))  # type: ignore[operator]
    for (name, mine), (_, theirs) in zip(applied.named_modules(), by_file.named_modules(), strict=True):
        assert type(mine) is type(theirs), name
        for key in ("config", "wgrad_with_hp", "scale_calculation_mode", "kernel_preference"):
            assert getattr(mine, key, None) == getattr(theirs, key, None)
    assert {type(module).__name__ for module in applied.modules()} >= {
        "Float8Linear",
        "MXFP8Linear",
        "Linear",
    }


@pytest.mark.parametrize("triple", [("fp8",) * 3, ("nvfp4",) * 3])
def test_files_for_gpus_alone_are_python_and_select_their_layers(triple: Triple) -> None:
    exported = export({f"blocks.{i}.up": triple for i in range(3)} | {"head": ("bf16",) * 3})
    namespace: dict[str, object] = {}
    exec(compile(exported.text, "torchao_precision.py", "exec"), namespace)
    assert '"blocks.*.up"' in exported.text
    assert "head" not in exported.text


@pytest.mark.parametrize(("name", "multiple"), [("fp8_row", 16), ("mxfp8", 32), ("fp8", 128), ("nvfp4", 128)])
def test_the_file_says_and_checks_what_widths_must_be_multiples_of(name: str, multiple: int) -> None:
    """All groups are checked before the first layer changes: torchao itself would stop halfway."""
    exported = export({"a": ("fp8_tensor",) * 3, "b": (name,) * 3})
    assert f"must be multiples of {multiple}." in exported.text
    namespace: dict[str, object] = {}
    exec(compile(exported.text, "torchao_precision.py", "exec"), namespace)
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(multiple, multiple + 8)})
    with pytest.raises(
        ValueError, match=f"b has {multiple} inputs and {multiple + 8} outputs.*of {multiple}"
    ):
        namespace["convert"](model)  # type: ignore[operator]
    assert type(model["a"]) is nn.Linear


def test_emulated_float8_takes_any_width() -> None:
    exported = export({"a": ("fp8_row",) * 3}, emulate=True)
    assert not exported.notes
    namespace: dict[str, object] = {}
    exec(compile(exported.text, "torchao_precision.py", "exec"), namespace)
    model = nn.ModuleDict({"a": nn.Linear(5, 7)})
    namespace["convert"](model)  # type: ignore[operator]
    assert type(model["a"]).__name__ == "Float8Linear"


@pytest.mark.slow
def test_a_file_is_written_without_torch_and_torchao() -> None:
    program = """
import sys
sys.modules["torch"] = sys.modules["torchao"] = None
from scrimp.export import to_torchao
from scrimp.precision import LinearPrecision
print(len(to_torchao({"a": LinearPrecision.of("fp8_row")}).text))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 100
