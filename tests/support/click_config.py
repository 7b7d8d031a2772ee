"""Configurations of small click models, as TOML."""

import json
from pathlib import Path
from typing import Any

ADAGRAD = {"optimizer": {"name": "Adagrad", "lr": 0.1}}
ADAM = {"optimizer": {"name": "Adam", "lr": 0.01}}


def toml(sections: dict[str, dict[str, Any]]) -> str:
    """Write a configuration: the little of TOML that it takes."""

    def value(one: Any) -> str:
        if isinstance(one, dict):
            return "{ " + ", ".join(f"{name} = {value(inner)}" for name, inner in one.items()) + " }"
        if isinstance(one, list):
            return "[" + ", ".join(map(value, one)) + "]"
        return json.dumps(one)

    return "".join(
        f"[{section}]\n" + "".join(f"{name} = {value(one)}\n" for name, one in values.items())
        for section, values in sections.items()
    )


def click_config(log: Path, valid: Path | None = None, *, price: bool = False, **sections: dict[str, Any]) -> str:
    """Configure a DeepFM of the columns click, user, ad and, if asked, price; ``sections`` are added to its own."""
    data: dict[str, Any] = {"data": [str(log)]}
    if valid is not None:
        data["valid"] = [str(valid)]
    data |= {"format": "csv", "label": "click", "categorical": ["user", "ad"]}
    if price:
        data |= {"numeric": ["price"], "dense": ["price"]}
    made: dict[str, dict[str, Any]] = {"data": data, "model": {"name": "deepfm", "dim": 4, "hidden": [8]}}
    for name, values in sections.items():
        made[name] = {**made.get(name, {}), **values}
    return toml(made)
