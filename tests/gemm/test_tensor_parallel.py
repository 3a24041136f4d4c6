"""Tensor parallelism: planned layers on pieces give what the whole layer gives, in every recipe.

Sharded and whole runs add partial sums in another order, so they are compared by norm, to a few fp32 roundings.
Nothing that such a difference enters is quantized again: partial sums leave the model (Y of the second layer, dX of
the first), and what lies between the two layers is not summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from planned_cases import QUANTIZED, random, same, start, watching_gemms
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from scrimp.errors import ScrimpError
from scrimp.gemm.convert import PlannedModel

pytestmark = pytest.mark.slow

RANKS = 2
WIDTH, HIDDEN = 256, 512
TOLERANCE = 5e-7
STEP = 3


class Mlp(nn.Module):
    """Two layers that tensor parallelism cuts one after the other."""

    def __init__(self, hidden: int = HIDDEN, *, bias: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden, bias=bias)
        self.down = nn.Linear(hidden, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.silu(self.up(self.norm(x))))
        return y


def mlp(hidden: int = HIDDEN, *, bias: bool = False) -> Mlp:
    """Always the same one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Mlp(hidden, bias=bias)


@dataclass(frozen=True)
class Case:
    """One way to cut a planned model."""

    recipe: str
    saved: str | None = None
    bias: bool = False
    is_sequence_cut: bool = False
    planned_first: bool = True
    by_hand: bool = False
    """`locate_shards` is called, as before compiling."""

    def styles(self) -> dict[str, ParallelStyle]:
        """As a user gives them to `parallelize_module`."""
        if not self.is_sequence_cut:
            return {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }


CASES = (
    *(Case(recipe) for recipe in QUANTIZED),
    *(Case(recipe, bias=True, saved="fp32") for recipe in ("fp32", "fp8_tensor", "nvfp4")),
    *(Case(recipe, bias=True, is_sequence_cut=True) for recipe in ("fp8", "fp8_tensor", "nvfp4")),
    Case("nvfp4", planned_first=False),
    Case("mxfp4", by_hand=True, bias=True),
    Case("fp8_row", planned_first=False, by_hand=True),
)


def batch() -> Tensor:
    """Columns of very different size, so that no two ranks see the same largest magnitude."""
    x = random(2, 128, WIDTH)
    x[..., ::7] *= 9
    return x


def loss_of(y: Tensor) -> Tensor:
    """Different gradients everywhere."""
    weights = random(*y.shape, seed=4) * torch.exp2(random(*y.shape[:-1], 1, seed=5))
    return (y * weights).sum()


