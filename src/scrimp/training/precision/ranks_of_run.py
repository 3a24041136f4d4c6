"""The ranks of a run, as statistics of its model are reduced over them.

Problem  Statistics are sums to which each rank adds its part, divided by the ranks that have the same part
         (`scrimp.statistics.ranks`). The layout says who reads which rows; which parts there are of parameters, it
         does not.
Method   All ranks say which boxes they have of which parameters; those that say the same have copies. So shards, pieces
         of several ranges, experts, stages, and the two copies of tied words are all counted alike.
Checked  tests/training/precision/test_statistics_on_ranks.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from scrimp.gemm.grouped import grouped_modules
from scrimp.models.experts import RoutedBlock
from scrimp.parts import TensorPart, part_of
from scrimp.runtime import Executable
from scrimp.statistics import Ranks, SharedRows
from scrimp.statistics.ranks import NOTHING, Piece, in_model_order


def ranks_of(executable: Executable) -> Ranks | None:
    """The ranks that train a model, each of which calls this between two steps; None: there is one."""
    mesh, model = executable.mesh, executable.model
    if mesh.is_trivial:
        return None
    executable.settle()
    layout, shared, cut = mesh.layout, model.context_parallel, model.tensor_ranks
    data_size = layout.data_ranks * layout.cp
    rows = tokens = None
    if shared is not None:
        rows = SharedRows(shared.size, lambda length: shared.division(length).positions(shared.rank))
    if cut is not None:
        tokens = SharedRows(cut.size, lambda length: torch.tensor(cut.share(length)))
    return Ranks(
        mesh.world,
        data_size,
        mesh.world.rank // layout.tp % data_size,
        adds=True,
        rows=rows,
        tokens=tokens,
        stages=layout.pp,
        pieces=_pieces(executable),
        experts=_experts(executable),
    )


def _pieces(executable: Executable) -> dict[str, Piece]:
    parts = {name: part_of(parameter) for name, parameter in executable.model.named_parameters()}
    boxes = {
        name: [[list(box.offsets), list(box.local.shape)] for box in part.boxes()]
        for name, part in parts.items()
    }
    said = executable.mesh.world.gathered(boxes)
    found = dict.fromkeys(in_model_order([list(one) for one in said]), NOTHING)
    for name, part in parts.items():
        copies = sum(one.get(name) == boxes[name] for one in said)
        found[name] = Piece(part.shape, copies, _cutting(part))
    return found


def _cutting(part: TensorPart) -> Callable[[Tensor], Tensor]:
    """From a tensor like the whole to what lies here."""
    places = [box.place for box in part.boxes()]
    return lambda whole: torch.cat([whole[place] for place in places])


def _experts(executable: Executable) -> dict[str, tuple[int, int]]:
    """Where ranks share experts: the first that is here, and how many there are."""
    model = executable.model
    sharing = [block.mlp.ranks for block in model.each_block() if isinstance(block, RoutedBlock)]
    if not sharing or sharing[0] is None:
        return {}
    counts = {name: model.spec.linear(name).experts for name in grouped_modules(model)}
    return {name: (sharing[0].experts(count).start, count) for name, count in counts.items()}
