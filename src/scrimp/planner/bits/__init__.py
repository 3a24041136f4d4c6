"""Bits: which number format each GEMM runs in, chosen from measured statistics under a budget."""