def passed(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The result, the input's gradient and the parameters', whole."""
    x = x.detach().requires_grad_()
    y = whole(model(x))
    loss_of(y).backward()
    assert x.grad is not None
    gradients = {name: p.grad for name, p in model.named_parameters()}
    found = {"y": y.detach(), "x": whole(x.grad)}
    return found | {name: whole(grad).detach() for name, grad in gradients.items() if grad is not None}


def whole(x: Tensor) -> Tensor:
    """All pieces of a DTensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def plan_of(model: nn.Module, case: Case) -> PlannedModel:
    """Both linear layers by one recipe."""
    plan = start(model, dict.fromkeys(("up", "down"), same(case.recipe, case.saved)))
    plan.clock.begin(STEP)
    return plan


def cut(case: Case, hidden: int = HIDDEN) -> tuple[Mlp, PlannedModel]:
    """A planned model on the pieces of all ranks."""
    mesh, model = init_device_mesh("cpu", (RANKS,)), mlp(hidden, bias=case.bias)
    if not case.planned_first:
        parallelize_module(model, mesh, case.styles())
    plan = plan_of(model, case)
    if case.planned_first:
        parallelize_module(model, mesh, case.styles())
    if case.by_hand:
        plan.locate_shards()
    return model, plan


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative to the norm of what is expected, by name."""
    assert found.keys() == expected.keys()
    return {name: float((found[name] - y).norm() / y.norm()) for name, y in expected.items()}


def measure(rank: int) -> list[tuple[dict[str, float], int]]:
    """Per case: distances from the whole model's run, and how many planned GEMMs ran here."""
    outcomes = []
    for case in CASES:
        entire = mlp(bias=case.bias)
        plan_of(entire, case)
        expected = passed(entire, batch())
        model, _ = cut(case)
        x = batch()
        if case.is_sequence_cut:
            x = distribute_tensor(x, init_device_mesh("cpu", (RANKS,)), [Shard(1)])
        with watching_gemms() as ran:
            found = passed(model, x)
        outcomes.append((errors(found, expected), len(ran)))
    return outcomes


Group = dict[str, list[Any]]


def everything(rank: int) -> dict[str, Any]:
    """What all fast tests look at, by function: starting processes costs more than the work."""
    return {act.__name__: act(rank) for act in (measure, forget, odd, refusals, undo, compiled)}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Group:
    """Results of every function, of both ranks."""
    found = spawn(RANKS, everything, tmp_path_factory.mktemp("tp"))
    return {name: [of_rank[name] for of_rank in found] for name in found[0]}


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_pieces_give_the_result_and_gradients_of_the_whole_layer(group: Group, number: int) -> None:
    for of_rank in group["measure"]:
        found, gemms = of_rank[number]
        # A layer that is plain everywhere goes torch's way, unobserved.
        assert gemms == (0 if CASES[number].recipe == "fp32" else 2 * 3)
        assert {"y", "x", "up.weight", "down.weight"} <= found.keys()
        for name, distance in found.items():
            # The norm is not planned; a cut sequence adds its gradients in another order.
            assert distance <= (1e-6 if name.startswith("norm") else TOLERANCE), name


SPANNED = ("fp8_tensor", "nvfp4", "mxfp4")


def forget(rank: int) -> dict[tuple[str, str], float]:
    """Largest distances where pieces do not know their place, or the largest numbers of the others."""
    found = {}
    for lost in ("place", "maximum"):
        for recipe in SPANNED:
            entire, (model, plan) = mlp(), cut(Case(recipe, by_hand=True))
            plan_of(entire, Case(recipe))
            for layer in plan.layers.values():
                assert layer.shard is not None
                assert len(layer.shard.begins) == RANKS
                if lost == "place":
                    layer.shard.features = (range(layer.shard.size // RANKS),)
                else:
                    layer.shard.reduce_amax = lambda amax: None
            found[lost, recipe] = max(errors(passed(model, batch()), passed(entire, batch())).values())
    return found


def test_the_comparison_sees_a_lost_place_or_a_lost_maximum(group: Group) -> None:
    seen = {("place", "nvfp4"), ("place", "mxfp4"), ("maximum", "fp8_tensor"), ("maximum", "nvfp4")}
    for kind, distance in group["forget"][1].items():
        assert (distance > 1e-3) if kind in seen else (distance <= TOLERANCE), kind


# ---- odd cuts


@dataclass(frozen=True)
class Odd:
    """One layer whose features the ranks cannot share evenly; of one feature the second rank has nothing."""

    recipe: str
    inputs: int
    outputs: int

    def style(self) -> ParallelStyle:
        """Whichever side is odd is cut."""
        if self.outputs % RANKS:
            return ColwiseParallel(output_layouts=Replicate())
        return RowwiseParallel(input_layouts=Replicate())


ODD = (
    Odd("fp8_tensor", 64, 37),
    Odd("fp8_row", 64, 1),
    Odd("fp8_tensor", 37, 64),
    Odd("fp8_row", 1, 64),
    Odd("fp8_tensor", 1, 64),
)


def odd(rank: int) -> list[dict[str, float]]:
    """Distances from the whole layer's run, per case."""
    outcomes = []
    for case in ODD:
        found = []
        for is_cut in (False, True):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(case.inputs, case.outputs, bias=case.outputs > 1))
            start(model, case.recipe)
            if is_cut:
                parallelize_module(model, init_device_mesh("cpu", (RANKS,)), {"0": case.style()})
            found.append(passed(model, random(5, case.inputs)))
        outcomes.append(errors(found[1], found[0]))
    return outcomes


def test_pieces_of_unequal_size_and_empty_ones_are_exact_too(group: Group) -> None:
    for of_rank in group["odd"]:
        for case, found in zip(ODD, of_rank, strict=True):
            assert max(found.values()) <= TOLERANCE, (case, found)


# ---- refusals


def message(act: Callable[[], Any]) -> str:
    """What a refusal says; empty where nothing is refused."""
    try:
        act()
    except ScrimpError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(rank: int) -> dict[str, str]:
    """What each forbidden use is answered with."""
    x = random(4, WIDTH)
    said = {}
    for recipe in ("fp8", "fp4", "mxfp8", "nvfp4", "fp8_tensor"):
        model, plan = cut(Case(recipe), hidden=192)
        said[recipe] = message(lambda model=model: model(x))
    model, plan = cut(Case("mxfp8"), hidden=192)
    plan.replan({"up": same("mxfp8", "fp8")})
    said["saved"] = message(lambda: model(x))
    model, _ = cut(Case("fp8_row"))
    said["plain input"] = message(lambda: model.up.forward(x))
    mesh = init_device_mesh("cpu", (1, RANKS))
    for name, placements in {"two axes": [Shard(0), Shard(1)], "copies": [Replicate(), Shard(0)]}.items():
        layer = nn.Linear(WIDTH, HIDDEN, bias=False)
        start(layer, "fp8_tensor")
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, placements))
        said[name] = message(
            lambda layer=layer: layer(distribute_tensor(x, mesh, [Replicate(), Replicate()]))
        )
    return said


