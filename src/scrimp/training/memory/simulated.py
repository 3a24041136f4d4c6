"""The memory of a rank's step, counted in one process that says it is one of many: a second opinion on a prediction.

Problem  A prediction of memory is a formula, and what a formula forgets nobody sees before the ranks are there.
Method   torch's back end "fake" stands for a process group of any size in which nothing is sent, and fake tensors have
         shapes and no memory. In them Scrimp's own model is laid over the mesh of the plan's degrees
         (`scrimp.runtime.realise`), runs the passes of its pipeline's stages in their order, and is updated: twice,
         since the first step lays out what later ones find. Every storage is counted by what it is for
         (`scrimp.profiler.memory_trace.by_category`). Fake CPU tensors take a GPU's way through the model, and those
         kernels' own memory is counted (`stand_ins`); gates save their inputs alone, as compiled ones do.
         Of a step's micro-batches as many run as are in flight at once, and one more: later ones take the same.
         Ranks that share experts send as many tokens to each (`balanced_experts`).
         Quantized products run emulated, as in a trace (`RememberedBackend`).
         What waits on the host is sent and fetched by the run's own code, over a link as late as its rules allow, to a
         host without memory (`scrimp.runtime.memory.nowhere`): no run has more on its device at once.
Limits   Refused by name: whole copies; weights, gradients and residuals on the host, and anything there beside a
         pipeline. Moments may leave without their masters, as a plan has it and no run does yet.
         What a caching allocator cannot use is no tensor, and what lies on the host is not counted.
         Fused kernels of quantized products take less than the reference. An H100's number of multiprocessors is taken.
         A setting knows its kernel of attention and not `train.deterministic`: where documents are masked, ordered sums
         are counted, in several copies, and a run with the setting false takes one.
Checked  tests/training/memory/test_simulated.py: bytes of shards by hand; torch's profiler on ranks that run; what
         leaves, beside the same setting without
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from scrimp.config import Architecture, OptimizerConfig
from scrimp.config.resolved import ResolvedLayout
from scrimp.data import Batch
from scrimp.errors import PlanError
from scrimp.models import full_name, spec_of
from scrimp.models.flash import STAND_IN, Gpu
from scrimp.models.model import Model
from scrimp.optim import build
from scrimp.optim.update import PIECE_ELEMENTS
from scrimp.planner import Plan
from scrimp.planner.layout.kernels import TORCH
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, Setting
from scrimp.planner.layout.stages import block_plans, blocks_of_stages
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.plan import Figures, Fingerprint, Layout, rows_of
from scrimp.precision import RECIPES, parse_rules
from scrimp.profiler.memory_trace.by_category import (
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    CategoryTracker,
)
from scrimp.profiler.memory_trace.remembered import RememberedBackend
from scrimp.profiler.memory_trace.stand_ins import (
    GRANULES,
    DeviceFunctions,
    standing_for,
    with_entry,
    workspace_rule,
)
from scrimp.profiler.memory_trace.trace import StillClock
from scrimp.runtime import Executable, realise
from scrimp.runtime.memory import HostRoom
from scrimp.runtime.memory.nowhere import EndlessArena, LatestLink
from scrimp.runtime.parallel import RankMesh, units
from scrimp.runtime.parallel.parallelise import groups_of
from scrimp.runtime.passes import run_passes
from scrimp.training.memory.balanced_experts import balance_experts
from scrimp.world import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

LEVELS = {NONE: "keep", SELECTIVE: "norms", FULL: "block"}
"""Recomputation of a setting to the level of a block's activations that carries it out."""
UNCOMPILED = "scrimp-eager"
"""The software whose blocks are not compiled: all that Scrimp runs beside zbv and dualpipev."""
_STEPS = 2
OTHER = "other"
"""Tokens and targets."""


@dataclass(frozen=True)
class SimulatedRank:
    """What was counted of one rank of a pipeline."""

    rank: int
    """Number of the rank in the pipeline."""
    categories: dict[str, int]
    """Bytes when most lived, by what they were for."""
    most: dict[str, int]
    """Most bytes of each category, each at its own time."""

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.categories.values())


def simulate(
    setting: Setting,
    architecture: Architecture,
    ranks: Sequence[int],
    *,
    device: DeviceFunctions = "cuda",
) -> list[SimulatedRank]:
    """Count the memory of a step on some ranks of a pipeline, one after another.

    Args:
        setting: of Scrimp's own step.
        architecture: of the setting's model.
        ranks: of the pipeline.
        device: whose way through the model is taken.

    Raises:
        PlanError: a setting that cannot be simulated, or a process that has a process group already.
    """
    refuse(setting)
    return [_rank(setting, architecture, rank, device) for rank in dict.fromkeys(ranks)]


