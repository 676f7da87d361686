"""The manifests that `tidelane up` was pointed at, read again whenever a file changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidelane.operator.manifests import Document, ManifestError, read_manifests
from tidelane.operator.resources import ObjectRef
from tidelane.operator.validation import Problem, Schemas

_SUFFIXES = (".yaml", ".yml")


# Kind and name: a policy may have the name of a service.
Key = tuple[str, ObjectRef]


@dataclass(frozen=True, slots=True)
class Scan:
    """What the files declare now. A file with an error keeps declaring what it last declared without one."""

    documents: Mapping[Key, Document]
    errors: tuple[ManifestError, ...] = ()


@dataclass(slots=True)
class _File:
    """`text` is what was last read as manifests, `latest` what the last scan found; None: no file."""

    text: str | None = None
    latest: str | None = None
    documents: list[Document] = field(default_factory=list)


class ManifestFiles:
    """A file, or all YAML files of a folder. Each error is told once, in the scan that finds it."""

    def __init__(self, path: Path, schemas: Schemas) -> None:
        self._path = path
        self._schemas = schemas
        self._files: dict[Path, _File] = {}
        self._scanned = False

    def scan(self) -> Scan:
        """A change counts once two scans have found the same: editors empty or delete a file before they write it."""
        errors: list[ManifestError] = []
        for path in sorted({*self._present(), *self._files}):
            file = self._files.setdefault(path, _File())
            before, file.latest = file.latest, _text(path)
            if file.latest == file.text or (self._scanned and file.latest != before):
                continue
            file.text = file.latest
            try:
                file.documents = read_manifests(file.text or "", str(path), self._schemas)
            except ManifestError as error:
                errors.append(error)
            if file.text is None:
                del self._files[path]
        self._scanned = True
        return self._united(errors)

    def _united(self, errors: list[ManifestError]) -> Scan:
        documents: dict[Key, Document] = {}
        for file in self._files.values():
            for document in list(file.documents):
                key = document.kind, document.ref
                if key in documents:
                    file.documents.remove(document)
                    errors.append(_duplicate(document, documents[key]))
                else:
                    documents[key] = document
        return Scan(documents, tuple(errors))

    def _present(self) -> list[Path]:
        if self._path.is_dir():
            return [path for path in self._path.iterdir() if path.suffix in _SUFFIXES and path.is_file()]
        return [self._path]


def _duplicate(document: Document, first: Document) -> ManifestError:
    message = f"{document.ref} is declared in {first.origin}, document {first.index}, already"
    return ManifestError(document.origin, document.index, (Problem("metadata.name", message),))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        # Refused with its reason, like any other text that is no manifest.
        return f"[unreadable: {str(error)!r}"
