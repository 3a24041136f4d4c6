"""Numba where it is missing, and where it is installed and broken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scrimp.cpu import has_numba


def test_numba_that_cannot_be_imported_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "numba"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('Numba needs NumPy 2.3 or less')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    with pytest.warns(UserWarning, match=r"without its kernels .*NumPy 2\.3 or less"):
        assert not has_numba.__wrapped__()


def test_numba_that_is_not_installed_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not has_numba.__wrapped__()
