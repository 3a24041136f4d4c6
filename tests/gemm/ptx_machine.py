"""Runs PTX on a CPU: what a compiler made of a kernel is checked without the GPU it is for.

Problem  Triton's interpreter runs the kernel's Python, never what the compiler makes of it: layouts, shuffles, passages
         through shared memory and barriers are the compiler's own, and an error there would show on a GPU alone.
Method   All threads of all blocks run in lockstep. A register is a numpy array of one number a thread, so that each
         instruction is a few operations of numpy, whatever the grid:

             add.s32 %r3, %r1, %r2;      r3 = r1 + r2        over blocks x threads

         A guard (`@%p1 st.global ...`) picks the threads that take part. Shared memory is one space a block.
         Both memories know who touched each byte since the last barrier (ptx_memory.py), so races are
         found though lockstep would hide them.
         Threads that jump ahead wait at their label for the others.
Limits   Jumps back are taken by all threads of the grid or by none. Others, barriers and shuffles while some threads
         wait, and every instruction that is not in the tables below raise `UnknownInstructionError`. What ptxas
         makes of PTX is not seen. Nor are faults of timing but for the races that are looked for: a thread
         never runs ahead here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ptx_memory import POISON, WARP, Array, GlobalMemory, Memory

TYPES = {
    **{f"{kind}{8 * size}": np.dtype(f"u{size}") for kind in "bu" for size in (1, 2, 4, 8)},
    **{f"s{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    "s16x2": np.dtype(np.uint32),
    "f32": np.dtype(np.float32),
    "pred": np.dtype(bool),
}
WIDE = {"s32": "s64", "u32": "u64"}


class UnknownInstructionError(Exception):
    """PTX that this machine does not run."""


@dataclass(frozen=True)
class Instruction:
    """`@!guard operation.type operands`."""

    text: str
    guard: str
    is_negated: bool
    operation: str
    type: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A kernel."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    """Index of the instruction after each label."""
    registers: dict[str, str]
    """Type of the registers of each prefix, such as %rd."""
    threads: int
    """Threads in a block."""
    parameters: int


def parse(ptx: str) -> Program:
    """The only kernel of a file."""
    text = re.sub(r"//[^\n]*", "", ptx)
    header, body = text[text.index(".visible .entry") :].split("{", 1)
    body = body[: body.index("\n}")]
    body = re.sub(r"^\s*\.loc\b[^\n]*", "", body, flags=re.MULTILINE)
    body = re.sub(r"^\s*(\$\w+):", r"label \1;", body, flags=re.MULTILINE)
    registers: dict[str, str] = {}
    labels: dict[str, int] = {}
    instructions: list[Instruction] = []
    for statement in (" ".join(part.split()) for part in body.split(";")):
        declared = re.fullmatch(r"\.reg \.(\w+) (%[a-z]+)<\d+>", statement)
        if declared:
            registers[declared[2]] = declared[1]
        elif statement.startswith("label "):
            labels[statement.removeprefix("label ")] = len(instructions)
        elif statement and not statement.startswith(".pragma"):
            instructions.append(_instruction(statement))
    threads = re.search(r"\.reqntid (\d+)", header)
    assert threads, header
    return Program(
        tuple(instructions), labels, registers, int(threads[1]), len(re.findall(r"_param_\d+", header))
    )


def _instruction(text: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)(%p\d+) )?([a-z][\w.]*)(?: (.*))?", text)
    if not found:
        raise UnknownInstructionError(text)
    operation, _, kind = found[3].rpartition(".")
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", found[4] or "")
    return Instruction(text, found[2] or "", bool(found[1]), operation, kind, tuple(operands))


class Machine:
    """One launch: a grid of blocks over global memory."""

    def __init__(
        self, program: Program, blocks: int, parameters: Sequence[int], memory: GlobalMemory, shared: int
    ) -> None:
        """Shared counts bytes of a block. Parameters at the end that no kernel reads, Triton's own, may be left out."""
        self.program = program
        self.parameters = [*parameters, *[0] * (program.parameters - len(parameters))]
        self.thread = np.arange(blocks * program.threads)
        self.block = self.thread // program.threads
        self.active = np.ones(len(self.thread), bool)
        """Which threads do not wait for others, `waiting_for` holds the places at which they go on."""
        self.waiting_for = np.zeros(len(self.thread), np.int64)
        self.registers: dict[str, Array] = {}
        self.memory, self.shared = memory, Memory(shared, blocks)

    def run(self) -> None:
        place = 0
        with np.errstate(all="ignore"):
            while place < len(self.program.instructions):
                instruction = self.program.instructions[place]
                self.active = self.waiting_for <= place
                place += 1
                if "bra" in (instruction.operation, instruction.type):
                    place = self._branch(instruction, place)
                elif self.active.any():
                    self._step(instruction)

    def _branch(self, it: Instruction, following: int) -> int:
        """The place of the next instruction."""
        live, target = self.live(it), self.program.labels.get(it.operands[0])
        if target is None or (target < following and live.any() and not live.all()):
            raise UnknownInstructionError(f"{it.text}, which is unknown, or back for some threads only")
        if live.all():
            return target
        self.waiting_for[live] = target
        return following

    @property
    def races(self) -> list[str]:
        return self.shared.races + self.memory.races

    def _step(self, it: Instruction) -> None:
        special = SPECIAL.get(it.operation)
        if special is not None:
            special(self, it)
            return
        rule = RULES.get(it.operation)
        if rule is None or it.type[:1] not in rule.kinds or it.type not in TYPES:
            raise UnknownInstructionError(it.text)
        kinds = [_type_of(kind, it.type) for kind in rule.sources] or [it.type] * (len(it.operands) - 1)
        values = [self.read(name, kind) for name, kind in zip(it.operands[1:], kinds, strict=True)]
        found = _by_halves(rule, values) if it.type.endswith("x2") else rule.compute(*values)
        self.write(it, it.operands[0], found)

    def live(self, it: Instruction) -> Array:
        """Which threads take part in an instruction: those that do not wait, and that its guard lets through."""
        if not it.guard:
            return self.active
        guard = self.registers[it.guard]
        return self.active & (~guard if it.is_negated else guard)

    def is_partial(self, it: Instruction) -> bool:
        """Whether some threads may take no part."""
        return bool(it.guard) or not self.active.all()

    def read(self, operand: str, kind: str) -> Array:
        """A register's or a constant's value, one a thread."""
        if operand in ("%tid.x", "%ctaid.x"):
            number = self.thread % self.program.threads if operand == "%tid.x" else self.block
            return number.astype(TYPES[kind])
        if operand.startswith("%"):
            return _low(self._value_of(operand), kind)
        bits = 0 if operand == "global_smem" else _bits(operand)
        if kind == "pred":
            return np.full(len(self.thread), bits != 0)
        size = TYPES[kind].itemsize
        return np.full(len(self.thread), bits % (1 << 8 * size), f"u{size}").view(TYPES[kind])

    def write(self, it: Instruction, register: str, value: Array) -> None:
        """Set a register where the guard lets it, extended to its size by the value's own sign."""
        if register == "_":
            return
        kind = self._kind_of(register)
        if value.dtype == np.float32:
            value = value.view(np.uint32)
        if value.dtype.itemsize > kind.itemsize:
            raise UnknownInstructionError(it.text)
        value = value.astype(kind)
        if self.is_partial(it):
            value = np.where(self.live(it), value, self._value_of(register))
        self.registers[register] = value

    def _kind_of(self, register: str) -> np.dtype[Any]:
        return TYPES[self.program.registers[register.rstrip("0123456789")]]

    def _value_of(self, register: str) -> Array:
        """Poison before it is written, for compilers pack such halves beside others that they use."""
        if register not in self.registers:
            kind = self._kind_of(register)
            return np.full(len(self.thread) * kind.itemsize, POISON, np.uint8).view(kind)
        return self.registers[register]

    def place(self, it: Instruction, operand: str) -> Array:
        """Addresses that `[%r1+16]` names."""
        found = re.fullmatch(r"\[ ?(%?\w+) ?(?:\+ ?(-?\d+))? ?\]", operand)
        if not found:
            raise UnknownInstructionError(it.text)
        kind = "u64" if found[1].startswith("%rd") else "u32"
        return self.read(found[1], kind).astype(np.int64) + int(found[2] or 0)


