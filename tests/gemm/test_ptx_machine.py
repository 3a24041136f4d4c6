"""The machine that runs PTX: its arithmetic, its memory, and what it refuses."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from ptx_machine import RULES, Machine, UnknownInstructionError, parse
from ptx_memory import AccessError, Array, GlobalMemory

HEAD = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 64
{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<9>;
	ld.param.b64 	%rd1, [kernel_param_0];
	mov.u32 	%r1, %tid.x;
	shl.b32 	%r2, %r1, 2;
	cvt.u64.u32 	%rd2, %r2;
	add.s64 	%rd3, %rd1, %rd2;
	xor.b32 	%r3, %r2, 4;
"""
"""%rd3 is a word of a thread's own in global memory, %r2 one in shared memory, %r3 its neighbour's."""


def ran(lines: str, buffer: Array | None = None) -> tuple[Array, list[str]]:
    """(64 words of global memory, races) after a program of 64 threads; `buffer` is what memory held before."""
    memory = GlobalMemory([np.zeros(256, np.uint8) if buffer is None else buffer.view(np.uint8)])
    machine = Machine(parse(f"{HEAD}{lines}\n\tret;\n}}\n"), 1, memory.addresses, memory, 256)
    machine.run()
    return memory.bytes[memory.slices[0]].view(np.uint32), machine.races


def test_threads_write_what_they_compute() -> None:
    words, races = ran("mad.lo.s32 %r4, %r1, %r1, 7;\nst.global.b32 [%rd3], %r4;")
    assert (words == np.arange(64) ** 2 + 7).all()
    assert not races


def test_a_guard_picks_threads_of_stores_and_of_registers() -> None:
    words, _ = ran(
        "setp.lt.u32 %p1, %r1, 9;\nmov.b32 %r4, 5;\n@!%p1 mov.b32 %r4, 6;\n@%p1 st.global.b32 [%rd3+0], {%r4};"
    )
    assert (words == np.where(np.arange(64) < 9, 5, 0)).all()


def test_neighbours_exchange_words_over_a_barrier_and_race_without() -> None:
    exchange = "st.shared.b32 [%r2], %r1;\n{}\nld.shared.b32 %r4, [%r3];\nst.global.b32 [%rd3], %r4;"
    words, races = ran(exchange.format("bar.sync 0;"))
    assert (words == (np.arange(64) ^ 1)).all()
    assert not races
    words, (race,) = ran(exchange.format(""))
    assert (words == (np.arange(64) ^ 1)).all(), "lockstep alone hides it"
    assert "ld.shared.b32 %r4, [%r3] reads what another thread wrote (256 bytes)" in race


def test_a_barrier_of_a_warp_makes_peace_inside_it_alone() -> None:
    exchange = (
        "st.shared.b32 [%r2], %r1;\nbar.warp.sync -1;\nxor.b32 %r3, %r2, {};\nld.shared.b32 %r4, [%r3];"
    )
    assert not ran(exchange.format(4))[1]
    assert "reads what another thread wrote (256" in ran(exchange.format(128))[1][0]


def test_warps_that_wrote_the_same_numbers_read_them_after_barriers_of_their_own() -> None:
    copies = "and.b32 %r4, %r2, 124;\nst.shared.b32 [%r4], %r4;\n{}\nxor.b32 %r4, %r4, 4;\nld.shared.b32 %r5, [%r4];"
    assert not ran(copies.format("bar.warp.sync -1;"))[1]
    assert "reads what another thread wrote" in ran(copies.format(""))[1][0]
    others = "\nxor.b32 %r4, %r2, 128;\nld.shared.b32 %r5, [%r4];"
    written = "st.shared.b32 [%r2], %r1;\n" + copies.format("bar.warp.sync -1;") + others
    assert any("reads what another thread wrote" in race for race in ran(written)[1])


@pytest.mark.parametrize(
    ("lines", "race"),
    [
        ("st.shared.b32 [%r2], 1;\nst.shared.b32 [%r3], 1;", "writes what another thread wrote (256"),
        ("ld.global.b32 %r4, [%rd3];\nst.global.b32 [%rd1], 0;", "writes what another thread read (252"),
        ("st.global.b32 [%rd1], %r1;", "writes different numbers to a byte (63"),
        (
            "st.shared.b32 [%r2], 1;\nbar.sync 0;\nld.shared.b32 %r4, [%r3];\nld.shared.b32 %r4, [%r2];\n"
            "st.shared.b32 [%r2], 1;",
            "writes what another thread read (256",
        ),
    ],
)
def test_races(lines: str, race: str) -> None:
    _, races = ran(lines)
    assert race in races[0]


def test_threads_that_jump_ahead_wait_for_the_others() -> None:
    words, _ = ran(
        "mov.b32 %r4, 5;\nsetp.lt.u32 %p1, %r1, 9;\n@%p1 bra $L__BB0_1;\nmov.b32 %r4, 6;\n"
        "st.global.b32 [%rd3], 1;\n$L__BB0_1:\nmov.b32 %r5, 7;\n@%p1 st.global.b32 [%rd3], %r4;"
    )
    assert (words == np.where(np.arange(64) < 9, 5, 1)).all()


def test_a_loop_runs_as_often_as_it_says() -> None:
    lines = (
        "mov.b32 %r4, 0;\nmov.b32 %r5, 0;\n$L__BB0_1:\nadd.s32 %r4, %r4, %r1;\nadd.s32 %r5, %r5, 1;\n"
        "setp.lt.u32 %p1, %r5, {};\n@%p1 bra $L__BB0_1;\nst.global.b32 [%rd3], %r4;"
    )
    words, _ = ran(lines.format(3))
    assert (words == 3 * np.arange(64)).all()
    with pytest.raises(UnknownInstructionError, match="back for some threads only"):
        ran(lines.format("%r1"))


