"""What this machine is and what a run cost on it: device, peak rates, memory, throughput."""

from scrimp.measure.device import Device, resolve_device
from scrimp.measure.memory import MemoryMeter, host_memory_available
from scrimp.measure.peaks import device_peaks
from scrimp.measure.throughput import recall_throughput, remember_throughput

__all__ = [
    "Device",
    "MemoryMeter",
    "device_peaks",
    "host_memory_available",
    "recall_throughput",
    "remember_throughput",
    "resolve_device",
]
