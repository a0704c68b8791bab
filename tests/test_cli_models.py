"""The command line: the head of a model, from a configuration, the table of models, or what is none of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import CASES
from liger_losses.cli import models
from liger_losses.cli.__main__ import main
from liger_losses.cli.extras import CommandError


def _write(folder: Path, **config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_heads_of_configurations(tmp_path: Path) -> None:
    gemma = {"hidden_size": 2560, "vocab_size": 262208, "tie_word_embeddings": True, "final_logit_softcapping": None}
    folder = Path(_write(tmp_path, model_type="gemma3", text_config=gemma))
    for path in (folder, folder / "config.json"):
        head = models.find_head(str(path))
        assert (head.hidden_size, head.vocab_size, head.softcap, head.defaults) == (2560, 262208, None, ())
    gpt2 = models.from_config("gpt2", {"n_embd": 768, "vocab_size": 50257, "tie_word_embeddings": True})
    assert gpt2.hidden_size == 768
    assert models.find_head("GEMMA-2-2B").softcap == 30.0
    assert len(models.known_models()) > 30


def test_what_a_configuration_omits_is_its_class_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    gemma = _write(tmp_path / "a", model_type="gemma2", hidden_size=64, vocab_size=500)
    head = models.find_head(gemma)
    assert (head.tied, head.softcap) == (True, 30.0)
    assert head.defaults == ("final_logit_softcapping", "tie_word_embeddings")
    said = {"tie_word_embeddings": False, "final_logit_softcapping": None}
    head = models.find_head(_write(tmp_path / "b", model_type="gemma2", hidden_size=64, vocab_size=500, **said))
    assert (head.tied, head.softcap, head.defaults) == (False, None, ())
    head = models.find_head(_write(tmp_path / "c", model_type="llama", vocab_size=500))
    assert (head.hidden_size, head.vocab_size, head.tied) == (4096, 500, False)
    head = models.find_head(_write(tmp_path / "d", model_type="qwen2_vl", text_config={"hidden_size": 1536}))
    assert (head.hidden_size, head.vocab_size, head.tied) == (1536, 152064, False)
    head = models.find_head(_write(tmp_path / "e", model_type="no such", hidden_size=64, vocab_size=500))
    assert (head.tied, head.unsaid) == (None, ("tie_word_embeddings",))
    pytest.importorskip("rich")
    assert main(["plan", gemma]) == 0
    assert "hence its class's default: final_logit_softcapping, tie_word_embeddings" in capsys.readouterr().out


def test_without_transformers_what_is_omitted_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    head = models.find_head(_write(tmp_path, model_type="gemma2", hidden_size=64, vocab_size=500))
    assert (head.tied, head.softcap) == (None, None)
    assert head.unsaid == ("final_logit_softcapping", "tie_word_embeddings")
    with pytest.raises(CommandError, match="no hidden_size in its configuration .* transformers, .* is not installed"):
        models.find_head(_write(tmp_path, model_type="gemma2", vocab_size=500))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "no such"},
            "no hidden_size in its configuration (looked for hidden_size, n_embd, d_model, dim)",
        ),
        (
            {"hidden_size": 64},
            "no vocab_size in its configuration (looked for vocab_size, padded_vocab_size); no model_type",
        ),
        ({"hidden_size": 0, "vocab_size": 9}, "got hidden_size 0 in its configuration, expected an integer from 1 to"),
        ({"hidden_size": 8, "vocab_size": 10**12}, "got vocab_size 1000000000000 in its configuration, expected an"),
        (
            {"hidden_size": 8, "vocab_size": 9, "final_logit_softcapping": 0},
            "got final_logit_softcapping 0 in its configuration, expected null or a finite number above 0",
        ),
        ({"hidden_size": True, "vocab_size": 9}, "got hidden_size True in its configuration"),
        ({"hidden_size": 8, "vocab_size": 9, "tie_word_embeddings": "no"}, "got tie_word_embeddings 'no' in its"),
        (
            {"model_type": "llama", "hidden_size": "64", "vocab_size": 9},
            "transformers refuses it for model_type 'llama'",
        ),
    ],
)
def test_configurations_that_say_too_little(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(CommandError) as caught:
        models.find_head(_write(tmp_path, **config))
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert message in str(caught.value)


def test_folders_that_are_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(model: str) -> str:
        with pytest.raises(CommandError) as caught:
            models.find_head(model)
        return str(caught.value)

    assert message(str(tmp_path)) == f"{tmp_path}: a folder without a config.json (it has nothing)"
    (tmp_path / "model.safetensors").touch()
    assert "(it has model.safetensors)" in message(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    assert message(str(tmp_path)).endswith("its base model's: plan Qwen/Qwen3-8B")
    for path in (str(tmp_path / "missing"), "./missing", "a/b/c", "config.jso/x.json"):
        assert message(path) == f"{path}: no such file or folder"
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert message(str(tmp_path)) == f"{tmp_path}: a folder whose config.json is no file"
    assert message(os.devnull).startswith(f"{os.devnull}: neither a file nor a folder")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    assert models.find_head("qwen3-8b").name == "Qwen/Qwen3-8B"  # an id, whatever lies here under its name


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b"", "an empty file"),
        (b"  \n", "an empty file"),
        (b"hidden_size: 64", "text that is no JSON (Expecting value: line 1 column 1 (char 0))"),
        (b'{"hidden_size": 64', "text that is no JSON (Expecting ',' delimiter: line 1 column 19 (char 18))"),
        (b"[" * 100_000, "text that is no JSON ("),
        (b"\x80\x02}q\x00", "a binary file (it is not UTF-8)"),
        (b"\x58\x01\0\0\0\0\0\0{}", "a binary file (it has NUL bytes)"),
        (b"[64, 500]", "a JSON list, not an object"),
        (b"[" + 2**24 * b" " + b"]", "a file of more than 16 MiB"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value.partition(" (")[0],
)
def test_files_that_are_no_configurations(content: bytes, seen: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for model in (path, tmp_path):
        with pytest.raises(CommandError) as caught:
            models.find_head(str(model))
        assert str(caught.value).startswith(f"{path}: got {seen}")
        assert str(caught.value).endswith(", expected a config.json")


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Path(_write(tmp_path, hidden_size=64, vocab_size=500, tie_word_embeddings=False)) / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())  # as some editors write it
    assert models.find_head(str(tmp_path)).vocab_size == 500

    def denied(path: Path, *arguments: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with pytest.raises(CommandError, match="^a{300}: cannot be read: File name too long$"):
        models.find_head("a" * 300)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", denied)
        with pytest.raises(CommandError) as caught:
            models.find_head(str(tmp_path))
    assert str(caught.value) == f"{config}: cannot be read: Permission denied"
    config.unlink()
    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(CommandError) as caught:
        models.find_head(str(tmp_path))
    assert str(caught.value) == f"{tmp_path}: cannot be read: Permission denied"


# Models of the table whose sizes are the defaults of their class.
_DEFAULT_SIZES = {
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "gemma2": "google/gemma-2-2b",
    "gpt_oss": "openai/gpt-oss-120b",
    "deepseek_v3": "deepseek-ai/DeepSeek-V3",
}
# By family: whether models are tied, and the softcap, where the class says it for all of them.
_FAMILIES = {
    "google/gemma-2": "gemma2", "google/gemma-3": "gemma3", "mistralai/": "mistral", "openai/gpt-oss": "gpt_oss",
    "deepseek-ai/": "deepseek_v3", "meta-llama/Llama-3.1": "llama", "meta-llama/Llama-3.3": "llama",
}  # fmt: skip


def test_the_table_of_models_is_what_transformers_has() -> None:
    transformers = pytest.importorskip("transformers")

    def default(kind: str) -> Any:
        return transformers.CONFIG_MAPPING[kind]().get_text_config()

    known = models.known_models()
    for kind, name in _DEFAULT_SIZES.items():
        built = default(kind)
        assert (known[name].hidden_size, known[name].vocab_size) == (built.hidden_size, built.vocab_size), name
    for prefix, kind in _FAMILIES.items():
        built = default(kind)
        members = [head for name, head in known.items() if name.startswith(prefix)]
        assert members
        for head in members:
            softcap = getattr(built, "final_logit_softcapping", None)
            assert (head.tied, head.softcap) == (built.tie_word_embeddings, softcap), head.name
    assert known["google/gemma-3-4b-pt"].vocab_size == default("gemma3").vocab_size
    for case in CASES.values():
        named = [head for name, head in known.items() if name.lower().endswith(case.head.name)]
        assert all((head.hidden_size, head.vocab_size) == (case.head.hidden, case.head.vocab) for head in named)
