"""Bytes that a rank sends in the passes of a step under each layout, by formula: in float32, without recomputation.

A ring sends from each of n ranks B (n - 1) / n of what is gathered, reduced and scattered, or exchanged, and twice that
of what is reduced on all (`scrimp.profiler.collectives`). With m micro-batches of B rows of T tokens, width D, L blocks
of which a rank has its own, and 4 bytes a number, a rank sends

    fsdp, cp    4 s (F - 1) for each gathering of a unit, and for each reduction of its gradients; s are the numbers of
                a rank's rows of the unit's weights, as many on every rank (FSDP2 rounds up), F = fsdp x cp;
                weights gathered in FP8 take 1 byte a number, and 4 a scale of 128x128 numbers (or a maximum)
    dp          2 x 4 s (n - 1) / n for each reduction; of whole copies one a step, and one number a parameter
    tp          4 B T D (n - 1) / n for each of the exchanges of a block (two gather and two scatter forward, as many
                backward; half of them where experts take the place of an MLP) and at both ends (one each way);
                all-reduces of the gradients of norms and routers, of three numbers of each token for the loss, and
                of the mean squares of norms over all heads
    cp, rings   4 x 2 B t N K (3 n - 2) of a block: keys and values, n - 1 hops there and again in the backward pass,
                with n hops of their gradients; t = T / n
    cp, ulysses 2 x (n - 1) B t K 4 (G + H / n) of a block, G = H / n + 2 max(N / n, 1)
    ep, etp     4 x 4 D of each row whose expert is elsewhere, there and back, forward and backward; 8 E etp (n - 1) / n
                for the counts
    pp          4 B T D / tp for each boundary to another rank, there and back; both copies of tied words once a step

A unit of FSDP2 is gathered where it is not yet: under zero 3 in each pass, under 2 and 1 (and in blocks of
`layout.gathered`) once for a forward pass and the backward pass that follows. In a pipeline the order of passes
decides, which is walked here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from scrimp.config import closed
from scrimp.config.gathered import gathered_blocks
from scrimp.config.pipeline import Pipeline
from scrimp.config.resolved import ResolvedLayout
from scrimp.data import Batch
from scrimp.models import EMBEDDING_WEIGHT, spec_of
from scrimp.models.blocks import RMSNorm
from scrimp.models.expert_ranks import ExpertRanks, Journey
from scrimp.models.experts import RoutedBlock, RoutedMlp
from scrimp.models.model import Model
from scrimp.models.tensor_ranks import AllHeadsNorm
from scrimp.planner.axis_traffic import traffic_of
from scrimp.profiler.collectives import SHARES
from scrimp.runtime import Executable
from scrimp.runtime.parallel import is_sharded
from scrimp.runtime.pipeline.orders import passes_of
from scrimp.training.setup import Decisions

BYTES = 4
"""Bytes of a number."""
Sent = Counter[str]
"""Kind of collective to bytes, which need not be whole numbers."""


class Journeys:
    """The travels of tokens to experts that begin inside the context."""

    def __init__(self) -> None:
        self.found: list[Journey] = []

    def __enter__(self) -> Journeys:
        begin = self._begin = ExpertRanks.journey

        def journey(ranks: ExpertRanks, ends_E: Tensor) -> Journey:
            self.found.append(begin(ranks, ends_E))
            return self.found[-1]

        ExpertRanks.journey = journey
        return self

    def __exit__(self, *error: object) -> None:
        ExpertRanks.journey = self._begin


def bytes_sent(executable: Executable, batches: Sequence[Batch], journeys: Journeys) -> dict[str, float]:
    """By kind of collective, of this rank in a step.

    Args:
        batches: its micro-batches, all of one shape.
        journeys: of the step.
    """
    layout, model = executable.mesh.layout, executable.model
    found = Sent(dict.fromkeys(SHARES, 0))
    found += _of_units(executable, len(batches))
    passes = Sent()
    if layout.tp > 1:
        passes += _of_cut_layers(model, layout, batches[0])
    if layout.cp > 1:
        passes += _of_shared_rows(model, layout, batches[0])
    if model.spec.routing is not None:
        passes += _of_balance(model, layout)
    for kind, count in passes.items():
        found[kind] += count * len(batches)
    found["all-to-all"] += sum(_of_journey(one, model.architecture.width) for one in journeys.found)
    if executable.stages is not None:
        found["send"] += _of_stages(executable, executable.stages.pipeline, batches)
    return {kind: float(found[kind]) for kind in SHARES}


def axis_bytes(decisions: Decisions, sent: dict[str, float]) -> Iterator[tuple[float, float]]:
    """Counted bytes beside the planner's (`scrimp.planner.axis_traffic`), of layouts that it knows."""
    config = closed(decisions.config)
    layout, spec = config.layout, spec_of(decisions.architecture)
    if layout.pp > 1 or spec.routing is not None:
        return
    planned = {one.axes: one.num_bytes for one in traffic_of(spec, config)}
    rows = planned.get(("fsdp", "cp"), 0.0) + planned.get(("tp",), 0.0)
    yield sent["all-gather"] + sent["reduce-scatter"], rows
    yield sent["send"] + sent["all-to-all"], planned.get(("cp",), 0.0)
    if layout.tp == 1:  # copies of norms, and the loss, are not among the planner's
        yield sent["all-reduce"], planned.get(("dp",), 0.0)


