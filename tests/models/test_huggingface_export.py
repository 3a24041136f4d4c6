"""Exports: shards, streams in any order, one complete folder or none."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_families import FAMILIES, reference_model
from safetensors import safe_open
from safetensors.torch import load_file

from scrimp.config import Architecture
from scrimp.errors import ConfigError, ModelError, StorageError
from scrimp.files import whole_folder
from scrimp.models import spec_of
from scrimp.models.huggingface.config_json import architecture_from_config, read_architecture
from scrimp.models.huggingface.export import export_model
from scrimp.models.huggingface.load import load_weights
from scrimp.models.huggingface.streamed_files import ShardWriter
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model


def random_model(name: str = "llama") -> Model:
    model = build_model(architecture_from_config(reference_model(name).config.to_dict()))
    initialise(model, seed=3)
    return model


def read_back(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("max_bytes", [1, 30_000, 100_000])
def test_a_sharded_export_holds_the_same_tensors_as_a_single_file(max_bytes: int, tmp_path: Path) -> None:
    model = random_model("qwen2 tied")
    export_model(model, model.architecture, tmp_path / "one")
    export_model(model, model.architecture, tmp_path / "many", max_shard_bytes=max_bytes)
    assert not list((tmp_path / "one").glob("*.index.json"))
    assert_same(read_back(tmp_path / "one"), read_back(tmp_path / "many"))

    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "many").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == 4 * spec_of(model.architecture).parameters
    for file in files:
        with safe_open(tmp_path / "many" / file, framework="pt") as opened:
            names = list(opened.keys())
            assert all(index["weight_map"][name] == file for name in names)
            stored = sum(opened.get_tensor(name).nbytes for name in names)
        assert stored <= max_bytes or len(names) == 1

    back = build_model(model.architecture)
    load_weights(back, tmp_path / "many")
    assert_same(back.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.every(3)
def test_a_stream_in_any_order_writes_the_same_file(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    shuffled = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    random.Random(0).shuffle(shuffled)
    export_model(model, model.architecture, tmp_path / "model")
    export_model(dict(shuffled), model.architecture, tmp_path / "mapping")
    export_model(iter(shuffled), model.architecture, tmp_path / "stream")
    expected = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert (tmp_path / "mapping" / "model.safetensors").read_bytes() == expected
    assert (tmp_path / "stream" / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize("name", ["llama", "qwen2 tied", "gemma3"])
@pytest.mark.parametrize(("order", "share"), [(1, None), (-1, None), (1, 0.1), (-1, 0.1)])
@pytest.mark.every(3)
def test_factors_are_exported_as_their_product(
    name: str, order: int, share: float | None, tmp_path: Path
) -> None:
    dense = architecture_from_config(reference_model(name).config.to_dict())
    model = build_model(replace(dense, rank=7, sparse_share=share))
    initialise(model, seed=3)
    for parameter in model.parameters():
        parameter.data.add_(0.01)  # biases are not zero
    export_model(list(model.named_parameters())[::order], model.architecture, tmp_path / "out")
    assert read_architecture(tmp_path / "out").rank is None
    whole = build_model(dense)
    load_weights(whole, tmp_path / "out")
    tokens = torch.arange(40)[None] % dense.vocab_size
    torch.testing.assert_close(whole.logits(whole(tokens)), model.logits(model(tokens)), rtol=1e-5, atol=1e-5)
    named = list(model.named_parameters())
    twice = [one for one in named if "0.mlp.down.A" in one[0]] * 2
    with pytest.raises(ModelError, match=r"mlp\.down\.A\.weight came twice"):
        export_model(iter(twice), model.architecture, tmp_path / "twice")
    with pytest.raises(ModelError, match=f"lacks one of its {2 if share is None else 3} parts"):
        export_model(
            (one for one in model.named_parameters() if "0.mlp.down.A" not in one[0]),
            model.architecture,
            tmp_path / "half",
        )


def test_a_product_is_made_in_float32_and_rounded_once(tmp_path: Path) -> None:
    model = build_model(replace(random_model().architecture, rank=7), dtype=torch.bfloat16)
    initialise(model, seed=3)
    first, second = (model.state_dict()[f"blocks.0.mlp.down.{one}.weight"].float() for one in "AB")
    for dtype in (None, torch.float32):
        export_model(model, model.architecture, tmp_path / str(dtype), dtype=dtype)
        found = read_back(tmp_path / str(dtype))["model.layers.0.mlp.down_proj.weight"]
        assert torch.equal(found, (second @ first).to(dtype or torch.bfloat16))


def test_a_stream_is_exported_with_one_parameter_in_memory(tmp_path: Path) -> None:
    architecture = Architecture(
        family="llama",
        vocab_size=1000,
        num_layers=10,
        width=64,
        num_heads=2,
        num_kv_heads=2,
        head_size=32,
        ffn_width=128,
        context=64,
    )
    shapes = {name: p.shape for name, p in build_model(architecture, device="meta").named_parameters()}
    seen: list[weakref.ref[torch.Tensor]] = []

    def read(name: str) -> tuple[str, torch.Tensor]:
        tensor = torch.zeros(shapes[name])
        seen.append(weakref.ref(tensor))
        return name, tensor

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name in shapes:
            assert all(tensor() is None for tensor in seen), "the parameter before is still in memory"
            yield read(name)

    export_model(stream(), architecture, tmp_path / "out", dtype=torch.bfloat16)
    assert len(seen) == len(shapes)
    header = 100_000
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 2 * spec_of(
        architecture
    ).parameters + header


def _stream_of(model: Model, change: str) -> list[tuple[str, torch.Tensor]]:
    stream = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    name, tensor = stream[3]
    changes = {
        "missing": [*stream[:3], *stream[4:]],
        "twice": [*stream, stream[0]],
        "unknown": [*stream, ("blocks.9.extra", tensor)],
        "mis-shaped": [*stream[:3], (name, tensor[:1]), *stream[4:]],
        "another format": [*stream[:3], (name, tensor.bfloat16()), *stream[4:]],
        "empty": [],
        "integers": [(n, t.long()) for n, t in stream],
    }
    return changes[change]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"missing - got none named blocks\.0\.attention\.out"),
        ("twice", r"embedding\.weight is no parameter of this architecture, or came twice"),
        ("unknown", r"blocks\.9\.extra is no parameter"),
        ("mis-shaped", r"blocks\.0\.attention\.out\.weight has the wrong shape"),
        ("another format", "another format than the rest - got torch.bfloat16"),
        ("empty", "no weights to export"),
        ("integers", "cannot be exported in this format"),
    ],
)
def test_weights_that_do_not_fit_are_named_and_leave_nothing(
    change: str, message: str, tmp_path: Path
) -> None:
    model = random_model()
    with pytest.raises(ModelError, match=message):
        export_model(_stream_of(model, change), model.architecture, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_or_a_file_in_the_way_is_refused_untouched(tmp_path: Path) -> None:
    model = random_model()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    (tmp_path / "file").write_text("keep")
    for name in ("out", "file"):
        with pytest.raises(StorageError, match="exists already"):
            export_model(model, model.architecture, tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "mine.txt", "out"]


def test_an_empty_folder_and_what_a_killed_export_left_are_replaced(tmp_path: Path) -> None:
    model = random_model()
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"half")
    export_model(model, model.architecture, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "model.safetensors", "out"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_folder_appears_only_when_the_tokenizer_is_saved_too(tmp_path: Path) -> None:
    model = random_model()
    out = tmp_path / "new" / "out"

    def save(folder: Path) -> None:
        assert not out.exists()
        assert (folder / "config.json").exists()
        (folder / "tokenizer.json").write_text("{}")

    export_model(model, model.architecture, out, save_tokenizer=save)
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model()
    written = 0

    def full(self: ShardWriter, name: str, tensor: torch.Tensor) -> None:
        nonlocal written
        written += 1
        if written == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ShardWriter, "write", full)
    with pytest.raises(
        StorageError, match=r"cannot write .*out - got No space left on device - free some space"
    ):
        export_model(model, model.architecture, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_the_system_cuts_short_is_a_storage_error(tmp_path: Path) -> None:
    model = random_model()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            export_model(model, model.architecture, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_path_below_a_file_is_a_storage_error(tmp_path: Path) -> None:
    model = random_model()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        export_model(model, model.architecture, tmp_path / "file" / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission_is_a_storage_error(tmp_path: Path) -> None:
    model = random_model()
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied"):
        export_model(model, model.architecture, tmp_path / "out")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConfigError("from inside")])
def test_errors_of_the_block_pass_and_the_partial_folder_goes(error: BaseException, tmp_path: Path) -> None:
    def fail_inside() -> None:
        with whole_folder(tmp_path / "out") as folder:
            (folder / "file").write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail_inside()
    assert list(tmp_path.iterdir()) == []
