"""Formats that are chosen while a run trains: the cycle, its question, its guards, its state."""
