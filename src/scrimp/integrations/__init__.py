"""Scrimp inside other trainers. `integrations.transformers` needs transformers, which the core does not."""
