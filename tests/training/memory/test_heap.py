"""Between phases on a CPU freed heap goes back to the system, once the process has grown."""

import torch

from scrimp.host_memory import trim_heap
from scrimp.profiler.process_memory import resident_bytes
from scrimp.runtime.memory import PhaseEdges
from scrimp.training.memory.between_phases import heap_of
from scrimp.training.memory.heap import CREEP_BYTES, HostHeap

KIB = 2**10


def freed_between(kept: list[torch.Tensor], num_bytes: int) -> None:
    """Fill the heap with small tensors, and keep only every hundredth."""
    size = 16 * KIB  # below the size from which the heap maps memory of its own
    tensors = [torch.ones(size // 4) for _ in range(num_bytes // size)]
    kept += tensors[::100]


def test_heap_that_was_freed_goes_back_at_an_edge_and_is_said() -> None:
    said: list[str] = []
    edges = PhaseEdges(None, said.append, HostHeap(said.append))
    edges.switch("training")
    said.clear()
    before, kept = resident_bytes(), list[torch.Tensor]()
    freed_between(kept, 8 * CREEP_BYTES)
    grown = resident_bytes()
    assert before is not None
    assert grown is not None
    assert grown - before > 7 * CREEP_BYTES, "the gaps stay in the heap"
    edges.switch("evaluation")
    after = resident_bytes()
    assert after is not None
    assert grown - after > 6 * CREEP_BYTES
    (sentence,) = said
    given, _, rest = sentence.partition(" ")
    assert (
        abs(int(given.replace(",", "")) - (grown - after)) < CREEP_BYTES
    )  # a few pages between two readings
    assert rest == "bytes of freed heap were given back to the system before evaluation"
    assert all(bool((tensor == 1).all()) for tensor in kept)


def test_a_process_that_has_not_grown_is_left_alone(monkeypatch) -> None:
    said: list[str] = []
    heap = HostHeap(said.append)
    heap.at_edge("training")
    monkeypatch.setattr("scrimp.training.memory.heap.trim_heap", lambda: said.append("trimmed"))
    said.clear()
    heap.at_edge("evaluation")
    assert said == []


def test_another_c_library_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr("scrimp.host_memory.ctypes.CDLL", lambda _: object())
    said: list[str] = []
    assert not trim_heap()
    HostHeap(said.append).at_edge("training")
    assert said == []


def test_only_a_cpu_has_its_tensors_in_the_heap() -> None:
    assert heap_of(torch.device("cpu"), print) is not None
    assert heap_of(torch.device("cuda"), print) is None
