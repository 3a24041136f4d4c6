"""Scrimp in any PyTorch loop: `measure` a model in training, `plan` its formats, `apply` the plan."""

from scrimp.api.pytorch import apply, measure, plan

__all__ = ["apply", "measure", "plan"]
