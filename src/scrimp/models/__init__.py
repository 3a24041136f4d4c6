"""What a model is: one specification that planner, profiler, runtime, statistics and exports ask.

Importing it needs no torch. A decoder kind is one file in `scrimp.models.kinds` and one line that names it there.
"""

from scrimp.models.kinds import FAMILIES, all_kinds, spec_of
from scrimp.models.spec import (
    EMBEDDING_WEIGHT,
    AttentionSpec,
    BlockSpec,
    Elsewhere,
    LinearSpec,
    ModelSpec,
    Rope,
    Traffic,
    VectorSpec,
    full_name,
    place,
)
from scrimp.precision import HEAD

__all__ = [
    "EMBEDDING_WEIGHT",
    "FAMILIES",
    "HEAD",
    "AttentionSpec",
    "BlockSpec",
    "Elsewhere",
    "LinearSpec",
    "ModelSpec",
    "Rope",
    "Traffic",
    "VectorSpec",
    "all_kinds",
    "full_name",
    "place",
    "spec_of",
]