def _low(raw: Array, kind: str) -> Array:
    wanted = TYPES[kind]
    if raw.dtype.itemsize < wanted.itemsize:
        raise UnknownInstructionError(f"{raw.dtype} read as {kind}")
    if raw.dtype.itemsize > wanted.itemsize:
        raw = raw.astype(f"u{wanted.itemsize}")
    return raw.view(wanted)


def _by_halves(rule: Rule, values: list[Array]) -> Array:
    return rule.compute(*(one.view(np.int16) for one in values)).view(np.uint32)


def _bits(constant: str) -> int:
    return int(constant[2:], 16) if constant.startswith("0f") else int(constant.rstrip("U"), 0)


def _type_of(source: str, kind: str) -> str:
    return {"": kind, "wide": WIDE.get(kind, "")}.get(source, source)


def _names(operand: str) -> list[str]:
    """Registers that an operand names: those of a vector `{%r1, %r2}`, or a single one."""
    return [name.strip() for name in operand.strip("{} ").split(",")]


# Memory, and what threads do together.


def _load(machine: Machine, it: Instruction) -> None:
    names, live = _names(it.operands[0]), machine.live(it)
    memory, spaces = _space(machine, it)
    addresses, kind = machine.place(it, it.operands[1])[live], TYPES[it.type]
    size = kind.itemsize * len(names)
    found = memory.read(addresses, spaces[live], machine.thread[live], size, it.text).view(kind)
    for column, name in enumerate(names):
        value = np.zeros(len(live), kind)
        value[live] = found[:, column]
        machine.write(it, name, value)


