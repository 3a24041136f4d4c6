"""Harm by statistics, beside SNIP's own plan."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from profiles import names, profile
from published_settings import LLAMA_8B, setting

from scrimp.config import preset
from scrimp.errors import PlanError
from scrimp.models import place, spec_of
from scrimp.models.shapes import sizes_of
from scrimp.planner.layout.format_budget import FormatBudget
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.search import Candidate, search
from scrimp.planner.layout.setting import Setting
from scrimp.planner.precision.budget import Budget
from scrimp.planner.precision.choose import Question as OwnQuestion
from scrimp.planner.precision.choose import choose

SPEC = spec_of(preset("llama-1b"))
MODEL = sizes_of(SPEC)
FORMATS = ("bf16", "nvfp4")
SHAPES = [(one.outputs, one.inputs) for block in MODEL.blocks for one in block.linears]
STATISTICS = profile(names(len(MODEL.blocks)), shapes=SHAPES, seed=3)


def asked(formats: FormatBudget) -> Question:
    like = setting(LLAMA_8B, "4xb200", global_batch=64)
    return Question(
        model=MODEL,
        cluster=like.cluster,
        sequence=4096,
        global_batch=64,
        software=like.software,
        formats=formats,
    )


def fastest(formats: FormatBudget) -> Candidate:
    """The fastest of a few layouts, with a pipeline and without."""
    return search(
        dataclasses.replace(asked(formats), given={"micro_batch": 4, "tp": 1, "cp": 1, "virtual": 1}),
        has_families=False,
    ).best[0]


def harm(one: Setting, formats: FormatBudget) -> float:
    quality = formats.quality(MODEL)
    found = 0.0
    for number, (block, plan) in enumerate(zip(MODEL.blocks, one.blocks, strict=True)):
        own = dict(plan.formats)
        for linear in block.linears:
            for gemm in ("fprop", "dgrad", "wgrad"):
                recipe = own.get(f"{linear.name}.{gemm}", "bf16")
                found += quality.harm(number, linear.name, gemm, recipe)
    return found


def test_the_harm_of_a_share_is_that_of_snips_own_plan() -> None:
    formats = FormatBudget(names=FORMATS, share=0.6, statistics=STATISTICS)
    quality = formats.quality(MODEL)
    own = choose(OwnQuestion(STATISTICS.select(FORMATS), Budget(fp4_flops=0.6)))
    found = 0.0
    for layer, recipes in own.recipes(STATISTICS.select(FORMATS)).items():
        block, linear = place(layer)
        assert block is not None
        pairs = zip(("fprop", "dgrad", "wgrad"), recipes, strict=True)
        found += sum(quality.harm(block, linear, gemm, recipe) for gemm, recipe in pairs)
    assert quality.limit == pytest.approx(found)
    assert harm(fastest(formats).setting, formats) <= quality.limit


def test_more_harm_is_faster_and_is_kept() -> None:
    seconds = []
    for limit in (0.0, 0.1, 1.0):
        formats = FormatBudget(names=FORMATS, share=0.5, divergence=limit, statistics=STATISTICS)
        best = fastest(formats)
        assert harm(best.setting, formats) <= limit * (1 + 1e-6)
        seconds.append(best.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.8 * seconds[0]


def test_sensitive_products_keep_their_format() -> None:
    """One half of the model is a thousand times as sensitive: the other half goes to 4 bits."""
    layers, half = len(STATISTICS.layers), len(STATISTICS.layers) // 2
    flat = profile(STATISTICS.layers, shapes=SHAPES)
    ones = {name: np.ones_like(getattr(flat.batches[0], name)) for name in ("x", "w", "y", "g", "gx", "gw")}
    ones["gx"] = ones["gw"] = np.where(np.arange(layers) < half, 1e3, 1.0)
    even = np.ones_like(flat.batches[0].errors)
    even[:, :, 0] = 0.0
    rest = {
        "errors": even,
        "results": np.zeros_like(even),
        "losses": np.zeros_like(flat.batches[0].losses),
        "backward": np.zeros_like(flat.batches[0].backward),
        "forward": np.zeros_like(flat.batches[0].forward),
    }
    batch = dataclasses.replace(flat.batches[0], **ones, **rest)
    measured = dataclasses.replace(flat, batches=(batch,))
    formats = FormatBudget(names=FORMATS, share=0.5, divergence=0.001, statistics=measured)
    best = fastest(formats).setting
    fprop = [sum(name.endswith("fprop") for name, _ in plan.formats) for plan in best.blocks]
    middle = len(fprop) // 2
    assert min(fprop[middle:]) > max(fprop[:middle])


def test_statistics_of_another_model_are_refused() -> None:
    other = FormatBudget(names=FORMATS, share=0.5, statistics=profile(names(2)))
    with pytest.raises(PlanError, match="of another model"):
        search(asked(other))
    lacking = FormatBudget(names=("bf16", "mxfp4"), share=0.5, statistics=STATISTICS)
    with pytest.raises(PlanError, match="mxfp4"):
        search(asked(lacking))


def test_a_budget_below_the_harm_of_every_format_is_named() -> None:
    formats = FormatBudget(names=("nvfp4", "fp8"), share=0.5, divergence=1e-9, statistics=STATISTICS)
    with pytest.raises(PlanError, match=r"keeps to budget\.divergence") as wrong:
        search(asked(formats))
    least = float(str(wrong.value.expected).split()[2])
    kept = dataclasses.replace(formats, divergence=1.01 * least)
    assert kept.quality(MODEL).limit == 1.01 * least
