"""The head of a model: from a `config.json`, the table of common models shipped here, or the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .extras import CommandError

# By which names configurations of transformers know the two sizes.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_VOCAB = ("vocab_size", "padded_vocab_size")


@dataclass(frozen=True)
class Head:
    """`lm_head` of a causal language model, weight `[vocab_size, hidden_size]`."""

    name: str
    hidden_size: int
    vocab_size: int
    tied: bool
    softcap: float | None = None


def known_models() -> dict[str, Head]:
    """The table, by the id on the hub."""
    table = json.loads(resources.files(__package__).joinpath("models.json").read_text())
    columns = table["columns"]
    return {name: from_config(name, dict(zip(columns, row, strict=True))) for name, row in table["models"].items()}


def from_config(name: str, config: Mapping[str, Any]) -> Head:
    """The head that a configuration describes; of a multimodal model's, that of its language model."""
    for part in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(part), Mapping):
            config = {**config, **config[part]}
            break

    def size(names: tuple[str, ...]) -> int:
        value = next((config[key] for key in names if config.get(key) is not None), None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CommandError(f"{name}: no {names[0]} in its configuration (got {value!r})")
        return value

    softcap = config.get("final_logit_softcapping")
    return Head(name, size(_HIDDEN), size(_VOCAB), bool(config.get("tie_word_embeddings", False)), softcap)


def find_head(model: str) -> Head:
    """`model`: a `config.json` or its folder; an id or its last part that the table has; an id that the hub has."""
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise CommandError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(config, dict):
            raise CommandError(f"{path}: got {type(config).__name__}, expected a JSON object")
        return from_config(path.parent.name or path.name, config)
    for name, head in known_models().items():
        if model.lower() in (name.lower(), name.rpartition("/")[2].lower()):
            return head
    return _from_hub(model)


def _from_hub(model: str) -> Head:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise CommandError(
            f"{model}: no such file, not in the table (--list-models), and transformers, which could ask the hub, is "
            "not installed"
        ) from error
    try:
        config = AutoConfig.from_pretrained(model)
    except Exception as error:  # the network, the name, access rights: whatever it is, it is the user's to know
        first = str(error).partition("\n")[0]
        raise CommandError(
            f"{model}: no such file, not in the table (--list-models), and not had from the hub: {first}"
        ) from error
    return from_config(model, config.to_dict())
