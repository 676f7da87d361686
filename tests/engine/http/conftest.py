from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from engine.http.fake_loop import FakeLoop
from engine.http.front_process import SERVED_NAME, FrontProcess
from engine.http.tiny_model import facts_of, write_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-model")
    write_model_folder(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def shared_front(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    front = FrontProcess(tmp_path_factory.mktemp("front"), facts_of(model_folder, SERVED_NAME))
    try:
        front.wait_until_ready()
        yield front
    finally:
        front.stop()


@pytest.fixture
def front(shared_front: FrontProcess) -> Iterator[FrontProcess]:
    """A ready front with a fresh fake loop; one process serves all tests that leave it alive."""
    shared_front.loop.reset()  # tests that take `shared_front` itself leave their requests behind
    yield shared_front
    shared_front.loop.reset()
    shared_front.wait_until_ready()


@pytest.fixture
def own_front(model_folder: Path, tmp_path: Path) -> Iterator[FrontProcess]:
    """A front for a test that ends it or counts what it did."""
    front = FrontProcess(tmp_path, facts_of(model_folder, SERVED_NAME))
    try:
        front.wait_until_ready()
        yield front
    finally:
        front.stop()


@pytest.fixture
def loop(front: FrontProcess) -> FakeLoop:
    return front.loop


@pytest.fixture
def http(front: FrontProcess) -> httpx.Client:
    return front.http


@pytest.fixture
def client(front: FrontProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client