def refuse(setting: Setting) -> None:
    """Refuse a setting that cannot be simulated, by name.

    Raises:
        PlanError: with what it was.
    """
    found = [(got, do) for applies, got, do in _reasons(setting) if applies]
    if found:
        raise PlanError(
            "this plan cannot be simulated",
            got="; ".join(got for got, _ in found),
            expected="a plan of Scrimp's own, whose weights and gradients are on the device",
            do="; ".join(dict.fromkeys(do for _, do in found)) + "; or leave --simulate out",
        )


def _reasons(setting: Setting) -> Iterator[tuple[bool, str, str]]:
    """What cannot be simulated: whether a setting has it, its name, and what to do."""
    layout, offload, name = setting.layout, setting.offload, setting.software.name
    held = ("weights", "gradients", "residuals")
    away = [one for one in held if getattr(offload, one)]
    own = name in ("scrimp", UNCOMPILED)
    yield not own, f"software {name}: Scrimp's own step is what is run", "plan for software scrimp"
    precision = setting.precision
    yield (
        precision not in RECIPES,
        f"precision {precision}: no recipe of Scrimp's",
        "name another --precision",
    )
    yield (
        bool(away),
        f"{', '.join(away)} on the host: of what lives there activations and optimizer states are counted",
        "plan with --memory.optimizer host, which leaves all else on the device, or --memory.optimizer device",
    )
    yield (
        offload.master and not offload.optimizer and setting.software.states.masters,
        "master weights on the host without moments: they visit with the optimizer's states",
        "plan with --memory.optimizer host, or --memory.optimizer device",
    )
    yield (
        layout.pp > 1 and _placement(setting).uses_host,
        f"layout.pp {layout.pp} beside what lives on the host: ranks of a pipeline keep all on their devices",
        "plan with --memory.optimizer device, without +offload, or with --layout.pp 1",
    )
    whole_copies = layout.dp > 1 and layout.shards == 1
    yield (
        whole_copies,
        f"layout.dp {layout.dp} beside fsdp 1: copies count who has a gradient",
        f"plan with --layout.fsdp {layout.dp} --layout.dp 1",
    )
    cuts_tokens = layout.tp == 1 or setting.sequence_parallel
    yield (
        not cuts_tokens,
        "sequence_parallel false: Scrimp's ranks of tp share the tokens",
        "plan with sequence_parallel",
    )


