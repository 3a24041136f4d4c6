"""Runs a model whose blocks are on several ranks: the order of their passes, and the stages of one rank."""

from scrimp.runtime.pipeline.orders import Action, held_by, orders_of
from scrimp.runtime.pipeline.stages import Boundary, PassSums, Stages, first_rows

__all__ = ["Action", "Boundary", "PassSums", "Stages", "first_rows", "held_by", "orders_of"]
