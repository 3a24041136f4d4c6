"""Plans for other trainers: exported to what clusters use, with what cannot be expressed named."""

from scrimp.adapters.export import PrecisionExport, Target, export_precision
from scrimp.adapters.fit import Inexpressible
from scrimp.adapters.names import Names, huggingface_names, megatron_names, of_stage, precisions_of, rename
from scrimp.adapters.torchao import TorchaoExport, TorchaoGroup, to_torchao
from scrimp.adapters.transformer_engine import TransformerEngineExport, to_transformer_engine

__all__ = [
    "Inexpressible",
    "Names",
    "PrecisionExport",
    "Target",
    "TorchaoExport",
    "TorchaoGroup",
    "TransformerEngineExport",
    "export_precision",
    "huggingface_names",
    "megatron_names",
    "of_stage",
    "precisions_of",
    "rename",
    "to_torchao",
    "to_transformer_engine",
]
