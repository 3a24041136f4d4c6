"""Back ends of axes: which texts name some, and where they can be carried out."""

from __future__ import annotations

import pytest

from scrimp.config import Config, for_ranks, preset, replace_values, resolve
from scrimp.config.axis_backends import AxisBackend, axis_backends, check_backends
from scrimp.config.resolved import ResolvedLayout
from scrimp.errors import ConfigError


def test_axes_have_the_back_ends_and_networks_that_are_named() -> None:
    assert axis_backends(None) == axis_backends("") == {}
    assert axis_backends("dp=gloo, fsdp = nccl:IB,pp=nccl") == {
        "dp": AxisBackend("gloo"),
        "fsdp": AxisBackend("nccl", "IB"),
        "pp": AxisBackend("nccl"),
    }


@pytest.mark.parametrize("text", [",", "dp", "dp=", "dp=mpi", "rows=gloo", "dp=gloo,dp=gloo", "dp=nccl:"])
def test_what_names_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write AXIS=gloo"):
        axis_backends(text)


@pytest.mark.parametrize(
    ("text", "device", "reason"),
    [
        ("tp=gloo", "cpu", "layout.tp is 1"),
        ("dp=nccl", "cpu", "NCCL is for CUDA"),
        ("dp=gloo:IB", "cpu", "for nccl alone"),
        ("fsdp=gloo", "cuda", r"\(dp\) alone"),
    ],
)
def test_what_a_device_or_layout_does_not_have_is_refused(text: str, device: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_backends(ResolvedLayout(dp=2, fsdp=2, backends=text), device)


def test_on_other_ranks_a_run_goes_on_without_them() -> None:
    given = {"layout.dp": 2, "layout.backends": "dp=gloo"}
    saved = resolve(replace_values(Config(), given), preset("llama-3m"), device_type="cpu", ranks=2).config
    assert saved.layout.backends == "dp=gloo"
    assert for_ranks(saved, 1, ()).layout.backends is None
    assert for_ranks(saved, 2, ()).layout.backends == "dp=gloo"
    assert for_ranks(saved, 2, {"layout.dp"}).layout.backends is None
    assert for_ranks(saved, 2, {"layout.dp", "layout.backends"}).layout.backends == "dp=gloo"