def _store(machine: Machine, it: Instruction) -> None:
    names, live = _names(it.operands[1]), machine.live(it)
    memory, spaces = _space(machine, it)
    addresses = machine.place(it, it.operands[0])[live]
    values = np.stack([machine.read(name, it.type)[live] for name in names], 1).view(np.uint8)
    memory.write(addresses, spaces[live], machine.thread[live], values, it.text)


def _add_to_maxima(machine: Machine, it: Instruction) -> None:
    """Atomic maximum: the order of the threads makes no difference. The value before it is not returned."""
    live = machine.live(it)
    if it.type != "s32":
        raise UnknownInstructionError(it.text)
    address, value = it.operands[-2:]
    values = machine.read(value, it.type)[live]
    machine.memory.maximum(machine.place(it, address)[live], values, it.text)


def _space(machine: Machine, it: Instruction) -> tuple[Memory, Array]:
    """A memory and each thread's space of it."""
    if ".global" in it.operation:
        return machine.memory, np.zeros_like(machine.block)
    return machine.shared, machine.block


def _load_parameter(machine: Machine, it: Instruction) -> None:
    number = re.search(r"_param_(\d+)\]", it.operands[1])
    if not number:
        raise UnknownInstructionError(it.text)
    value = np.full(len(machine.thread), machine.parameters[int(number[1])], np.int64)
    machine.write(it, it.operands[0], value.astype(TYPES[it.type]))


