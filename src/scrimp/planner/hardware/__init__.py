"""Hardware that need not be here: devices, nodes and clusters by name or file, each number with its source.

`8xh100` or a file becomes a `Cluster` by `load_hardware`; `devices/` and `nodes/` hold what ships.
"""

from scrimp.planner.hardware.read import DEVICES, NODES, is_file, load_device, load_hardware, load_node
from scrimp.planner.hardware.schema import (
    Achieved,
    Cluster,
    Device,
    HostLink,
    InnerSize,
    Kind,
    Link,
    Links,
    Node,
    NodeGroup,
    Peak,
    Shape,
)

__all__ = [
    "DEVICES",
    "NODES",
    "Achieved",
    "Cluster",
    "Device",
    "HostLink",
    "InnerSize",
    "Kind",
    "Link",
    "Links",
    "Node",
    "NodeGroup",
    "Peak",
    "Shape",
    "is_file",
    "load_device",
    "load_hardware",
    "load_node",
]
