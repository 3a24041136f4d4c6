from __future__ import annotations
import torch
from scrimp.gemm.layer import BackendChooser, reference_only
def backends_for(device: torch.device) -> BackendChooser:
    return reference_only
