"""One decoder for the Llama family, its loss, its first weights, and text from it."""

from scrimp.model.attention import AttentionLayout
from scrimp.model.decoder import Block, Decoder
from scrimp.model.generation import generate
from scrimp.model.huggingface import (
    check_weights,
    export_model,
    load_weights,
    read_architecture,
    stream_weights,
)
from scrimp.model.initialise import initialise
from scrimp.model.loss import LossSums

__all__ = [
    "AttentionLayout",
    "Block",
    "Decoder",
    "LossSums",
    "check_weights",
    "export_model",
    "generate",
    "initialise",
    "load_weights",
    "read_architecture",
    "stream_weights",
]