def _matrices(machine: Machine, it: Instruction, rows: str, registers: int) -> tuple[Array, Array]:
    """(spaces, addresses) [warps, registers, 32 threads, 2] of the 16-bit members of matrices of 8 x 8.

    Threads 8 i to 8 i + 7 of a warp name the rows of matrix i. Of it, thread t has members 2 t and 2 t + 1, counted
    along the rows, or along the columns where it is transposed.
    """
    if machine.is_partial(it):
        raise UnknownInstructionError(it.text)
    starts = machine.place(it, rows).reshape(-1, 4, 8)[:, :registers]
    if (starts % 16).any():
        raise UnknownInstructionError(f"{it.text} of rows that are not aligned")
    member = np.arange(2 * WARP)
    row, column = (member % 8, member // 8) if ".trans" in it.operation else (member // 8, member % 8)
    addresses = (starts[:, :, row] + 2 * column).reshape(-1, registers, WARP, 2)
    spaces = machine.block.reshape(-1, 1, WARP, 1)
    return np.broadcast_to(spaces, addresses.shape), addresses


def _load_matrices(machine: Machine, it: Instruction) -> None:
    names = _names(it.operands[0])
    spaces, addresses = _matrices(machine, it, it.operands[1], len(names))
    threads = np.broadcast_to(machine.thread.reshape(-1, 1, WARP, 1), addresses.shape)
    found = machine.shared.read(addresses.ravel(), spaces.ravel(), threads.ravel(), 2, it.text)
    words = found.reshape(-1, 4).view(np.uint32).reshape(-1, len(names), WARP)
    for index, name in enumerate(names):
        machine.write(it, name, words[:, index].reshape(-1))


def _store_matrices(machine: Machine, it: Instruction) -> None:
    names = _names(it.operands[1])
    spaces, addresses = _matrices(machine, it, it.operands[0], len(names))
    threads = np.broadcast_to(machine.thread.reshape(-1, 1, WARP, 1), addresses.shape)
    words = np.stack([machine.read(name, "b32").reshape(-1, WARP) for name in names], 1)
    values = words.reshape(-1, 1).view(np.uint8).reshape(-1, 2)
    machine.shared.write(addresses.ravel(), spaces.ravel(), threads.ravel(), values, it.text)


def _barrier(machine: Machine, it: Instruction) -> None:
    is_of_warp = it.operation == "bar.warp"
    if machine.is_partial(it) or it.operands != ("-1" if is_of_warp else "0",):
        raise UnknownInstructionError(it.text)
    if is_of_warp:
        machine.shared.warp_barrier()
        machine.memory.warp_barrier()
    else:
        machine.shared.barrier()


def _shuffle(machine: Machine, it: Instruction) -> None:
    """Each thread gets the number of the one whose place differs in some bits."""
    if machine.is_partial(it) or it.type != "b32" or it.operands[3:] != ("31", "-1"):
        raise UnknownInstructionError(it.text)
    machine.write(
        it, it.operands[0], machine.read(it.operands[1], "b32")[machine.thread ^ _bits(it.operands[2])]
    )


def _warp_maximum(machine: Machine, it: Instruction) -> None:
    everyone = (machine.read(it.operands[2], "b32") == 0xFFFFFFFF).all()
    if machine.is_partial(it) or it.type != "s32" or not everyone:
        raise UnknownInstructionError(it.text)
    largest = machine.read(it.operands[1], "s32").reshape(-1, WARP).max(1)
    machine.write(it, it.operands[0], largest.repeat(WARP))


def _move(machine: Machine, it: Instruction) -> None:
    """Copy; or take a register of 32 bits apart, or put it together from halves."""
    to, source = it.operands
    if to.startswith("{") and it.type == "b32":
        halves = machine.read(source, "b32").view(np.uint16).reshape(-1, 2)
        for index, name in enumerate(_names(to)):
            machine.write(it, name, halves[:, index])
    elif source.startswith("{") and it.type == "b32":
        halves = np.stack([machine.read(name, "b16") for name in _names(source)], 1)
        machine.write(it, to, halves.view(np.uint32)[:, 0])
    else:
        machine.write(it, to, machine.read(source, it.type))


def _convert(machine: Machine, it: Instruction) -> None:
    """Between integers, and of integers to the nearest float32: `cvt.to.from`."""
    wanted = it.operation.removeprefix("cvt.").removeprefix("rn.")
    machine.write(it, it.operands[0], machine.read(it.operands[1], it.type).astype(TYPES[wanted]))


def _truncate(machine: Machine, it: Instruction) -> None:
    """From float32 to integers, towards zero and within their range; NaN becomes 0."""
    kind = TYPES[it.operation.removeprefix("cvt.rzi.")]
    number = machine.read(it.operands[1], "f32").astype(np.float64)  # of which int32's range is exact
    value, limits = np.nan_to_num(number, posinf=np.inf, neginf=-np.inf), np.iinfo(kind)
    machine.write(it, it.operands[0], np.trunc(value.clip(limits.min, limits.max)).astype(kind))


def _convert_to_float8(machine: Machine, it: Instruction) -> None:
    """Two numbers to two codes; the first one's is the high byte."""
    dtype, largest = (torch.float8_e4m3fn, 448.0) if "e4m3" in it.operation else (torch.float8_e5m2, 57344.0)
    codes = []
    for operand in it.operands[2], it.operands[1]:
        value = machine.read(operand, "f32")
        code = torch.from_numpy(value.clip(-largest, largest)).to(dtype).view(torch.uint8).numpy()
        codes.append(np.where(np.isnan(value), np.uint8(0x7F), code))
    machine.write(it, it.operands[0], np.stack(codes, 1).view(np.uint16)[:, 0])


def _end(machine: Machine, it: Instruction) -> None:
    if machine.is_partial(it) or it is not machine.program.instructions[-1]:
        raise UnknownInstructionError(it.text)


_VECTORS = ("", ".v2", ".v4")
_MATRIX = "sync.aligned.m8n8"
SPECIAL: dict[str, Callable[[Machine, Instruction], None]] = {
    **{f"ld.{space}{vector}": _load for space in ("global", "shared") for vector in _VECTORS},
    **{f"st.{space}{vector}": _store for space in ("global", "shared") for vector in _VECTORS},
    **{f"ldmatrix.{_MATRIX}.x{n}{t}.shared": _load_matrices for n in (1, 2, 4) for t in ("", ".trans")},
    **{f"stmatrix.{_MATRIX}.x{n}{t}.shared": _store_matrices for n in (1, 2, 4) for t in ("", ".trans")},
    **{f"cvt.{sign}{size}": _convert for sign in "su" for size in (8, 16, 32, 64)},
    **{f"cvt.rn.satfinite.{name}x2": _convert_to_float8 for name in ("e4m3", "e5m2")},
    "cvt.rn.f32": _convert,
    **{f"cvt.rzi.s{size}": _truncate for size in (16, 32)},
    "ld.param": _load_parameter,
    "bar": _barrier,
    "bar.warp": _barrier,
    "shfl.sync.bfly": _shuffle,
    "redux.sync.max": _warp_maximum,
    **{f"{name}.global.gpu.relaxed.max": _add_to_maxima for name in ("red", "atom")},
    "mov": _move,
    "": _end,
}
"""By the instruction's name without its type."""


# Arithmetic, of one thread by itself.


def _multiply_wide(a: Array, b: Array) -> Array:
    wide = np.dtype(f"{a.dtype.kind}8")
    product: Array = a.astype(wide) * b.astype(wide)
    return product


def _divide_integers(a: Array, b: Array) -> Array:
    """Towards zero; float64 holds both exactly, and no quotient of theirs rounds up to a whole number."""
    return np.trunc(a.astype(np.float64) / b).astype(a.dtype)


def _shift_left(a: Array, by: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return np.where(by < bits, a << by.clip(max=bits - 1).astype(a.dtype), 0).astype(a.dtype)


def _shift_right(a: Array, by: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    shifted = a >> by.clip(max=bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by < bits, shifted, 0).astype(a.dtype)


def _bit_field(a: Array, start: Array, length: Array) -> Array:
    """Bits from start on, extended by their own sign where the type has one; fields lie within the number."""
    bits = 8 * a.dtype.itemsize
    return _shift_right(_shift_left(a, bits - start - length), bits - length)


def _permute_bytes(a: Array, b: Array, selectors: Array) -> Array:
    """Four of eight bytes, each by four bits of the selector: the highest asks for eight times the byte's sign."""
    both = np.stack([a, b], 1).view(np.uint8)
    chosen = np.stack([selectors >> 4 * k & 15 for k in range(4)], 1).astype(np.intp)
    found = np.take_along_axis(both, chosen & 7, 1)
    signs = (found.view(np.int8) >> 7).view(np.uint8)
    return np.where(chosen & 8, signs, found).view(np.uint32)[:, 0]


def _fused(a: Array, b: Array, c: Array) -> Array:
    """a b + c rounded once. The product is exact in float64, and a sum rounded to odd there rounds as the exact one."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    is_inexact = np.isfinite(total) & (lost != 0)
    is_too_large = (lost < 0) != (total < 0)
    odd = (total.view(np.int64) - is_too_large) | 1
    return np.where(is_inexact, odd.view(np.float64), total).astype(np.float32)


def _select(a: Array, b: Array, condition: Array) -> Array:
    return np.where(condition, a, b)


@dataclass(frozen=True)
class Rule:
    """What an operation computes."""

    kinds: str
    """First letters of the types it is defined for: signed, unsigned, bits, float, predicate."""
    compute: Callable[..., Array]
    sources: tuple[str, ...] = ()
    """Types of its operands, "" for the instruction's own and "wide" for twice its size; unset: all its own."""


RULES = {
    "add": Rule("su", np.add),
    "sub": Rule("su", np.subtract),
    "mul.lo": Rule("su", np.multiply),
    "mad.lo": Rule("su", lambda a, b, c: a * b + c),
    "mul.wide": Rule("su", _multiply_wide),
    "mad.wide": Rule("su", lambda a, b, c: _multiply_wide(a, b) + c, ("", "", "wide")),
    "div": Rule("s", _divide_integers),
    "neg": Rule("s", np.negative),
    "max": Rule("suf", np.fmax),  # of a NaN and a number the number
    "min": Rule("su", np.minimum),
    "and": Rule("bp", np.bitwise_and),
    "or": Rule("bp", np.bitwise_or),
    "xor": Rule("bp", np.bitwise_xor),
    "not": Rule("bp", np.bitwise_not),
    "shl": Rule("b", _shift_left, ("", "u32")),
    "shr": Rule("su", _shift_right, ("", "u32")),
    "bfe": Rule("su", _bit_field, ("", "u32", "u32")),
    "prmt": Rule("b", _permute_bytes),
    "selp": Rule("bsuf", _select, ("", "", "pred")),
    "add.rn": Rule("f", np.add),
    "sub.rn": Rule("f", np.subtract),
    "mul.rn": Rule("f", np.multiply),
    "div.rn": Rule("f", np.divide),
    "sqrt.rn": Rule("f", np.sqrt),
    "abs": Rule("f", np.abs),
    "fma.rn": Rule("f", _fused),
    "setp.lt": Rule("suf", np.less),
    "setp.le": Rule("suf", np.less_equal),
    "setp.gt": Rule("suf", np.greater),
    "setp.ge": Rule("suf", np.greater_equal),
    "setp.eq": Rule("bsuf", np.equal),
    "setp.ne": Rule("bsu", np.not_equal),
    "setp.num": Rule("f", lambda a, b: ~(np.isnan(a) | np.isnan(b))),
}
"""By the instruction's name without its type. Of comparisons each is false where a member is a NaN, as numpy's are."""
