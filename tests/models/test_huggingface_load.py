"""Loading weights: whole and sharded folders, and every way in which a folder can be wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_families import reference_folder, scrimp_model
from safetensors.torch import load_file, save_file

from scrimp.errors import ModelError, ScrimpError, StorageError
from scrimp.models.huggingface.config_json import read_architecture
from scrimp.models.huggingface.load import load_weights
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model

Tensors = dict[str, torch.Tensor]
Q = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def edited(folder: Path, edit: Callable[[Tensors], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def parameters(model: Model) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_shards_written_by_transformers_load_as_the_single_file(tmp_path: Path) -> None:
    model, whole = reference_folder("qwen2 untied", tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    assert_same(parameters(scrimp_model(whole)), parameters(scrimp_model(tmp_path / "shards")))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_cast_to_the_type_of_the_model(tmp_path: Path, stored: torch.dtype) -> None:
    _, folder = reference_folder("llama", tmp_path)
    exact = parameters(scrimp_model(folder))
    edited(folder, lambda t: t.update({name: tensor.to(stored) for name, tensor in t.items()}))
    for dtype in (torch.float32, torch.bfloat16):
        loaded = parameters(scrimp_model(folder, dtype))
        assert_same(loaded, {name: tensor.to(stored).to(dtype) for name, tensor in exact.items()})


def test_buffers_of_older_versions_and_an_equal_stored_head_are_ignored(tmp_path: Path) -> None:
    _, folder = reference_folder("qwen2 tied", tmp_path)
    exact = parameters(scrimp_model(folder))
    edited(
        folder,
        lambda t: t.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
                "lm_head.weight": t[EMBEDDING].clone(),
            }
        ),
    )
    assert_same(parameters(scrimp_model(folder)), exact)


def _truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 5000)


def _lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def _only(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(b"\x80\x02}q\x00.")

    return change


def _index(weight_map: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def _edit(edit: Callable[[Tensors], object]) -> Callable[[Path], object]:
    return lambda folder: edited(folder, edit)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_truncate, r"model\.safetensors is truncated or no safetensors file"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "is truncated or no safetensors file"),
    "text": (
        lambda f: (f / "model.safetensors").write_text("not this " * 99),
        "is truncated or no safetensors",
    ),
    "Git LFS pointer": (_lfs_pointer, "git lfs pull"),
    "pickle": (_only("pytorch_model.bin"), r"pytorch_model\.bin is not safetensors .* save_pretrained"),
    "sharded pickle": (
        _only("pytorch_model.bin.index.json"),
        "pytorch_model.bin.index.json is not safetensors",
    ),
    "original checkpoint": (_only("consolidated.00.pth"), r"consolidated\.00\.pth is not safetensors"),
    "gguf": (_only("model-q4.gguf"), r"model-q4\.gguf is not safetensors"),
    "no index": (_only("model-00001-of-00002.safetensors"), r"index\.json is missing - got 1 shards"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
    "missing shard": (_index({Q: "model-00002-of-00002.safetensors"}), "00002.* is missing"),
    "tensor not in its shard": (_index({"x": "model-00001-of-00002.safetensors"}), "lacks the tensor x"),
    "index that leaves tensors out": (_index({Q: "model-00001-of-00002.safetensors"}), "missing: lm_head"),
    "index to another folder": (_index({Q: "../elsewhere.safetensors"}), "outside the folder"),
    "index without a map": (_index([]), r"\$\.weight_map has the wrong type"),
    "missing tensor": (_edit(lambda t: t.pop(Q)), f"missing: {Q}"),
    "missing head": (
        _edit(lambda t: t.pop("lm_head.weight")),
        "missing: lm_head.weight .* tie_word_embeddings",
    ),
    "unexpected tensor": (_edit(lambda t: t.update(score=torch.ones(2))), "unexpected: score"),
    "bias": (
        _edit(lambda t: t.update({Q.replace("weight", "bias"): torch.ones(64)})),
        "unexpected: .*q_proj.bias",
    ),
    "wrong shape": (
        _edit(lambda t: t.update({Q: torch.ones(32, 64)})),
        rf"{Q} has the wrong shape - got \(32, 64\)",
    ),
    "transposed": (
        _edit(lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.ones(128, 64)})),
        "down_proj.weight has the wrong shape",
    ),
    "padded vocabulary": (
        _edit(lambda t: t.update({EMBEDDING: torch.ones(128, 64)})),
        "vocabulary mismatch in model.embed_tokens.weight - got 128 rows, expected 97",
    ),
    "quantized": (
        _edit(lambda t: t.update({Q: torch.ones(64, 64, dtype=torch.int8)})),
        f"{Q} is quantized - got I8",
    ),
    "no folder": (shutil.rmtree, "is not a folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_folder_is_named_and_leaves_the_model_as_it_was(case: str, tmp_path: Path) -> None:
    _, folder = reference_folder("llama", tmp_path / "model")
    model = build_model(read_architecture(folder))
    initialise(model, seed=0)
    before = parameters(model)
    change, message = WRONG[case]
    change(folder)
    with pytest.raises(ModelError, match=message):
        load_weights(model, folder)
    assert_same(parameters(model), before)


def test_a_tied_model_refuses_a_stored_head_of_its_own(tmp_path: Path) -> None:
    _, folder = reference_folder("qwen2 tied", tmp_path)
    edited(folder, lambda t: t.update({"lm_head.weight": t[EMBEDDING] + 1}))
    with pytest.raises(ModelError, match=r"lm_head\.weight differs from .* tie_word_embeddings"):
        scrimp_model(folder)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    _, llama = reference_folder("llama", tmp_path / "llama")
    _, qwen = reference_folder("qwen2 untied", tmp_path / "qwen")
    with pytest.raises(ModelError, match=r"unexpected: .*k_proj\.bias.* and \d more"):
        load_weights(build_model(read_architecture(llama)), qwen)
    with pytest.raises(ModelError, match=r"missing: .*k_proj\.bias"):
        load_weights(build_model(read_architecture(qwen)), llama)


def test_a_model_without_storage_is_refused(tmp_path: Path) -> None:
    _, folder = reference_folder("llama", tmp_path)
    with pytest.raises(ModelError, match="no storage"):
        load_weights(build_model(read_architecture(folder), device="meta"), folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_a_storage_error(tmp_path: Path) -> None:
    _, folder = reference_folder("llama", tmp_path)
    model = build_model(read_architecture(folder))
    (folder / "model.safetensors").chmod(0)
    with pytest.raises(StorageError, match=r"model\.safetensors cannot be read"):
        load_weights(model, folder)


def test_a_folder_in_the_place_of_a_shard_is_an_error_that_names_it(tmp_path: Path) -> None:
    _, folder = reference_folder("llama", tmp_path)
    model = build_model(read_architecture(folder))
    _index({Q: "shard.safetensors"})(folder)
    (folder / "shard.safetensors").mkdir()
    with pytest.raises(ScrimpError, match=r"shard\.safetensors"):
        load_weights(model, folder)
