"""So that the engine's messages can be made where msgspec is not installed: dataclasses, which nobody encodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import override


class Struct:
    @override
    def __init_subclass__(cls, *, frozen: bool = False, tag: bool = False) -> None:
        for name, value in list(vars(cls).items()):
            if isinstance(value, (dict, list, set)) and not name.startswith("__"):
                setattr(cls, name, field(default_factory=type(value)))
        dataclass(frozen=frozen)(cls)
