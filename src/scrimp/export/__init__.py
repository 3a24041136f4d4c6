"""Plans of formats and of layouts for other trainers: exported to what clusters use, with what cannot be expressed
named."""

from scrimp.export.export_precision import (
    ExportTarget,
    PrecisionExport,
    export_precision,
    plan_for,
    runs_together,
    whole_layer_recipes,
)
from scrimp.export.fit import Inexpressible
from scrimp.export.layer_names import Names, huggingface_names, megatron_names, of_stage, rename
from scrimp.export.layout_file import LayoutExport, LayoutTarget, export_layout
from scrimp.export.torchao import TorchaoExport, to_torchao
from scrimp.export.torchao_groups import TorchaoGroup
from scrimp.export.transformer_engine import TransformerEngineExport, to_transformer_engine

__all__ = [
    "ExportTarget",
    "Inexpressible",
    "LayoutExport",
    "LayoutTarget",
    "Names",
    "PrecisionExport",
    "TorchaoExport",
    "TorchaoGroup",
    "TransformerEngineExport",
    "export_layout",
    "export_precision",
    "huggingface_names",
    "megatron_names",
    "of_stage",
    "plan_for",
    "rename",
    "runs_together",
    "to_torchao",
    "to_transformer_engine",
    "whole_layer_recipes",
]