def test_layouts_that_no_piece_can_run_are_refused_by_name(group: Group) -> None:
    for said in group["refusals"]:
        for recipe in ("fp8", "fp4"):
            assert said[recipe].startswith(f"PlanError: up.fprop cannot run in {recipe} on ranks")
            assert "a piece that begins at 96 of its 192 outputs; groups of 128 outputs of W" in said[recipe]
        assert said["mxfp8"] == said["nvfp4"] == said["fp8_tensor"] == ""  # 96 is three groups of 32
        assert said["saved"] == ""  # X of a column-parallel layer is whole: its codes straddle nothing
        assert said["plain input"].startswith("ModelError: up has a sharded weight and an ordinary input")
        for name in ("two axes", "copies"):
            assert "this layout of the weight cannot be planned" in said[name]


# ---- back, and compiled


def undo(rank: int) -> tuple[dict[str, float], list[str], bool]:
    """Distances of a swapped-out model from an ordinary one, its classes, and whether weights stayed the same."""
    plain = mlp(bias=True)
    model, plan = cut(Case("fp4", bias=True))
    model(batch())
    weight = model.up.weight
    plan.swap_out()
    distances = errors(passed(model, batch()), passed(plain, batch()))
    return distances, [type(m).__name__ for m in (model.up, model.down)], weight is model.up.weight


def test_swapping_out_leaves_an_ordinary_tensor_parallel_model(group: Group) -> None:
    for distances, classes, is_same in group["undo"]:
        assert max(distances.values()) <= TOLERANCE
        assert classes == ["Linear", "Linear"]
        assert is_same


def compiled(rank: int) -> tuple[str, dict[str, float]]:
    """What a compiled model says before it knows its shards; and its distances from eager after."""
    eager, _ = cut(Case("nvfp4"))
    expected = passed(eager, batch())
    model, plan = cut(Case("nvfp4"))
    try:
        torch.compile(model, backend="aot_eager", fullgraph=True)(batch())
        said = ""
    except Exception as error:
        said = str(error)
    torch._dynamo.reset()
    plan.locate_shards()
    model.compile(backend="aot_eager", fullgraph=True)
    return said, errors(passed(model, batch()), expected)


def test_located_shards_compile_without_a_break_and_unlocated_ones_say_what_to_call(group: Group) -> None:
    for said, distances in group["compiled"]:
        assert "locate_shards" in said
        assert max(distances.values()) <= TOLERANCE


# ---- with FSDP2


def both(rank: int, recipe: str) -> dict[str, float]:
    """Distances on a 2 x 2 mesh: batches over one axis, features over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    share = batch()[mesh["dp"].get_local_rank()].unsqueeze(0)
    case = Case(recipe)
    expected: dict[str, Tensor] = {}
    for row in range(2):
        entire = mlp()
        plan_of(entire, case).clock.begin(STEP, first_row=row * share.shape[1])
        for name, grad in passed(entire, batch()[row : row + 1]).items():
            expected[name] = expected.get(name, torch.zeros(())) + grad / 2
    model = mlp()
    plan = plan_of(model, case)
    parallelize_module(model, mesh["tp"], case.styles())
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    plan.clock.begin(STEP, first_row=mesh["dp"].get_local_rank() * share.shape[1])
    found = passed(model, share)
    for name in ("y", "x"):
        dist.all_reduce(found[name], group=mesh["dp"].get_group())
        found[name] /= 2
    return errors(found, expected)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_tensor", "nvfp4"])
def test_fsdp_of_tensor_parallel_layers_gives_the_gradients_of_one_process(
    tmp_path: Path, recipe: str
) -> None:
    for found in spawn(4, both, tmp_path, recipe):
        for name, distance in found.items():
            assert distance <= (1e-6 if name.startswith("norm") else 3e-7), name
