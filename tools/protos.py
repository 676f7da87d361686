#!/usr/bin/env python3
"""Generates the Python code of protos/**/*.proto beside them; `--check` writes nothing and fails if it is out of date.

protoc makes the messages and their stubs (.pyi); for services it makes untyped code only, so their .pyi is made here
from the descriptors: clients are `grpc.aio`, servicers may be asyncio or threaded.
"""

from __future__ import annotations

import argparse
import importlib.resources
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc  # type: ignore[import-untyped]

PROTOS = Path(__file__).resolve().parent.parent / "protos"
PARTS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 if a file is missing or differs")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        made = generate(Path(folder))
        stale = [name for name, text in made.items() if not _same(PROTOS / name, text)]
        leftover = [str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*_pb2*") if _is_leftover(path, made)]
        if check:
            for name in stale + leftover:
                print(f"protos/{name} does not match its .proto: run tools/protos.py", file=sys.stderr)
            return 1 if stale or leftover else 0
        for name in stale:
            (PROTOS / name).write_text(made[name])
            print(f"wrote protos/{name}")
        for name in leftover:
            (PROTOS / name).unlink()
            print(f"removed protos/{name}")
    return 0


def generate(out: Path) -> dict[str, str]:
    """Text of every generated file, by its path under protos/."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    flags.append(f"--descriptor_set_out={out}/descriptors")
    if protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *flags, *sources]) != 0:
        raise SystemExit("protoc failed")
    descriptors = descriptor_pb2.FileDescriptorSet.FromString((out / "descriptors").read_bytes())
    for file in descriptors.file:
        (out / file.name.replace(".proto", "_pb2_grpc.pyi")).write_text(service_stubs(file, descriptors))
    return {name: (out / name).read_text() for source in sources for name in _outputs(source)}


def service_stubs(file: descriptor_pb2.FileDescriptorProto, everything: descriptor_pb2.FileDescriptorSet) -> str:
    """The .pyi of one file's `_pb2_grpc.py`."""
    home = {
        f".{other.package}.{message.name}": other.name.removesuffix(".proto").replace("/", ".") + "_pb2"
        for other in everything.file
        for message in other.message_type
    }

    def python(name: str) -> str:
        return f"{home[name]}.{name.rpartition('.')[2]}"

    modules = sorted({home[t] for s in file.service for m in s.method for t in (m.input_type, m.output_type)})
    lines = ["from collections.abc import AsyncIterator, Awaitable, Iterator", "from typing import Any", ""]
    lines += ["import grpc", "import grpc.aio", *(f"import {module}" for module in modules)]
    for service in file.service:
        lines += ["", f"class {service.name}Stub:", "    def __init__(self, channel: grpc.aio.Channel) -> None: ..."]
        for method in service.method:
            lines.append(f"    {method.name}: {_call(method, python)}")
        lines += ["", f"class {service.name}Servicer:"]
        for method in service.method:
            if method.client_streaming:
                raise SystemExit(f"{service.name}.{method.name}: client streams are not supported here")
            answer = python(method.output_type)
            returns = (
                f"Iterator[{answer}] | AsyncIterator[{answer}]"
                if method.server_streaming
                else f"{answer} | Awaitable[{answer}]"
            )
            request = python(method.input_type)
            # `context` differs between threaded and asyncio servers, and an override may not narrow a parameter.
            lines.append(f"    def {method.name}(self, request: {request}, context: Any) -> {returns}: ...")
        lines += ["", f"def add_{service.name}Servicer_to_server("]
        lines += [f"    servicer: {service.name}Servicer, server: grpc.Server | grpc.aio.Server", ") -> None: ..."]
    return "\n".join(lines) + "\n"


def _call(method: descriptor_pb2.MethodDescriptorProto, python: Callable[[str], str]) -> str:
    kind = "UnaryStreamMultiCallable" if method.server_streaming else "UnaryUnaryMultiCallable"
    return f"grpc.aio.{kind}[{python(method.input_type)}, {python(method.output_type)}]"


def _outputs(source: str) -> list[str]:
    return [source.removesuffix(".proto") + part for part in PARTS]


def _same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


def _is_leftover(path: Path, made: dict[str, str]) -> bool:
    return path.is_file() and path.suffix in (".py", ".pyi") and str(path.relative_to(PROTOS)) not in made


if __name__ == "__main__":
    sys.exit(main())