def _of_units(executable: Executable, micro_batches: int) -> Sent:
    """What gathers weights and reduces gradients: FSDP2, or sums over whole copies."""
    layout, found = executable.mesh.layout, Sent()
    edp, spared = layout.ranks // (layout.ep * layout.etp), spared_by_codes(executable)
    if executable.sums is not None:
        own = [parameter.numel() + 1 for parameter in executable.model.parameters()]
        found["all-reduce"] += 2 * BYTES * sum(own) * (layout.dp - 1) / layout.dp
    if not is_sharded(executable.model, executable.mesh):
        return found
    for unit, numbers in _units(executable.model, layout).items():
        is_experts = unit.endswith("experts")
        shards, copies = (edp, 1) if is_experts else (layout.shards, layout.dp)
        gathered, reduced = _gatherings(executable, unit, micro_batches)
        found["all-gather"] += (BYTES * numbers - spared.get(unit, 0)) * (shards - 1) * gathered
        found["reduce-scatter"] += BYTES * numbers * (shards - 1) * reduced
        found["all-reduce"] += 2 * BYTES * numbers * (copies - 1) * reduced / copies
    return found


def spared_by_codes(executable: Executable) -> dict[str, int]:
    """By unit the bytes that a rank's rows are smaller where they are gathered in FP8."""
    layout, found = executable.mesh.layout, Counter[str]()
    if layout.pp > 1 or layout.tp > 1:
        return found
    for name, module in executable.model.named_modules():
        planned = getattr(module, "planned", None)
        unit = ".".join(name.split(".")[:2])
        if planned is None or ".experts" in name or not name.startswith("blocks."):
            continue
        if executable.model.get_submodule(unit)._compiled_call_impl is not None:
            continue
        recipes = {planned.precision.fprop, planned.precision.dgrad}
        rows, columns = module.weight.shape
        own = rows // layout.shards
        if recipes == {"fp8"} and rows % (128 * layout.shards) == 0:
            found[unit] += 3 * own * columns - 4 * (own // 128) * -(-columns // 128)
        elif recipes == {"fp8_tensor"} and rows % layout.shards == 0:
            found[unit] += 3 * own * columns - 4
    return found


def _units(model: Model, layout: ResolvedLayout) -> dict[str, int]:
    """Numbers that every rank has of what is gathered together: blocks, their experts, and the rest ("")."""
    found = Counter[str]()
    edp = layout.ranks // (layout.ep * layout.etp)
    for name, parameter in model.named_parameters():
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
        shards = layout.shards
        if ".experts." in name:
            unit, shards = f"{unit}.experts", edp
        rows, *columns = parameter.shape
        found[unit] += -(-rows // shards) * (columns[0] if columns else 1)
    return found


def _gatherings(executable: Executable, unit: str, micro_batches: int) -> tuple[int, int]:
    """How often a unit is gathered in a step, and how often its gradients are reduced."""
    layout = executable.mesh.layout
    stay = gathered_blocks(layout, executable.model.spec.num_blocks)
    is_kept = not unit or int(unit.split(".")[1]) in stay  # until the backward pass
    is_whole, gathered, backward = False, 0, 0
    for is_forward, blocks in _passes(executable, micro_batches):
        if unit and int(unit.split(".")[1]) not in blocks:
            continue
        gathered += not is_whole
        is_whole = is_forward and is_kept
        backward += not is_forward
    return gathered, 1 if layout.zero == 1 else backward


def _passes(executable: Executable, micro_batches: int) -> Iterator[tuple[bool, Sequence[int]]]:
    """The passes of this rank in their order: whether forward, and which blocks run."""
    if executable.stages is None:
        for _ in range(micro_batches):
            yield from ((True, executable.model.part.blocks), (False, executable.model.part.blocks))
        return
    pipeline = executable.stages.pipeline
    for one in passes_of(pipeline, micro_batches)[executable.mesh.pipeline_rank]:
        yield one.kind == "forward", pipeline.stages[one.stage]


def _of_cut_layers(model: Model, layout: ResolvedLayout, batch: Batch) -> Sent:
    """A micro-batch's exchanges between ranks of tp."""
    tokens, share = batch.tokens_BT.numel(), (layout.tp - 1) / layout.tp
    exchanges = sum(2 if isinstance(block, RoutedBlock) else 4 for block in model.each_block())
    exchanges += model.part.is_first + model.part.is_last
    stream = exchanges * BYTES * tokens * model.architecture.width * share
    numbers = 3 * tokens * model.part.is_last
    for module in model.modules():
        if isinstance(module, AllHeadsNorm):
            numbers += 2 * tokens  # mean squares, and their gradients
        elif isinstance(module, (RMSNorm, RoutedMlp)):
            numbers += (module.router if isinstance(module, RoutedMlp) else module).weight.numel()
    reduced = 2 * BYTES * numbers * share
    return Sent({"all-gather": stream, "reduce-scatter": stream, "all-reduce": reduced})


def _of_shared_rows(model: Model, layout: ResolvedLayout, batch: Batch) -> Sent:
    """A micro-batch's exchanges between ranks of cp."""
    n, tokens, found = layout.cp, batch.tokens_BT.numel() // layout.cp, Sent()
    for block in model.each_block():
        heads, kv_heads, size = block.attends.num_heads, block.attends.num_kv_heads, block.attends.head_size
        if layout.cp_method == "ulysses":
            passing = heads // n + 2 * max(kv_heads // n, 1) + heads // n
            found["all-to-all"] += 2 * (n - 1) * tokens * size * BYTES * passing
        else:
            found["send"] += BYTES * 2 * tokens * kv_heads * size * (3 * n - 2)
    return found


def _of_balance(model: Model, layout: ResolvedLayout) -> Sent:
    """The sums of the routing, two for each expert and block, which ranks that share rows add up for the penalty."""
    numbers = 2 * model.spec.routing.experts * len(model.part.blocks)
    shares = sum((n - 1) / n for n in (layout.tp, layout.cp))
    return Sent({"all-reduce": 2 * BYTES * numbers * shares})


def _of_journey(journey: Journey, width: int) -> float:
    """Counts of pairs; and rows that leave this rank or come to it, each of which it sends twice."""
    ranks = journey.ranks
    elsewhere = [rank for rank in range(ranks.size) if rank != ranks.rank]
    rows = sum(int(journey.own_nE[rank].sum() + journey.come_nE[rank].sum()) for rank in elsewhere)
    return 2 * BYTES * rows * width + journey.own_nE.nbytes * SHARES["all-to-all"](ranks.size)


def _of_stages(executable: Executable, pipeline: Pipeline, batches: Sequence[Batch]) -> float:
    """The boundaries of this rank's stages, and of tied words both copies' gradients."""
    rank, model = executable.mesh.pipeline_rank, executable.model
    boundary = BYTES * batches[0].tokens_BT.numel() * model.architecture.width / executable.mesh.layout.tp
    crossed = 0
    for stage in pipeline.stages_of(rank):
        crossed += stage + 1 < pipeline.num_stages and pipeline.rank_of(stage + 1) != rank
        crossed += stage > 0 and pipeline.rank_of(stage - 1) != rank
    last = pipeline.rank_of(pipeline.num_stages - 1)
    words = dict(model.named_parameters()).get(EMBEDDING_WEIGHT)
    is_copy = model.architecture.tied_embeddings and last != 0 and words is not None
    return crossed * len(batches) * boundary + (BYTES * _local(words).numel() if is_copy else 0)


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
