"""The head of a model: from a `config.json`, the table of common models shipped here, or the hub."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .extras import CommandError, require

# By which names configurations of transformers know the two sizes.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_VOCAB = ("vocab_size", "padded_vocab_size")
_MOST_BYTES = 16 << 20  # of a configuration
MOST_SIZE = 1 << 24  # of a head's sizes: a hundred times today's, and planned in a moment
# Of these the class in transformers has a softcap, or may come to have one, that a configuration need not repeat.
_SOFTCAPPED = ("gemma", "vaultgemma")


@dataclass(frozen=True)
class Head:
    """`lm_head` of a causal language model, weight `[vocab_size, hidden_size]`."""

    name: str
    hidden_size: int
    vocab_size: int
    tied: bool | None  # None: nothing says it
    softcap: float | None = None
    defaults: tuple[str, ...] = ()  # what the configuration leaves to its class in transformers
    unsaid: tuple[str, ...] = ()  # what it leaves to a class that is not at hand


def known_models() -> dict[str, Head]:
    """The table, by the id on the hub."""
    table = json.loads(resources.files(__package__).joinpath("models.json").read_text())
    columns = table["columns"]
    return {name: from_config(name, dict(zip(columns, row, strict=True))) for name, row in table["models"].items()}


def from_config(name: str, config: Mapping[str, Any], where: str | None = None) -> Head:
    """The head that a configuration describes; of a multimodal model's, that of its language model.

    What it omits is the default of its class in transformers, as it is for `AutoConfig`. `where` it was found is for
    messages; default: its name.
    """
    where = where or name
    whole = config
    for part in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(part), Mapping):
            config = {**config, **config[part]}
            break
    wanted = {"hidden_size": _HIDDEN, "vocab_size": _VOCAB, "tie_word_embeddings": ("tie_word_embeddings",)}
    if str(config.get("model_type")).startswith(_SOFTCAPPED):
        wanted["final_logit_softcapping"] = ("final_logit_softcapping",)
    found: dict[str, Any] = {}
    for field, keys in wanted.items():
        key = next((key for key in keys if config.get(key) is not None), None)
        if key is not None:
            found[field] = config[key]
        elif field == "final_logit_softcapping" and field in config:
            found[field] = None  # said to be none
    omitted = [field for field in wanted if field not in found]
    defaults = _class_defaults(where, whole, omitted) if omitted else {}
    found |= defaults
    sizes = {}
    for field, keys in (("hidden_size", _HIDDEN), ("vocab_size", _VOCAB)):
        size = found.get(field)
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST_SIZE:
            raise CommandError(f"{where}: {_lacking(whole, field, keys, size)}")
        sizes[field] = size
    tied, softcap = found.get("tie_word_embeddings"), found.get("final_logit_softcapping")
    softcap = config.get("final_logit_softcapping") if softcap is None else softcap
    for field, value, kinds in (
        ("tie_word_embeddings", tied, (bool,)),
        ("final_logit_softcapping", softcap, (int, float)),
    ):
        if value is not None and not isinstance(value, kinds):
            kind = " or ".join(("null", *(one.__name__ for one in kinds)))
            raise CommandError(f"{where}: got {field} {value!r} in its configuration, expected {kind}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise CommandError(f"{where}: got final_logit_softcapping {softcap!r} in its configuration, expected null or a "
                           "finite number above 0")  # fmt: skip
    # A softcap of None is said by a class that was found.
    unsaid = () if defaults else tuple(sorted(set(omitted) - set(found)))
    return Head(name, sizes["hidden_size"], sizes["vocab_size"], tied, softcap, tuple(sorted(defaults)), unsaid)


def _lacking(config: Mapping[str, Any], field: str, keys: tuple[str, ...], got: object) -> str:
    kind = config.get("model_type")
    if got is not None:
        return f"got {field} {got!r} in its configuration, expected an integer from 1 to {MOST_SIZE:,}"
    if importlib.util.find_spec("transformers") is None:
        why = "transformers, whose class for it may have a default, is not installed"
    elif kind is None:
        why = "no model_type either, whose class in transformers would have a default"
    else:
        why = f"model_type {kind!r} is none for which the installed transformers has a default"
    return f"no {field} in its configuration (looked for {', '.join(keys)}); {why}"


def _class_defaults(where: str, config: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """What a model built from `config` has for `fields`; nothing where transformers is missing or does not know it."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return {}
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return {}
    try:
        built = CONFIG_MAPPING[kind].from_dict(dict(config))
        parts = (built.get_text_config(), built)
    except Exception as error:  # whatever its class finds wrong with the values is the user's to know
        first = " ".join(str(error).split())
        raise CommandError(f"{where}: transformers refuses it for model_type {kind!r}: {first}") from error
    found = {field: next((getattr(part, field) for part in parts if hasattr(part, field)), None) for field in fields}
    return {field: value for field, value in found.items() if value is not None}