def _rank(setting: Setting, architecture: Architecture, rank: int, device: DeviceFunctions) -> SimulatedRank:
    layout = _carried_out(setting)
    with _fake_group(layout.ranks, rank * (layout.ranks // layout.pp)) as world:
        mesh = RankMesh(layout, world)
        # Made of numbers, which fake tensors have not.
        for name in ("devices", "copies_and_shards", "sparse"):
            getattr(mesh, name)
        gpu = Gpu(deterministic=setting.software.attention_kernel != TORCH)
        holders = _Holders()
        tracker = CategoryTracker(
            granule=GRANULES[device], workspace=workspace_rule(device, gpu), found=holders.gradients
        )
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        # What it remembers of `set_` holds storages: activations that left would live on.
        fake.cache_enabled = not _placement(setting).uses_host
        with (
            standing_for(device, gpu=gpu, compiled=setting.software.name != UNCOMPILED),
            with_entry(PIECE_ELEMENTS, PIECE_ELEMENTS[device]),
        ):
            holders.executable = _executable(setting, architecture, mesh, _both(fake, tracker), tracker)
            _keep_gathered(setting, holders.executable.model)
            balance_experts(holders.executable.model, int(setting.tokens) // layout.tp)
            with fake, tracker:
                _steps(setting, holders.executable, tracker)
        del holders
    gc.collect()  # modules and hooks hold one another
    categories = {name: size for name, size in tracker.at_peak.items() if size}
    return SimulatedRank(rank, categories, dict(tracker.most | Counter(categories)))


@contextlib.contextmanager
def _fake_group(size: int, rank: int) -> Iterator[World]:
    """A process group in which nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the back end

    if dist.is_initialized():
        raise PlanError(
            "a plan is simulated in one process alone",
            got=f"one of {dist.get_world_size():,} ranks",
            do="run scrimp plan --simulate without a launcher",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield World(rank, size)
    finally:
        dist.destroy_process_group()


def _carried_out(setting: Setting) -> ResolvedLayout:
    """The layout with what a setting leaves open as the prediction takes it."""
    layout, virtual = setting.layout, setting.layout.virtual or 1
    if layout.pp == 1:
        return dataclasses.replace(layout, virtual=1, schedule="1f1b", stages=None)
    schedule = layout.schedule
    if schedule == "auto":
        schedule = "interleaved" if virtual > 1 else "1f1b"
    sizes = ",".join(str(len(blocks)) for blocks in blocks_of_stages(setting))
    return dataclasses.replace(layout, virtual=virtual, schedule=schedule, stages=sizes)


def _executable(
    setting: Setting,
    architecture: Architecture,
    mesh: RankMesh,
    memory: contextlib.AbstractContextManager[None],
    tracker: CategoryTracker,
) -> Executable:
    backend = RememberedBackend()
    backend.tracker, backend.stands_for_cuda = tracker, bool(STAND_IN)
    device = torch.device("cpu")
    room = HostRoom(EndlessArena(), LatestLink(device)) if _placement(setting).uses_host else None
    with tracker.making(WEIGHTS):
        found = realise(
            _plan(setting, architecture, mesh.layout),
            architecture,
            lambda model: None,
            device=device,
            parameters="bf16",
            compute="bf16",
            loss_chunk=setting.software.loss_tokens or 0,
            choose=backend.choose,
            room=room,
            mesh=mesh,
            memory=memory,
        )
    if found.planned is not None:
        found.planned.clock = clock = StillClock()
        for layer in found.planned.layers.values():
            layer.clock = clock
    if found.host is not None:
        host = dataclasses.replace(found.host, masters_on_host=setting.offload.master)
        found = dataclasses.replace(found, host=host)
    return found


def _keep_gathered(setting: Setting, model: Model) -> None:
    """Leave the weights of some blocks whole after their forward passes."""
    if setting.layout.shards > 1:
        plans = block_plans(setting)
        for number, block in zip(model.part.blocks, model.blocks, strict=True):
            if plans[number].gathered:
                cast("FSDPModule", block).set_reshard_after_forward(False)


@contextlib.contextmanager
def _both(
    one: contextlib.AbstractContextManager[object], other: contextlib.AbstractContextManager[object]
) -> Iterator[None]:
    with one, other:
        yield


def _plan(setting: Setting, architecture: Architecture, layout: ResolvedLayout) -> Plan:
    """What the runtime reads of a plan."""
    spec = spec_of(architecture)
    blocks, states = rows_of(_placement(setting), "simulated")
    return Plan(
        fingerprint=Fingerprint("", setting.device.name, torch.__version__, layout.ranks),
        budget={},
        gemms=parse_rules(_rules(setting)).assign(spec.origins),
        blocks=blocks,
        states=states,
        layout=Layout(stages=[]),
        predicted=Figures(),
    )


def _placement(setting: Setting) -> Placement:
    """What blocks do with their activations, and where their states live."""
    plans = block_plans(setting)
    activations = tuple(LEVELS[one.recompute] + "+offload" * one.offload for one in plans)
    return Placement(activations, States.split(len(plans), optimizer=len(plans) * setting.offload.optimizer))


def _rules(setting: Setting) -> str:
    """The formats of a setting as a run's `precision` says them."""
    of_all = [f"*.{product}={name}" for product, name in setting.formats.items()]
    of_blocks = [
        f"{full_name(number, product)}={name}"
        for number, one in enumerate(block_plans(setting))
        for product, name in one.formats
    ]
    return ",".join([setting.precision, *of_all, *of_blocks])


def _steps(setting: Setting, executable: Executable, tracker: CategoryTracker) -> None:
    with tracker.making(OPTIMIZER):
        states = setting.software.states
        settings = OptimizerConfig(lr=1e-3, master_weights=states.masters, moments=states.moments)  # type: ignore[arg-type]
        optimizer = build(settings, executable, seed=0)
    for step in range(_STEPS):
        tracker.reset_peak()
        with tracker.making(OTHER):
            batches = [_batch(setting) for _ in range(_passes(setting))]
        run_passes(executable, batches, 1, step=step)
        executable.add_up_copies(optimizer.gradients)
        with tracker.making(OPTIMIZER):
            optimizer.step(1e-3)
        optimizer.zero_grad()


def _passes(setting: Setting) -> int:
    """Micro-batches that show what all of a step take."""
    layout, count = setting.layout, setting.micro_batches
    if layout.pp == 1:
        return min(count, 2)
    if layout.schedule == "gpipe":
        return count
    return min(count, 2 * layout.pp)


class _Batch(Batch):
    """A batch whose targets nobody can count."""

    def at(self, positions_T: Tensor) -> Batch:
        """As many positions, of no matter which tokens."""
        tokens = self.tokens_BT.new_empty(self.tokens_BT.shape[0], len(positions_T))
        return _Batch(tokens, torch.empty_like(tokens), None, tokens.numel())


def _batch(setting: Setting) -> Batch:
    tokens = torch.empty(setting.micro_batch, setting.sequence, dtype=torch.int64)
    return _Batch(tokens, torch.empty_like(tokens), None, tokens.numel())


class _Holders:
    """Finds gradients of weights where autograd has left them."""

    executable: Executable | None = None

    def gradients(self) -> dict[str, list[Tensor]]:
        """Those of what is gathered, and those of what lies here whole."""
        if self.executable is None:
            return {}
        model = self.executable.model
        shared = [one for unit in units(model) for group in groups_of(unit) for one in group.fsdp_params]
        whole = [getattr(one, "_unsharded_param", None) for one in shared]
        found = {GATHERED: [one.grad for one in whole if one is not None and one.grad is not None]}
        if not shared:
            found[GRADIENTS] = [one.grad for one in model.parameters() if one.grad is not None]
        return found
