"""Hugging Face folders: config.json, tensor names, safetensors in and out."""

from scrimp.models.huggingface.architecture import (
    architecture_from_config,
    config_from_architecture,
    read_architecture,
)
from scrimp.models.huggingface.export import export_model, write_weights
from scrimp.models.huggingface.load import check_weights, load_weights, stream_weights

__all__ = [
    "architecture_from_config",
    "check_weights",
    "config_from_architecture",
    "export_model",
    "load_weights",
    "read_architecture",
    "stream_weights",
    "write_weights",
]
