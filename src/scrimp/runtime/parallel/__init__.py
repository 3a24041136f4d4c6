"""Lays a model over ranks: the mesh of a layout, and what is applied to the model on it, in which order."""

from scrimp.runtime.parallel.gradient_sums import GradientSums
from scrimp.runtime.parallel.mesh import ONE_RANK, RankMesh
from scrimp.runtime.parallel.parallelise import (
    has_whole_copies,
    is_sharded,
    parallelise,
    part_of_rank,
    reduce_gradients,
    units,
)

__all__ = [
    "ONE_RANK",
    "GradientSums",
    "RankMesh",
    "has_whole_copies",
    "is_sharded",
    "parallelise",
    "part_of_rank",
    "reduce_gradients",
    "units",
]
