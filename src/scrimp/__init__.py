"""Scrimp trains language models with the bits, bytes and devices that its user has."""

__version__ = "0.1.0"
