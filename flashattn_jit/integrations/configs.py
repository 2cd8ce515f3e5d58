"""Configs of models for `fa.kv.estimate`, from files or by their families' defaults."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import InputError
from ..kv.capacity.families import FAMILIES


def read_config(source: str) -> Any:
    """The config that a file or a folder has, or that of a family's released defaults.

    Args:
        source: a JSON file, or a folder with a config.json; or a model type of transformers, such
            as "deepseek_v3", for the sizes that its config class has by default. A file without a
            model_type has the sizes that `fa.kv.Spec.from_config` reads, and needs no transformers.

    Raises:
        InputError: there is neither such a file nor a family of that name; the file is no JSON
            object, transformers refuses it, or transformers is missing.
    """
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        if source not in FAMILIES:
            raise InputError(
                f"config={source!r} is no file, no folder with a config.json and no known family; "
                f"known are {', '.join(sorted(FAMILIES))}"
            )
        return _made(source, {})
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"config={source!r} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InputError(f"config={source!r} is a {type(fields).__name__}, not a JSON object")
    family = fields.pop("model_type", None)
    return SimpleNamespace(**fields) if family is None else _made(family, fields)


def _made(family: str, fields: dict[str, Any]) -> Any:
    """A config of a family, whose defaults transformers knows."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        raise InputError(
            f"config: the defaults of {family} are transformers', which is not installed: pip "
            "install transformers, or give a file of sizes without model_type"
        ) from None
    if family not in CONFIG_MAPPING:  # its class comes with the model; then the file has all sizes
        return SimpleNamespace(**fields, model_type=family)
    try:
        return CONFIG_MAPPING[family](**fields)
    except Exception as error:  # whatever its checks raise
        raise InputError(f"config: transformers refuses it for {family}: {error}") from error
