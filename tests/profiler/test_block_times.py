"""Times of real blocks: every level of every class, in an order that noise cannot turn round."""

import dataclasses

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st

from scrimp.config import Config, ModelConfig, base_architecture
from scrimp.config.activations import LEVELS
from scrimp.gemm import backends_for
from scrimp.precision import LinearPrecision
from scrimp.profiler.block_times import Timed, measure_blocks, measure_ends, nearest_rising

CPU = torch.device("cpu")
SMALL = base_architecture(Config(model=ModelConfig(preset="llama-3m", vocab_size=512, num_layers=4)), None)
PLAIN = (LinearPrecision.of("fp32"),) * 4
TIMED = Timed(
    SMALL,
    (0,),
    (PLAIN,),
    PLAIN[0],
    compute="fp32",
    parameters="fp32",
    master_weights=False,
    micro_batch=2,
    sequence=64,
    loss_chunk=0,
)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9))
def test_the_nearest_rising_sequence_is_that_of_the_formula(values: list[int]) -> None:
    # Robertson, Wright and Dykstra: the least of the means to the right of the largest to the left.
    count = len(values)

    def mean(first: int, last: int) -> float:
        return sum(values[first : last + 1]) / (last - first + 1)

    expected = [
        max(min(mean(first, last) for last in range(i, count)) for first in range(i + 1))
        for i in range(count)
    ]
    assert nearest_rising(values) == pytest.approx(expected)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.slow
def test_all_levels_of_all_classes_are_timed(compute: str) -> None:
    quantized, plain = (LinearPrecision.of("fp8"),) * 4, (LinearPrecision.of(compute),) * 4
    timed = dataclasses.replace(
        TIMED, blocks=(0, 1), classes=(plain, quantized), head=plain[0], compute=compute
    )
    random_state = torch.get_rng_state()
    found = measure_blocks(timed, LEVELS, CPU, backends_for(CPU), rounds=2)
    assert found is not None
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [list(kind) for kind in found] == [list(LEVELS)] * 2
    for kind in found:
        again = [kind[level].again for level in LEVELS]
        assert again == sorted(again)
        assert again[0] == 0
        assert all(one.forward > 0 and one.backward > 0 for one in kind.values())


@pytest.mark.slow
def test_bf16_weights_with_masters_are_timed_as_they_are_trained() -> None:
    plain = LinearPrecision.of("bf16")
    timed = dataclasses.replace(
        TIMED, classes=((plain,) * 4,), head=plain, compute="bf16", parameters="bf16", master_weights=True
    )
    assert measure_blocks(timed, ("keep", "block"), CPU, backends_for(CPU), rounds=2) is not None
    ends = measure_ends(timed, CPU, backends_for(CPU), rounds=2)
    assert ends is not None
    assert ends > 0


@pytest.mark.slow
def test_blocks_of_a_run_that_compiles_are_timed_compiled() -> None:
    counted = torch._dynamo.utils.counters["stats"]
    seen = {}
    for compiled in (False, True):
        counted.clear()
        timed = dataclasses.replace(TIMED, compiled=compiled)
        found = measure_blocks(timed, ("keep", "block"), CPU, backends_for(CPU), rounds=1)
        assert found is not None
        assert list(found[0]) == ["keep", "block"]
        seen[compiled] = counted["unique_graphs"]
    assert seen == {False: 0, True: 2}, "a graph of each level"


def test_what_there_is_no_memory_for_is_not_timed() -> None:
    timed = dataclasses.replace(TIMED, micro_batch=2**24, sequence=2**12)
    assert measure_blocks(timed, ("keep",), CPU, backends_for(CPU), rounds=1) is None
    assert measure_ends(timed, CPU, backends_for(CPU), rounds=1) is None
