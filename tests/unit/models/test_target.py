"""Finding and loading targets, and telling weights apart."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from distillspec.config import TargetConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel, load_target
from distillspec.models import gguf as gguf_module
from distillspec.models import target as target_module
from distillspec.models.gguf import cache_root, unpack_gguf
from distillspec.models.language_model import decoder_layers, fingerprint
from distillspec.models.numerics import resolve_device, resolve_dtype
from distillspec.models.target import EMBEDDED_HUB_ID, resolve_path, short_name
from distillspec.models.tiny import tiny_model, tiny_tokenizer


def test_the_tiny_target_is_always_the_same_and_leaves_the_generator_alone(target: LanguageModel) -> None:
    state = torch.random.get_rng_state()
    again = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert again.identity == target.identity
    assert not again.model.training
    assert not any(p.requires_grad for p in again.model.parameters())


def test_the_fingerprint_is_the_same_in_both_formats_and_changes_with_a_step() -> None:
    model = tiny_model(264, layers=2)
    before = fingerprint(model)
    assert fingerprint(tiny_model(264, layers=2).to(torch.bfloat16)) == before
    optimizer = AdamW(model.parameters(), lr=1e-4)
    model(torch.tensor([[1, 2, 3, 4]]), labels=torch.tensor([[1, 2, 3, 4]])).loss.backward()
    optimizer.step()
    assert fingerprint(model) != before


def test_the_fingerprint_sees_shapes_and_seeds() -> None:
    prints = {fingerprint(tiny_model(264, layers=1, seed=seed)) for seed in (0, 1)}
    assert len(prints | {fingerprint(tiny_model(265, layers=1))}) == 3


def test_smollm2_without_its_package_is_the_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "embedded_gguf", lambda: None)
    assert resolve_path("smollm2") == EMBEDDED_HUB_ID


def test_smollm2_with_its_package_is_the_unpacked_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(target_module, "embedded_gguf", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(target_module, "unpack_gguf", lambda file: tmp_path / f"{file.stem}-unpacked")
    assert resolve_path("smollm2") == str(tmp_path / "model-unpacked")


def test_the_embedded_file_is_found_without_importing_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "fake_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(gguf_module, "EMBEDDED_PACKAGE", "fake_weights")
    assert gguf_module.embedded_gguf() is None
    (package / "model.gguf").touch()
    assert gguf_module.embedded_gguf() == package / "model.gguf"
    monkeypatch.setattr(gguf_module, "EMBEDDED_PACKAGE", "no_such_weights")
    assert gguf_module.embedded_gguf() is None


def test_a_gguf_file_is_unpacked_once_and_again_when_damaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"weights")
    calls: list[Path] = []

    def convert(path: Path, folder: Path) -> None:
        calls.append(path)
        (folder / "model.safetensors").write_bytes(b"unpacked")

    monkeypatch.setenv("DISTILLSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_module, "convert_gguf", convert)
    folder = unpack_gguf(file)
    assert folder.is_relative_to(tmp_path / "cache")
    assert unpack_gguf(file) == folder
    assert len(calls) == 1
    (folder / "model.safetensors").write_bytes(b"unpa")
    assert unpack_gguf(file) == folder
    assert len(calls) == 2
    assert (folder / "model.safetensors").read_bytes() == b"unpacked"
    file.write_bytes(b"other weights")
    assert unpack_gguf(file) != folder


def test_a_gguf_file_without_the_reader_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gguf_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"distillspec\[demo\]"):
        unpack_gguf(tmp_path / "m.gguf")


def test_the_cache_follows_its_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DISTILLSPEC_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "distillspec"
    monkeypatch.setenv("DISTILLSPEC_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("./nowhere", "no config.json"),
        ("missing.gguf", "no such file"),
        ("no-such-org/no-such-model", "cannot load no-such-org/no-such-model"),
    ],
)
def test_a_target_that_is_not_there_is_one_line(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        load_target(TargetConfig(path=path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("broken", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_folder_with_a_broken_file_is_one_line(target: LanguageModel, tmp_path: Path, broken: str) -> None:
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    content = (tmp_path / broken).read_bytes()
    (tmp_path / broken).write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match="cannot load") as refused:
        load_target(TargetConfig(path=str(tmp_path)))
    assert "\n" not in str(refused.value)


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


def test_pickled_weights_are_not_read(target: LanguageModel, tmp_path: Path) -> None:
    folder, mark = tmp_path / "model", tmp_path / "it-ran"
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"state": Bomb(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no weights as safetensors.*convert once: AutoModel") as refused:
        load_target(TargetConfig(path=str(folder)))
    assert "\n" not in str(refused.value)
    torch.save(target.model.state_dict(), folder / "pytorch_model.bin")  # harmless ones neither
    with pytest.raises(ConfigError, match="pickled ones"):
        load_target(TargetConfig(path=str(folder)))
    assert not mark.exists()


@pytest.mark.parametrize("part", ["config.json", "tokenizer_config.json"])
def test_code_that_comes_with_a_model_is_not_run(target: LanguageModel, tmp_path: Path, part: str) -> None:
    folder, mark = tmp_path / "model", tmp_path / "it-ran"
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    names = ("AutoConfig", "AutoModelForCausalLM") if part == "config.json" else ("AutoTokenizer",)
    settings = json.loads((folder / part).read_text())
    references = {name: ["code.Own", None] if name == "AutoTokenizer" else "code.Own" for name in names}
    unknown = {"model_type": "unknown-to-all"} if part == "config.json" else {"tokenizer_class": "Own"}
    (folder / part).write_text(json.dumps({**settings, **unknown, "auto_map": references}))
    (folder / "code.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    if part == "config.json":
        with pytest.raises(ConfigError, match="needs code of its own, which is never run") as refused:
            load_target(TargetConfig(path=str(folder)))
        assert "\n" not in str(refused.value)
    else:
        with suppress(ConfigError):  # transformers may know another class for it
            load_target(TargetConfig(path=str(folder)))
    assert not mark.exists()


def test_a_local_folder_loads_as_it_was_saved(target: LanguageModel, tmp_path: Path) -> None:
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    again = load_target(TargetConfig(path=str(tmp_path), dtype="float32", device="cpu"))
    assert again.identity == target.identity
    assert again.name == tmp_path.name  # progress lines name it, and a path would fill them
    half = load_target(TargetConfig(path=str(tmp_path), dtype="bfloat16", device="cpu"))
    assert half.dtype == torch.bfloat16
    assert half.identity == target.identity


def test_targets_have_short_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path / "models")
    assert short_name("/weights/gemma-3-270m-q4.gguf") == "gemma-3-270m-q4.gguf"
    assert short_name("~/weights/smol/") == "smol"
    assert short_name(".") == "models"
    assert short_name("org/model-7b") == "org/model-7b"
    assert short_name("smollm2") == "smollm2"


def test_a_format_or_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype=int8"):
        resolve_dtype("int8", torch.device("cpu"))
    with pytest.raises(ConfigError, match="device=toaster"):
        resolve_device("toaster")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device=cuda"):
            resolve_device("cuda")


def test_a_model_without_one_list_of_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 lists of layers"):
        decoder_layers(torch.nn.Linear(2, 2))


def test_the_tiny_tokenizer_gives_every_byte_back() -> None:
    tokenizer = tiny_tokenizer()
    text = "naïve — 東京\n\t 42"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_ends_of_text_outside_the_vocabulary_are_none(target: LanguageModel) -> None:
    """Configs name stray ones. Banned before `min_tokens`, they would ban a token of the next row."""
    model = copy.deepcopy(target.model)
    model.generation_config.eos_token_id = [-1, 5, target.identity.vocab_size]
    assert replace(target, model=model).stop_ids == (2, 5)
