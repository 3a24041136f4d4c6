"""Kernels, bytes and FLOPs of the passes of Scrimp's own step, counted where no GPU is.

Problem  What a step moves beside its products was reckoned by hand (`planner/layout/softwares/scrimp.toml`, `Traffic`
         of a model). A formula goes on saying what the code did before somebody changed it.
Method   The code runs on small CPU tensors on CUDA's way through it, and each kernel that a GPU would launch counts.

         eager     A dispatch mode sees every operator: one kernel each, views and empty tensors none. It reads its
                   operands and writes its results; `gather` and `scatter_add_` touch what their index names.
                   RMSNorm, which CUDA has as one kernel, is told to the counter by a stand-in.
         compiled  Inductor lowers the forward and the backward graph, fuses, and is stopped before it writes code.
                   Each scheduled node is a kernel with the buffers that it reads and writes.

             recomputation (level) = backward (level) - backward (keep)

         FLOPs are those of torch's counter, all scores of attention included. Figures per token do not depend on the
         size where weights of norms are small beside activations.
Limits   Caches are none: what is read twice counts twice. Inductor fuses for a CPU: reductions over a whole column
         (gradients of norms) may take a kernel more on CUDA. Planned formats: `scrimp.profiler.counted_formats`.
Checked  tests/profiler/test_counted_step.py: norms and gates by hand, products by `planner.flops`
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp.config import Architecture
from scrimp.config.activations import Activations
from scrimp.models import functions
from scrimp.models.blocks import Block
from scrimp.models.model import ModelPart, build_model

_PRODUCTS = ("mm", "addmm", "bmm")
_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense")
_OVERWRITES = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")
_CHOOSES = ("gather", "scatter_add_")


@dataclass(frozen=True)
class Work:
    """What a device does in one pass."""

    launches: int = 0
    products: int = 0
    """Bytes that matrix products read and write."""
    attention: int = 0
    """Bytes of attention's kernels."""
    moved: int = 0
    """Bytes of all else."""
    flops: int = 0
    product_launches: int = field(default=0, compare=False)
    """Launches that are matrix products."""

    def __add__(self, other: Work) -> Work:
        return Work(*(mine + its for mine, its in zip(_numbers(self), _numbers(other), strict=True)))

    def __sub__(self, other: Work) -> Work:
        return Work(*(mine - its for mine, its in zip(_numbers(self), _numbers(other), strict=True)))


@dataclass(frozen=True)
class Passes:
    """Both passes of one thing."""

    forward: Work
    backward: Work
    """With what is made again."""


def _numbers(work: Work) -> list[int]:
    return list(vars(work).values())


def _kernel(name: str, num_bytes: int) -> Work:
    """One launch of an operator."""
    if name in _PRODUCTS:
        return Work(1, products=num_bytes, product_launches=1)
    if "attention" in name:
        return Work(1, attention=num_bytes)
    return Work(1, moved=num_bytes)


class KernelCounter(TorchDispatchMode):
    """Counts the kernels of eager code."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def take(self) -> Work:
        """What was counted since the last time."""
        found, self.work = self.work, Work()
        return found

    def kernel(self, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """Count a kernel of a GPU that does not run here."""
        self.work += Work(1, moved=sum(one.nbytes for one in (*read, *written)))

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """CUDA's RMSNorm, of which nothing but the kernels is true: for `scrimp.models.functions.plain_operations`."""
        return cast(Tensor, _Norm.apply(x, weight, self))  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            return self._wrapped(args, kwargs, result)
        name = func._schema.name.split("::")[1]
        if not func.is_view and name not in _NOTHING:
            num_bytes = _bytes_of_choice(args) if name in _CHOOSES else _bytes_of(func, args, kwargs, result)
            self.work += _kernel(name, num_bytes) + Work(flops=_flops(func, args, kwargs, result))
        return result

    def _wrapped(self, args: Any, kwargs: Any, result: Any) -> Any:
        """An operator that a compiler runs with the state of a random generator: FLOPs alone, see `FusedCounter`."""
        for position, one in enumerate(args):
            if isinstance(one, torch._ops.OpOverload):
                self.work += Work(flops=_flops(one, args[position + 1 :], kwargs, result))
        return result


class _Norm(torch.autograd.Function):
    """One kernel forward; backward one for the input and one that adds up the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counter: KernelCounter) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counter = counter
        counter.work += Work(1, moved=2 * x.nbytes)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.counter.work += Work(2, moved=5 * x.nbytes)
        return torch.empty_like(x), torch.empty_like(weight), None


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    from torch.utils.flop_counter import flop_registry  # imports Triton

    name = func._schema.name
    if "attention" in name:  # of a CPU's kernels the counter knows nothing
        is_backward = "backward" in name
        query, key = args[is_backward : is_backward + 2]
        B, H, T, K = query.shape
        return int((10 if is_backward else 4) * B * H * T * key.shape[-2] * K)
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula else 0


def _bytes_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Read and written by an operator."""
    name, schema = func._schema.name.split("::")[1], func._schema.arguments
    read: list[Tensor] = []
    written = list(_tensors(result))
    for position, argument in enumerate(schema):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        tensors, mutated = (
            list(_tensors(value)),
            argument.alias_info is not None and argument.alias_info.is_write,
        )
        is_unread = _makes(name) or (mutated and (argument.kwarg_only or name in _OVERWRITES))
        if not is_unread:
            read += tensors
        # Of fused AdamW's gradients the schema says so for a scale's sake, which nobody gives.
        if mutated and argument.name != "grads":
            written += tensors
    return _whole(read) + _whole(written)


