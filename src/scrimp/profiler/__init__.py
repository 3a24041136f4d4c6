"""What this machine is and what a run cost on it: device, peak rates, memory, throughput."""

from scrimp.profiler.device import Device, resolve_device
from scrimp.profiler.peaks import device_peaks, peaks_of
from scrimp.profiler.process_memory import MemoryMeter
from scrimp.profiler.throughput import recall_throughput, remember_throughput

__all__ = [
    "Device",
    "MemoryMeter",
    "device_peaks",
    "peaks_of",
    "recall_throughput",
    "remember_throughput",
    "resolve_device",
]
