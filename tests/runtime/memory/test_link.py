"""Links copy every byte, count them, and the late one shows who breaks a rule."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from late_link import LateLink
from torch import Tensor

from scrimp.errors import DeviceError
from scrimp.runtime.memory import CudaLink, HostArena, HostLink, Link

CPU = torch.device("cpu")
LINKS = [HostLink, LateLink]


def arena(device: torch.device = CPU) -> HostArena:
    return HostArena(2**16, device, poisons=True)


def bits(tensor: Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.bool]
)
def test_what_was_waited_for_is_what_was_sent(kind: type[Link], dtype: torch.dtype) -> None:
    link = kind(CPU)
    source = torch.randn(7, 5).to(dtype)
    place = arena().take(source.nbytes)
    link.send(source, place).wait()
    target = torch.empty_like(source)
    ticket = link.fetch(place, target)
    ticket.wait()
    ticket.wait()
    assert ticket.is_done()
    assert bits(target) == bits(source)
    assert (link.bytes_sent, link.bytes_fetched) == (source.nbytes, source.nbytes)


def test_a_late_copy_takes_place_when_it_is_waited_for() -> None:
    link, place = LateLink(CPU), arena().take(12)
    source = torch.ones(3)
    ticket = link.send(source, place)
    assert not ticket.is_done()
    assert place.view((3,), torch.float32).isnan().all()
    source.fill_(2)  # too early
    ticket.wait()
    assert place.view((3,), torch.float32).tolist() == [2, 2, 2]
    target = torch.zeros(3)
    ticket = link.fetch(place, target)
    assert target.isnan().all()
    ticket.wait()
    assert target.tolist() == [2, 2, 2]


@pytest.mark.parametrize("kind", LINKS)
def test_the_host_may_finish_a_copy_from_any_thread_and_reads_what_was_sent(kind: type[Link]) -> None:
    """Once, however many wait for it at the same time."""
    link, place, source = kind(CPU), arena().take(2**14), torch.arange(2**12, dtype=torch.int32)
    ticket = link.send(source, place)

    def read() -> bool:
        ticket.finish()
        return torch.equal(place.view((2**12,), torch.int32), source)

    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(read) for _ in range(8)]
        ticket.wait()
        assert all(one.result() for one in found)
    assert ticket.is_done()


def test_a_source_that_was_freed_too_early_arrives_as_garbage() -> None:
    link, place = LateLink(CPU), arena().take(12)
    ticket = link.send(torch.ones(3), place)
    ticket.wait()
    assert place.view((3,), torch.float32).isnan().all()


def test_a_place_that_was_freed_too_early_arrives_as_garbage_or_as_its_next_content() -> None:
    for is_reused in (False, True):
        link, host = LateLink(CPU), arena()
        place, source, target = host.take(12), torch.ones(3), torch.zeros(3)
        link.send(source, place).wait()
        ticket = link.fetch(place, target)
        place.free()
        if is_reused:
            host.take(12).view((3,), torch.float32).fill_(5)
        ticket.wait()
        assert target.eq(5).all() if is_reused else target.isnan().all()


def test_a_target_that_was_freed_too_early_is_refused() -> None:
    link, place = LateLink(CPU), arena().take(12)
    with pytest.raises(DeviceError, match="target of a copy was freed"):
        link.fetch(place, torch.zeros(3)).wait()


def test_a_late_link_keeps_no_memory_alive() -> None:
    link, place = LateLink(CPU), arena().take(12)
    source = torch.ones(3)
    alive = torch.multiprocessing.reductions.StorageWeakRef(source.untyped_storage())
    ticket = link.send(source, place)
    del source
    assert alive.expired()
    assert not ticket.is_done()


def test_a_copy_that_does_not_fit_its_place_is_refused() -> None:
    place = arena().take(8)
    for kind in LINKS:
        with pytest.raises(RuntimeError, match="holds 8 bytes, not 12"):
            kind(CPU).send(torch.ones(3), place)


@pytest.mark.gpu
def test_cuda_copies_run_beside_the_compute_stream_and_in_order_with_it() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    link, host = CudaLink(device), HostArena(2**26, device)
    for turn in range(20):
        source = torch.full((2**22,), float(turn), device=device)
        torch.cuda._sleep(10**6)
        source.add_(0.5)  # the copy must come after it
        place = host.take(source.nbytes)
        ticket = link.send(source, place)
        ticket.wait()
        source.fill_(-1)  # and before this
        del source
        target = torch.empty(2**22, device=device)
        link.fetch(place, target).wait()
        place.free()
        assert target.eq(turn + 0.5).all()
    with torch.cuda.stream(link._out), pytest.raises(DeviceError, match="stream of the link"):
        link.send(torch.zeros(3, device=device), host.take(12))
