"""The facts that we ship: JSON files in the folder data of the engine, one for each GPU and each model."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable

from tidelane.engine.estimation.fields import Field, parse


def names(kind: str) -> tuple[str, ...]:
    return tuple(sorted(file.name.removesuffix(".json") for file in _folder(kind).iterdir()))


def read(kind: str, name: str) -> Field:
    """The file of that name. Raises ValueError, with the names there are, if there is none."""
    if name not in names(kind):
        raise ValueError(f"{name!r} is not among the {kind} that we know: {', '.join(names(kind))}")
    file = f"{kind}/{name}.json"
    return parse(file, _folder(kind).joinpath(f"{name}.json").read_text(encoding="utf-8"))


def _folder(kind: str) -> Traversable:
    return files("tidelane.engine").joinpath("data", kind)