def test_the_largest_number_of_all_threads_stays_and_atomics_race_with_plain_reads() -> None:
    largest = "red.global.gpu.relaxed.max.s32 [%rd1], %r1;\n"
    words, races = ran(largest)
    assert (words[0], words[1]) == (63, 0)
    assert not races
    _, (race,) = ran(f"{largest}ld.global.b32 %r4, [%rd1];")
    assert "reads what another thread wrote" in race
    _, (race,) = ran(f"st.global.b32 [%rd1], 1;\n{largest}")
    assert "meets plain reads or writes" in race


def test_copies_of_a_number_may_be_written_at_once_but_not_read_before_a_barrier() -> None:
    same = "mov.b32 %r4, 0;\nst.shared.b32 [%r4], 7;\n{}\nld.shared.b32 %r5, [%r4];"
    assert not ran(same.format("bar.sync 0;"))[1]
    assert len(ran(same.format(""))[1]) == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("st.global.b32 [%rd3+256], %r1;", "leaves memory|between the buffers"),
        ("st.global.b32 [%rd3+-4], %r1;", "leaves memory"),
        ("st.global.b32 [%rd3+2], %r1;", "not aligned"),
        ("st.shared.b32 [%r2+4], %r1;", "leaves memory"),
        ("ld.shared.b32 %r4, [%r2];", "nobody wrote"),
    ],
)
def test_bad_addresses(line: str, why: str) -> None:
    with pytest.raises(AccessError, match=why):
        ran(line)


@pytest.mark.parametrize(
    "line",
    [
        "bra $L__BB0_2;",
        "@%p1 bra $L__BB0_2;\nbar.sync 0;\n$L__BB0_2:",
        "bar.warp.sync 15;",
        "add.f32 %r4, %r1, %r1;",
        "mul.rn.ftz.f32 %r4, %r1, %r1;",
        "min.f32 %r4, %r1, %r1;",
        "setp.ne.f32 %p1, %r1, %r1;",
        "ret;\nmov.b32 %r4, 0;",
        "ld.volatile.global.b32 %r4, [%rd3];",
        "cp.async.cg.shared.global [%r2], [%rd3], 16;",
        ".local .b8 stack[16];",
    ],
)
def test_what_it_does_not_know_is_refused(line: str) -> None:
    with pytest.raises(UnknownInstructionError):
        ran(f"setp.lt.u32 %p1, %r1, 9;\n{line}")


def test_matrices_are_read_as_they_are_stored_and_transposed_where_asked() -> None:
    """Each warp stores four matrices of 8 x 8 and reads them with the axes of each exchanged."""
    lines = """
	and.b32 %r4, %r1, 31;
	shl.b32 %r4, %r4, 4;
	and.b32 %r5, %r4, 112;
	and.b32 %r6, %r1, 31;
	shr.u32 %r7, %r1, 5;
	shl.b32 %r7, %r7, 7;
	add.s32 %r5, %r5, %r7;
	stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r5], {%r1};
	bar.sync 0;
	ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r8}, [%r5];
	st.global.b32 [%rd3], %r8;
"""
    words, races = ran(lines)
    assert not races
    halves = np.arange(64, dtype=np.uint32).view(np.uint16).reshape(2, 8, 8)
    assert (words.view(np.uint16).reshape(2, 8, 8) == halves.transpose(0, 2, 1)).all()


def test_a_fused_product_and_sum_rounds_once() -> None:
    random = np.random.default_rng(0)
    a, b, c = (random.standard_normal(4000).astype(np.float32) for _ in range(3))
    a[::2] = 1 + 2.0**-12 * random.integers(0, 4096, 2000)
    b[::2] = 1 + 2.0**-12 * random.integers(0, 4096, 2000)
    c[::2] = random.choice([2.0**-40, -(2.0**-40), 2.0**-70, -(2.0**30)], 2000)
    found = RULES["fma.rn"].compute(a, b, c)
    for x, y, z, got in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        below, above = np.nextafter(got, -np.float32(np.inf)), np.nextafter(got, np.float32(np.inf))
        error = abs(Fraction(float(got)) - exact)
        for other in below, above:
            distance = abs(Fraction(float(other)) - exact)
            is_even = not int(got.view(np.int32)) & 1
            assert error < distance or (error == distance and is_even)


def test_shifts_fields_and_permutations() -> None:
    number, count = np.array([0x80F00012], np.uint32), [np.array([n], np.uint32) for n in range(33)]
    signed = number.view(np.int32)
    assert RULES["shl"].compute(number, count[32])[0] == 0
    assert RULES["shr"].compute(number, count[32])[0] == 0
    assert RULES["shr"].compute(signed, count[32])[0] == -1
    assert RULES["shr"].compute(signed, count[4])[0] == -0x7F0FFFF
    assert RULES["bfe"].compute(number, count[20], count[4])[0] == 0xF
    assert RULES["bfe"].compute(signed, count[20], count[4])[0] == -1
    other, selector = np.array([0xAABBCCDD], np.uint32), np.array([0x7043], np.uint32)
    assert RULES["prmt"].compute(number, other, selector)[0] == 0xAA12DD80
    assert RULES["div"].compute(np.array([-7], np.int32), np.array([2], np.int32))[0] == -3
