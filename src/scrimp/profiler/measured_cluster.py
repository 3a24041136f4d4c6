"""The ranks at hand as a cluster, from what all of them reach at the same time.

Problem  A search needs the rates of this machine. Ranks of one host share its cores and its memory: what one of them
         reaches alone, or what a data sheet says, none of them gets in a step.
Method   All ranks work at once, each for `WINDOW_S` on one thing after another::

             rate = calls in the window * FLOPs or bytes of a call / seconds of the window

         products in the working format; forward and backward pass of a planned layer in a lower one, its quantization
         included (an emulated format is slower than the working one, and is predicted so); causal attention; an
         addition beyond the caches; a linear layer of one row, which is what an operation costs the host. Then each
         collective, small and large, between two products: ranks that have computed come to it at different times, and
         a thread that sleeps must be woken, which collectives one behind the other do not show (ten times as much over
         gloo)::

             seconds = mean of (product, collective) - mean of (product)

         The mean over the ranks counts, and all of them know it. A device alone shares nothing: the best call counts.
         The rate of the working format stands at `bf16`, in which the search computes what no recipe is given for.
Limits   About a second. One size for each thing. All links are taken to be equal; what `scrimp doctor --ranks`
         finds of single pairs is not read. Prices and power are not known: 1 and 0. The CUDA part was not run.
Checked  tests/profiler/test_measured_cluster.py; benchmarks/ranks_planned.py: against measured steps
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from scrimp.gemm.layer import PlannedLayer, backward, forward
from scrimp.gemm.select import backends_for
from scrimp.launchers import num_cores
from scrimp.planner.hardware import (
    Achieved,
    Cluster,
    HostLink,
    InnerSize,
    Link,
    Links,
    Node,
    NodeGroup,
    Peak,
    Shape,
)
from scrimp.planner.hardware import Device as HardwareDevice
from scrimp.planner.layout.kernels import LONG_KEYS, NARROW_HEADS, WIDE_HEAD
from scrimp.planner.layout.software import Software, in_states, software, with_attention
from scrimp.planner.layout.state_formats import MOMENTS, StateFormats
from scrimp.precision import HIGH_PRECISION, LinearPrecision
from scrimp.profiler.device import Device
from scrimp.timing import best, now

WINDOW_S = 0.04
ALONE_S = 0.01
"""Seconds for which a call is repeated where nothing is shared, at least three times; the best call counts."""
SIZE = {"cpu": 384, "cuda": 4096}
"""Rows and columns of products."""
STREAM_BYTES = {"cpu": 2**25, "cuda": 2**28}
GATHERED_BYTES = {"cpu": 2**23, "cuda": 2**26}
"""Bytes of a whole large collective."""
SMALL_BYTES, SMALL_TIMES, LARGE_TIMES = 4096, 16, 8
"""Bytes of each rank in a small collective; calls of a small and of a large one."""
HEADS, HEAD_SIZE, KEYS = 4, 64, 512
EAGER = {"cpu": 2.0, "cuda": 3.2}
"""Bytes that operators one by one move for one that must be. On CUDA counted (`counted_step`); a CPU has
functions of Scrimp's own for norms and gates: an estimate (norms 3, gates 1.7)."""
EAGER_HOST_OPS = 0.77
"""Operations of a block run so, for one of `host_times` (counted)."""
_TILE = 4
FP32_LOGIT_BYTES = 16.0
"""Moved by the loss for each logit in fp32 (counted: `scrimp.profiler.counted_step`)."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class RankRates:
    """What a rank reaches while all others do the same, per second; seconds where it says so."""

    product: float
    """FLOPs in the working format."""
    low: float
    """FLOPs in the recipe that blocks run in, quantization included."""
    attention_forward: float
    attention_backward: float
    memory: float
    """Bytes read and written."""
    operation_seconds: float
    link: float = 1e12
    """Bytes that a rank sends in a large all-gather."""
    latency_seconds: float = 1e-6
    """Seconds that a small collective takes for each other rank."""
    reduces: float = 1.0
    """Seconds of a large reduce-scatter for one of an all-gather."""
    adds: float = 2.0
    """The same of an all-reduce."""
    low4: float = 0.0
    """As `low`, in a recipe of 4 bits; 0: as `low`."""


def rates_of_ranks(device: Device, *, compute: str = "fp32", recipe: str | None = None) -> RankRates:
    """The mean of what the ranks reach; a collective where there are several."""
    own = measure_rates(device, compute=compute, recipe=recipe)
    told = device.world.gathered(list(vars(own).values()))
    return RankRates(*(statistics.fmean(column) for column in zip(*told, strict=True)))


def cluster_of(
    rates: RankRates, *, ranks: int, name: str, memory_bytes: int, host_bytes: int = 0, upload: float = 0.0
) -> Cluster:
    """Equal ranks of one node with these rates.

    Args:
        memory_bytes: of each rank.
        host_bytes: of each rank beside them, for what a step may send there.
        upload: bytes per second to and from there; 0: as memory moves.
    """
    inside = Link("measured", rates.link, rates.latency_seconds, 1.0, reduces=rates.reduces, adds=rates.adds)
    keys = KEYS / (KEYS + Shape.keys_half) * (1.0 + Shape.keys_half / LONG_KEYS)
    keys *= NARROW_HEADS if HEAD_SIZE < WIDE_HEAD else 1.0
    one = HardwareDevice(
        name=name,
        vendor="",
        memory_bytes=memory_bytes,
        memory_bandwidth=rates.memory,
        multiprocessors=1,
        cache_bytes=1,
        launch_seconds=rates.operation_seconds,
        power_watts=0.0,
        price_per_hour=1.0,
        peak=Peak(
            fp32=rates.product,
            bf16=rates.product,
            fp8=rates.low,
            fp4=rates.low4 or rates.low,
            int8=rates.low,
        ),
        achieved=Achieved(
            fp32=1.0,
            bf16=1.0,
            # What was measured at KEYS keys, as the kernels' model will scale it back.
            attention_forward=rates.attention_forward / rates.product / keys,
            attention_backward=rates.attention_backward / rates.product / keys,
            memory=1.0,
            fp8=1.0,
            fp8_block=1.0,
            mxfp8=1.0,
            nvfp4=1.0,
            int8=1.0,
        ),
        shape=Shape(_TILE, _TILE, InnerSize(bf16=1.0)),
        host_link=HostLink(upload or rates.memory, 0.5),
    )
    node = Node(
        name=f"{ranks} ranks here",
        device=one,
        devices=ranks,
        host_memory_bytes=host_bytes * ranks,
        cpu_cores=1,
        host_op_seconds=rates.operation_seconds,
        link=Links(inside, inside),
    )
    return Cluster(node.name, (NodeGroup(1, node, ranks),), inside)


def software_here(
    cluster: Cluster,
    device_type: str,
    *,
    compute: str,
    compiled: bool,
    states: StateFormats | None = None,
    deterministic: bool = True,
    documents: bool = True,
) -> Software:
    """Scrimp's own step in this working format.

    Args:
        states: formats of weights and moments; None: masters beside bf16, and moments in fp32.
        deterministic, documents: as of `with_attention`; of a measured device attention is what was measured.

    On a CPU host and device are one: every operation costs its launch, and no exchange runs beside computing.
    """
    found = with_attention(software("scrimp"), deterministic=deterministic, documents=documents)
    if not compiled:
        found = replace(found, traffic=EAGER[device_type], host_ops=EAGER_HOST_OPS)
    if compute != "fp32":
        found = in_states(found, states or StateFormats())
    else:
        # Gradient, two moments and weight read, three written; the norm reads and the clip reads and writes.
        found = replace(
            found,
            activation_bytes=4.0,
            weight_bytes=4.0,
            held_weight_bytes=4.0,
            state_bytes=MOMENTS.get(states.moments if states else "", MOMENTS["fp32"]),
            master_bytes=0.0,
            optimizer_bytes=40.0,
            gradient_sum_bytes=12.0,
            bytes_per_logit=FP32_LOGIT_BYTES,
        )
    if device_type == "cpu":
        launch = cluster.groups[0].node.host_op_seconds
        found = replace(
            found,
            launch_seconds=launch,
            host_ops=0.0,
            hidden_gathers=0.0,
            hidden_rings=0.0,
            hidden_sends=0.0,
            quantize=(),  # in the measured rate
            quantize_bytes=0.0,
            ranks_a_core=max(1.0, cluster.devices / num_cores()),
            quantize_block_bytes=0.0,
            quantize_seconds=0.0,
        )
    return found


def measure_rates(device: Device, *, compute: str, recipe: str | None) -> RankRates:
    """What this rank reaches; all ranks of the default process group call it."""
    here, kind = device.torch_device, device.torch_device.type
    world, size, dtype = device.world, SIZE[kind], DTYPES[compute]
    left, right = (torch.randn(size, size, device=here).to(dtype) for _ in range(2))
    source = torch.zeros(STREAM_BYTES[kind] // 4, device=here)
    target = torch.zeros_like(source)
    flops = 2.0 * size**3

    def seconds(call: Callable[[], object]) -> float:
        if world.size == 1:
            return best(call, here, least_s=ALONE_S)
        world.barrier()
        return _window(call, here)

    product = flops / seconds(lambda: torch.mm(left, right))
    low = product
    if recipe is not None and recipe not in HIGH_PRECISION:
        low = 3 * flops / seconds(_layer(recipe, left, right))
    ahead, back = _attention_seconds(seconds, here, dtype)
    scores = HEADS * HEAD_SIZE * KEYS**2  # half of the square; queries and values
    row, weight = (torch.ones(1, 8, device=here), torch.ones(8, 8, device=here, requires_grad=True))
    found = RankRates(
        product=product,
        low=low,
        low4=low,
        attention_forward=2.0 * scores / ahead,
        attention_backward=5.0 * scores / back,
        memory=2.0 * STREAM_BYTES[kind] / seconds(lambda: torch.add(source, 1.0, out=target)),
        operation_seconds=seconds(lambda: F.linear(row, weight)),
    )
    return found if world.size == 1 else _with_link(found, device, lambda: torch.mm(left, right))


def _window(call: Callable[[], object], device: torch.device) -> float:
    """Mean seconds of a call, the first one left out."""
    call()
    count, start = 0, now(device)
    while True:
        call()
        count += 1
        passed = now(device) - start
        if passed > WINDOW_S:
            return passed / count


def _layer(recipe: str, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    """Both passes of a planned layer on square operands."""
    layer = PlannedLayer(
        "rates", LinearPrecision(recipe, recipe, recipe, recipe), choose=backends_for(x.device)
    )
    clock = layer.clock.now
    dtype = x.dtype

    def call() -> object:
        with torch.no_grad():
            _, codes = forward(x, weight, layer, dtype, now=clock, keep_codes=False)
            saved = x if codes is None else codes
            return backward(x, saved, weight, layer, dtype, clock, needs_x=True, needs_weight=True)

    return call


def _attention_seconds(
    seconds: Callable[[Callable[[], object]], float], device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    shape = (1, HEADS, KEYS, HEAD_SIZE)
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))

    def ahead() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    gradient = torch.ones(shape, device=device, dtype=dtype)
    alone = seconds(ahead)
    both = seconds(lambda: torch.autograd.grad(ahead(), (q, k, v), gradient))
    return alone, max(both - alone, alone)


def _with_link(found: RankRates, device: Device, work: Callable[[], object]) -> RankRates:
    """With what collectives over all ranks take; a fixed number of calls, so that ranks stay together.

    Args:
        work: what ranks compute between two of them.
    """
    here, world = device.torch_device, device.world
    small, whole = (
        torch.zeros(size // 4 // world.size * world.size, device=here)
        for size in (SMALL_BYTES * world.size, GATHERED_BYTES[here.type])
    )

    def seconds(collective: Callable[[torch.Tensor, torch.Tensor], object], x: torch.Tensor) -> float:
        part, times = x[: x.numel() // world.size].clone(), SMALL_TIMES if x is small else LARGE_TIMES

        def both() -> None:
            work()
            collective(x, part)

        return max(_mean(both, device, times) - _mean(work, device, times), 1e-9)

    calls = (_all_gather, _reduce_scatter, lambda x, _: dist.all_reduce(x))
    empty = statistics.fmean(seconds(call, small) for call in calls)
    # Noise must not make bytes free: at least half of the seconds of a large one are its bytes'.
    large = [seconds(call, whole) for call in calls]
    gather, reduce, add = (max(one - empty, one / 2) for one in large)
    sent = 4.0 * whole.numel() * (world.size - 1) / world.size
    return replace(
        found,
        link=sent / gather,
        latency_seconds=empty / (world.size - 1),
        reduces=reduce / gather,
        adds=add / gather,
    )


def _all_gather(whole: torch.Tensor, part: torch.Tensor) -> None:
    # Its name from torch 2.12 on.
    call = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, call)(whole, part)


def _reduce_scatter(whole: torch.Tensor, part: torch.Tensor) -> None:
    call = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    getattr(dist, call)(part, whole)


def _mean(call: Callable[[], object], device: Device, times: int) -> float:
    call()
    device.world.barrier()
    start = now(device.torch_device)
    for _ in range(times):
        call()
    return (now(device.torch_device) - start) / times