def find_head(model: str) -> Head:
    """`model`: a `config.json` or its folder; an id or its last part that the table has; an id that the hub has."""
    try:
        return _find_head(model, Path(model).expanduser())
    except OSError as error:  # access rights, a name that is too long, a disk that fails
        raise CommandError(f"{error.filename or model}: cannot be read: {error.strerror or error}") from error


def _find_head(model: str, path: Path) -> Head:
    if path.is_file() or (path / "config.json").is_file():
        path = path if path.is_file() else path / "config.json"
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return from_config(name or path.name, _read(path), where=str(path))
    for name, head in known_models().items():
        if model.lower() in (name.lower(), name.rpartition("/")[2].lower()):
            return head
    if path.is_dir():
        raise CommandError(f"{model}: {_without_config(path)}")
    if path.exists():
        raise CommandError(f"{model}: neither a file nor a folder; a pipe or a device is not read")
    # An id is a name or owner/name; anything else can only be a path.
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith(".") or path.suffix == ".json":
        raise CommandError(f"{model}: no such file or folder")
    return _from_hub(model)


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""

    def expected(seen: str) -> CommandError:
        return CommandError(f"{path}: got {seen}, expected a config.json")

    with path.open("rb") as file:  # weights, given by mistake, are not all read
        read = file.read(_MOST_BYTES + 1)
    if len(read) > _MOST_BYTES:
        raise expected(f"a file of more than {_MOST_BYTES >> 20} MiB")
    if not read.strip():
        raise expected("an empty file")
    try:
        config = json.loads(read.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise expected("a binary file (it is not UTF-8)") from error
    except (ValueError, RecursionError) as error:
        raise expected(
            "a binary file (it has NUL bytes)" if b"\0" in read else f"text that is no JSON ({error})"
        ) from error
    if not isinstance(config, dict):
        raise expected(f"a JSON {type(config).__name__}, not an object")
    return config


def _without_config(folder: Path) -> str:
    """What a folder is, that is not a model's."""
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
        return f"a folder with an adapter and no config.json; the head is its base model's: plan {base}"
    except (OSError, ValueError, KeyError, TypeError):
        if (folder / "config.json").exists():
            return "a folder whose config.json is no file"
        names = sorted(path.name for path in folder.iterdir())
    return f"a folder without a config.json (it has {', '.join(names[:6]) or 'nothing'}{', ...' if names[6:] else ''})"


def _from_hub(model: str) -> Head:
    missing = f"{model}: no such file, not in the table (--list-models), and not had from the hub: "
    try:
        config = require("transformers", "trl").AutoConfig.from_pretrained(model)
    except CommandError as error:
        raise CommandError(f"{missing}{error}") from error
    except Exception as error:  # the network, the name, access rights: whatever it is, it is the user's to know
        first = str(error).partition("\n")[0]
        raise CommandError(f"{missing}{first}") from error
    return from_config(model, config.to_dict())
