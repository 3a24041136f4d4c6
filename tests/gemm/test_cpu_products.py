"""bf16 products of CPUs without units for bf16: float32's numbers, rounded once; what is not bf16 is torch's own.

The kernels are replaced for good, so each of these runs in a process of its own, whatever the CPU has.
"""

from __future__ import annotations

import contextlib
import io
import textwrap
import warnings
from pathlib import Path

import pytest
from distributed import spawn

from scrimp.gemm import cpu_products
from scrimp.gemm.cpu_products import widen_bf16_products

BEGIN = """
    import torch
    import torch.nn.functional as F
    from scrimp.gemm.cpu_products import replace_kernels, widens_bf16_products
    torch.manual_seed(0)
    bf16 = torch.bfloat16
    x, y, z = torch.randn(33, 70), torch.randn(70, 20), torch.randn(33, 20)
    low = x.to(bf16), y.to(bf16), z.to(bf16)
    wide = [one.float() for one in low]
"""


def printed(rank: int, script: str) -> str:
    """What a script prints; a warning is an error."""
    with contextlib.redirect_stdout(io.StringIO()) as said, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        exec(textwrap.dedent(BEGIN) + textwrap.dedent(script), {})
    return said.getvalue()


def in_process(script: str, folder: Path) -> str:
    """What a script prints in a process that has torch's own kernels."""
    (found,) = spawn(1, printed, folder, script)
    return str(found)


def test_products_are_float32s_rounded_once_in_every_form(tmp_path: Path) -> None:
    in_process(
        """
        replace_kernels()
        (x, y, z), (X, Y, Z) = low, wide
        assert torch.equal(x @ y, (X @ Y).to(bf16))
        assert torch.equal(y.T @ x.T, (Y.T @ X.T).to(bf16))
        added = torch.addmm(Z, X, Y, beta=0.5, alpha=2).to(bf16)
        assert torch.equal(torch.addmm(z, x, y, beta=0.5, alpha=2), added)
        assert torch.equal(z.clone().addmm_(x, y, beta=0.5, alpha=2), added)
        assert torch.equal(torch.addmm(z[0], x, y), torch.addmm(Z[0], X, Y).to(bf16))
        for shape in ((0,), (33, 20)):
            out = torch.empty(shape, dtype=bf16)
            assert torch.mm(x, y, out=out) is out and torch.equal(out, x @ y)
        rows = x[:32].view(4, 8, 70), y.expand(4, 70, 20), z[:32].view(4, 8, 20)
        ROWS = [one.float() for one in rows]
        assert torch.equal(rows[0] @ rows[1], (ROWS[0] @ ROWS[1]).to(bf16))
        assert torch.equal(torch.baddbmm(rows[2], *rows[:2]), torch.baddbmm(ROWS[2], *ROWS[:2]).to(bf16))
        inside = rows[2].clone().baddbmm_(*rows[:2])
        assert torch.equal(inside, torch.baddbmm(ROWS[2], *ROWS[:2]).to(bf16))
        assert torch.equal(F.linear(x, y.T, z[0]), torch.addmm(Z[0], X, Y).to(bf16))
        """,
        tmp_path,
    )


def test_attention_and_gradients_are_as_exact_as_bf16_allows(tmp_path: Path) -> None:
    found = in_process(
        """
        replace_kernels()
        low = [torch.randn(2, 3, 80, 16).to(bf16).requires_grad_() for _ in range(3)]
        exact = [one.detach().double().requires_grad_() for one in low]
        mask = torch.randn(80, 80).to(bf16)
        for named in ({"is_causal": True}, {"attn_mask": mask}):
            a = F.scaled_dot_product_attention(*low, **named)
            assert a.dtype == bf16
            named = {k: v.double() if v is mask else v for k, v in named.items()}
            b = F.scaled_dot_product_attention(*exact, **named)
            gradients = [torch.autograd.grad(y.square().sum(), z) for y, z in ((a, low), (b, exact))]
            for one, other in zip((a, *gradients[0]), (b, *gradients[1])):
                print(float(((one - other).norm() / other.norm()).detach()))
        """,
        tmp_path,
    )
    # One rounding to bf16 is 1.7e-3 in the mean of the squares; a gradient has those of the result in it too.
    assert all(float(line) < 3e-3 for line in found.split()), found


def test_what_is_not_bf16_is_torchs_own_and_types_are_not_mixed(tmp_path: Path) -> None:
    in_process(
        """
        calls = {
            "mm": lambda: x @ y, "addmm": lambda: torch.addmm(z, x, y), "inside": lambda: z.clone().addmm_(x, y),
            "out": lambda: torch.mm(x, y, out=torch.empty(33, 20)),
            "double": lambda: x.double() @ y.double(), "integers": lambda: x.long() @ y.long(),
            "half": lambda: x.half() @ y.half(),
            "attention": lambda: F.scaled_dot_product_attention(*[x[:32].view(1, 4, 8, 70)] * 3, is_causal=True),
        }
        before = {name: call() for name, call in calls.items()}
        assert not widens_bf16_products()
        replace_kernels()
        assert widens_bf16_products()
        for name, call in calls.items():
            assert torch.equal(call(), before[name]), name
        mixed = (
            lambda: low[0] @ y, lambda: x @ low[1], lambda: torch.addmm(low[2], low[0], y),
            lambda: torch.addmm(z, *low[:2]), lambda: torch.mm(*low[:2], out=torch.empty(33, 20)),
            lambda: z.clone().addmm_(*low[:2]),
        )
        for number, call in enumerate(mixed):
            try:
                call()
            except RuntimeError as error:
                assert "dtype" in str(error), error
            else:
                raise AssertionError(number)
        """,
        tmp_path,
    )


def test_modes_above_see_products_of_bf16(tmp_path: Path) -> None:
    """What proofs, traces and counts of FLOPs rely on."""
    in_process(
        """
        from torch.utils._python_dispatch import TorchDispatchMode
        seen = []
        class Seen(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append((func.__name__, args[0].dtype))
                return func(*args, **(kwargs or {}))
        replace_kernels()
        with Seen():
            low[0] @ low[1]
        assert seen == [("mm.default", bf16)], seen
        """,
        tmp_path,
    )


@pytest.mark.parametrize("has_units", [True, False])
def test_kernels_are_replaced_only_where_there_are_no_units(
    has_units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: list[bool] = []
    monkeypatch.setattr(cpu_products, "has_bf16_units", lambda: has_units)
    monkeypatch.setattr(cpu_products, "replace_kernels", lambda: replaced.append(True))
    widen_bf16_products()
    assert replaced == [True] * (not has_units)


def test_a_run_on_a_cpu_asks_for_it(tmp_path: Path) -> None:
    """Where there are units nothing changes; where there are none a product of 1,024 takes no second."""
    script = """
        from scrimp.gemm.cpu_products import has_bf16_units
        from scrimp.profiler import resolve_device
        assert not widens_bf16_products()
        resolve_device("cpu")
        assert widens_bf16_products() != has_bf16_units()
    """
    in_process(script, tmp_path)
