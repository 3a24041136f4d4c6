"""Launches kernels on the machine that runs PTX: `launch.run` for tensors in host memory.

A process without TRITON_INTERPRET compiles each kernel, specialised as Triton would for the arguments: numbers that are
1 are constants, and the compiler knows which numbers and addresses are multiples of 16, unless the kernel forbids it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from ptx_machine import Machine, parse
from ptx_memory import Array, GlobalMemory
from torch import Tensor

from scrimp.files import make_folder, write_whole
from scrimp.gemm import kernels

SCRIPT = Path(__file__).with_name("compile_ptx.py")
HOPPER = 90
READ_BEFORE = "writes what another thread read"
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
}


@functools.cache
def compiler() -> subprocess.Popen[str]:
    """A process that ends with this one, when its input does."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(HOPPER)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@functools.cache
def sources() -> str:
    """What PTX depends on besides the request: the compiler's version and the kernels' text."""
    files = [SCRIPT, *sorted(Path(kernels.__file__).parent.glob("*.py"))]
    return str(triton.__version__) + "".join(path.read_text(encoding="utf-8") for path in files)


@functools.cache
def compiled(request: str) -> dict[str, Any]:
    """The answer to a request, kept beside what Triton keeps: starting the compiler takes longer than most tests."""
    key = hashlib.sha256((sources() + request).encode()).hexdigest()
    path = Path(triton.knobs.cache.dir, "scrimp_ptx", f"{key}.json")
    if not path.exists():
        make_folder(path.parent)
        write_whole(path, answer_to(request))
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def answer_to(request: str) -> str:
    process = compiler()
    assert process.stdin
    assert process.stdout
    print(request, file=process.stdin, flush=True)
    answer = process.stdout.readline()
    assert answer, "the compiler has ended"
    assert not answer.startswith('{"error"'), json.loads(answer)["error"]
    return answer


class PtxLauncher:
    """Stands in for `scrimp.gemm.kernels.launch.run`.

    A launch fails on a race, on an address outside all buffers, and if it writes some bytes of a buffer but not all.
    """

    def __init__(self, edit: Callable[[str], str] = lambda ptx: ptx) -> None:
        """`edit` changes PTX before it runs."""
        self.edit = edit
        self.launches: list[str] = []

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, **constants: Any
    ) -> None:
        buffers = storages(arguments)
        memory = GlobalMemory(list(buffers.values()))
        starts = dict(zip(buffers, memory.addresses, strict=True))
        numbers = [
            starts[x.untyped_storage().data_ptr()] + int(x.storage_offset()) * x.element_size()
            if isinstance(x, Tensor)
            else bits_of(x)
            for x in arguments
        ]
        request = specialised(kernel, arguments, numbers, constants) | {"num_warps": num_warps}
        answer = compiled(json.dumps(request))
        kept = [
            number
            for name, number in zip(kernel.arg_names, numbers, strict=False)
            if name not in request["constants"]
        ]
        machine = Machine(parse(self.edit(answer["ptx"])), grid[0], kept, memory, answer["shared"])
        self.launches.append(kernel.fn.__name__)
        machine.run()
        races = machine.races
        if reads_before_it_writes(answer["ptx"]):  # of which memory of all blocks knows nothing
            races = [one for one in races if "st.global" not in one or READ_BEFORE not in one]
        assert not races, "\n".join(races)
        for place, buffer in zip(memory.slices, buffers.values(), strict=True):
            is_written = memory.is_written[place]
            assert is_written.all() or not is_written.any(), f"{(~is_written).sum()} bytes are not written"
            buffer[:] = memory.bytes[place]


def reads_before_it_writes(ptx: str) -> bool:
    """Whether all threads of a block meet after they have read global memory and before any writes there."""
    last_read, first_write = ptx.rfind("ld.global"), ptx.find("st.global")
    return "bra" not in ptx and 0 < last_read < ptx.find("bar.sync", last_read) < first_write


def bits_of(x: float | None) -> int:
    """A number as a parameter: of a float its bits; of nothing any."""
    return int(np.float32(x).view(np.int32)) if isinstance(x, float) else int(x or 0)


def storages(arguments: tuple[Any, ...]) -> dict[int, Array]:
    """Bytes of each different storage of the tensors among them, by its address."""
    found = {}
    for x in arguments:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return found


def specialised(
    kernel: Any, arguments: tuple[Any, ...], numbers: list[int], constants: dict[str, Any]
) -> dict[str, Any]:
    """What the compiler is asked for. Numbers are the arguments, addresses for tensors."""
    signature, constants, multiples = {}, dict(constants), []
    unknown = kernel.kwargs.get("do_not_specialize") or ()
    for index, (name, x, number) in enumerate(zip(kernel.arg_names, arguments, numbers, strict=False)):
        if isinstance(x, Tensor):
            signature[name] = POINTERS[x.dtype]
        elif x is None or (number == 1 and name not in unknown):
            signature[name], constants[name] = "constexpr", x
            continue
        elif isinstance(x, float):
            signature[name] = "fp32"
            continue
        else:
            signature[name] = "i32" if -(2**31) <= number < 2**31 else "i64"
        if number % 16 == 0 and name not in unknown:
            multiples.append(index)
    signature |= dict.fromkeys(kernel.arg_names[len(arguments) :], "constexpr")
    return {
        "module": kernel.fn.__module__,
        "kernel": kernel.fn.__name__,
        "signature": signature,
        "constants": constants,
        "multiples_of_16": multiples,
    }