def _makes(name: str) -> bool:
    """Whether an operator fills a tensor that is like another one, which it does not read."""
    return name.startswith("new_") or name.endswith("_like")


def _bytes_of_choice(args: Sequence[Any]) -> int:
    """An index, and what it names: read, and written here or there; what is added to is read besides."""
    source, _, index, *added = args
    return int(index.nbytes + index.numel() * source.element_size() * (2 + len(added)))


def _whole(tensors: Sequence[Tensor]) -> int:
    """Bytes in memory; each view counts once, and what is expanded as it lies there."""
    once = {(one.data_ptr(), one.shape, one.stride()): one for one in tensors}
    return sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in once.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


class _FusedError(Exception):
    """Inductor has fused: there is no need to write code."""


class FusedCounter:
    """A back end of torch.compile that counts the kernels of its graphs, and runs them operator by operator."""

    def __init__(self) -> None:
        self.forward = self.backward = Work()

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """As torch.compile calls it."""
        from torch._inductor.compile_fx import compile_fx  # a second, and only needed here

        return cast(Callable[..., Any], compile_fx(graph, inputs, inner_compile=self._count))  # type: ignore[arg-type]

    def _count(
        self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner

        runs, found = copy.deepcopy(graph), list[Work]()

        def seen(nodes: list[Any]) -> list[Any]:
            found.extend(map(_fused, nodes))
            raise _FusedError

        try:
            with _as_on_cuda(), config.patch(_post_fusion_custom_pass=seen, force_disable_caches=True):
                compile_fx_inner(graph, inputs, **options)
        except Exception:  # Inductor wraps what a pass raises, differently in each version
            if not found:
                raise
        counted = sum(found, Work())
        if options.get("is_backward"):
            self.backward += counted
        else:
            self.forward += counted
        return _boxed(runs, self, bool(options.get("is_backward")))


@contextlib.contextmanager
def _as_on_cuda() -> Iterator[None]:
    """Inductor's choices for CUDA where it lowers for a CPU: `cat` is pointwise, and a sigmoid that is read twice is
    computed twice."""
    from torch._inductor import config, ir

    before = ir.is_cpu
    ir.is_cpu = lambda x: False
    try:
        with config.patch(force_pointwise_cat=True):
            yield
    finally:
        ir.is_cpu = before


def _fused(node: Any) -> Work:
    """A scheduled node; those that only name a part of a buffer launch nothing."""
    kernel = getattr(node.node, "python_kernel_name", None) or ""
    num_bytes = int(node.get_read_write_buffers_sizes())
    is_nothing = type(node).__name__ == "NopKernelSchedulerNode" or (node.is_extern() and not num_bytes)
    # Of a block's operators attention alone may be random: what runs with a generator's state is attention.
    names = [one for one in kernel.split(".") if one in _PRODUCTS or "attention" in one]
    names += ["attention"] * ("rng_state" in kernel)
    return Work() if is_nothing else _kernel(names[0] if names else kernel, num_bytes)


def _boxed(graph: torch.fx.GraphModule, counter: FusedCounter, is_backward: bool) -> Callable[..., Any]:
    """Runs a graph, and counts the FLOPs of its operators."""

    def run(inputs: list[Any]) -> Any:
        own = KernelCounter()
        with own:
            result = graph(*inputs)
        inputs.clear()
        flops = Work(flops=own.work.flops)
        if is_backward:
            counter.backward += flops
        else:
            counter.forward += flops
        return result

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def count_block(
    architecture: Architecture,
    *,
    compiled: bool,
    level: str = "keep",
    rows: int = 2,
    sequence: int = 128,
) -> Passes:
    """A model's first block in bf16, and its gradients.

    Args:
        compiled: as torch.compile fuses it; else operator by operator.
        level: of recomputation (`scrimp.config.activations`).
    """
    dtype = torch.bfloat16
    model = build_model(architecture, device=torch.device("cpu"), dtype=dtype, part=ModelPart((0,)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    block = next(iter(model.each_block()))
    block.activations = Activations(level)
    tokens = torch.zeros(rows, sequence, dtype=torch.int64)
    layout = model.layouts(tokens, None, dtype=dtype, compiled=True)[block.attends]
    x = torch.randn(rows, sequence, architecture.width).to(dtype).requires_grad_()
    return _count_fused(block, x, layout) if compiled else _count_eager(block, x, layout)


def _count_eager(block: Block, x: Tensor, layout: Any) -> Passes:
    counter = KernelCounter()
    with functions.plain_operations(counter.norm), counter:
        y = block(x, layout)
        forward = counter.take()
        torch.autograd.backward(y, torch.empty_like(y))
        return Passes(forward, counter.take())


def _count_fused(block: Block, x: Tensor, layout: Any) -> Passes:
    import torch._dynamo

    torch._dynamo.reset()
    counter = FusedCounter()
    y = torch.compile(block, backend=counter, fullgraph=True)(x, layout)
    torch.autograd.backward(y, torch.ones_like(y))
    torch._dynamo.reset()
    return Passes(counter.forward, counter.backward)
