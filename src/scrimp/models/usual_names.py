"""What layers are usually called in anybody's models, by the ends of their names.

Scrimp's own kinds say what their layers are (`scrimp.models.spec`). Of other people's models names are all there is:
which kind a linear layer is, which one is the head, which are routers of experts.

Checked  tests/planner/precision/test_policies.py, tests/api/test_modules.py
"""

from __future__ import annotations

LINEAR_KINDS = (
    ("down", "down_proj", "fc2", "w2", "linear_fc2", "dense_4h_to_h", "mlp.c_proj"),
    ("out", "o_proj", "out_proj", "wo", "linear_proj", "dense", "c_proj", "proj"),
    ("v", "v_proj", "wv", "value"),
    ("k", "k_proj", "wk", "key"),
    ("q", "q_proj", "wq", "query", "qkv", "qkv_proj", "linear_qkv", "query_key_value", "in_proj", "c_attn"),
    ("up", "up_proj", "gate_up", "gate_up_proj", "linear_fc1", "fc1", "w3", "dense_h_to_4h", "c_fc"),
    ("gate", "gate_proj", "w1"),
)
"""Kinds of linear layers in the order in which quantization harms them, the worst first."""
HEADS = (
    "lm_head",
    "head",
    "score",
    "classifier",
    "output",
    "output_layer",
    "embed_out",
    "unembed",
    "qa_outputs",
)
"""Layers that give a model's result."""
ROUTERS = ("router",)
"""Layers that choose experts."""


def linear_kind(layer: str) -> int:
    """Place of a layer's kind in `LINEAR_KINDS`; after all of them where no name fits."""
    name = f".{layer}".lower()
    ends = (tuple(f".{end}" for end in kind) for kind in LINEAR_KINDS)
    return next((i for i, kind in enumerate(ends) if name.endswith(kind)), len(LINEAR_KINDS))


def is_head(layer: str) -> bool:
    """Whether a layer has the usual name of a head."""
    return layer.rpartition(".")[2] in HEADS


def is_router(layer: str) -> bool:
    """Whether a layer has the usual name of a router."""
    return layer.rpartition(".")[2] in ROUTERS
