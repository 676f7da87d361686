"""The manifests that `tidelane up` was pointed at, read again whenever a file changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidelane.operator.manifests import Document, ManifestError, read_manifests
from tidelane.operator.resources import ObjectRef
from tidelane.operator.validation import Problem, Schema

_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Scan:
    """What the files declare now. A file with an error keeps declaring what it last declared without one."""

    documents: Mapping[ObjectRef, Document]
    errors: tuple[ManifestError, ...] = ()


@dataclass(slots=True)
class _File:
    text: str | None = None
    documents: list[Document] = field(default_factory=list)
    missing_scans: int = 0


class ManifestFiles:
    """A file, or all YAML files of a folder. Each error is told once, in the scan that finds it."""

    def __init__(self, path: Path, schema: Schema) -> None:
        self._path = path
        self._schema = schema
        self._files: dict[Path, _File] = {}

    def scan(self) -> Scan:
        errors: list[ManifestError] = []
        for path in sorted({*self._present(), *self._files}):
            file = self._files.setdefault(path, _File())
            text = _text(path)
            if text is None:
                # Editors replace a file by deleting it first: only one that stays away is removed.
                file.missing_scans += 1
                if file.missing_scans > 1:
                    del self._files[path]
            elif text != file.text:
                file.text, file.missing_scans = text, 0
                try:
                    file.documents = read_manifests(text, str(path), self._schema)
                except ManifestError as error:
                    errors.append(error)
            else:
                file.missing_scans = 0
        documents: dict[ObjectRef, Document] = {}
        for file in self._files.values():
            for document in file.documents:
                ref = ObjectRef.of(document.manifest)
                if ref in documents:
                    errors += self._duplicate(ref, documents[ref], document, file)
                else:
                    documents[ref] = document
        return Scan(documents, tuple(errors))

    def _present(self) -> list[Path]:
        if self._path.is_dir():
            return [path for path in self._path.iterdir() if path.suffix in _SUFFIXES and path.is_file()]
        return [self._path]

    def _duplicate(self, ref: ObjectRef, first: Document, second: Document, file: _File) -> list[ManifestError]:
        file.documents = [each for each in file.documents if each is not second]
        message = f"{ref} is declared in {first.origin}, document {first.index}, already"
        return [ManifestError(second.origin, second.index, (Problem("metadata.name", message),))]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        # Refused with its reason, like any other text that is no manifest.
        return f"[unreadable: {str(error)!r}"
