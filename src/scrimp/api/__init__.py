"""Scrimp from Python, each name imported on first use by `scrimp` itself: what predicts layouts needs no torch."""
