"""Bytes: what each block and each tensor class does so that a step fits the device and the host.

`placement` is the form of a choice. `costs` holds what was measured or derived, `states` adds it up to peaks,
`timeline` to seconds, `search` finds the fastest choice that fits.
"""
