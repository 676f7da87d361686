"""Short answers over HTTP at the URL that an option gives: probes and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

_DEFAULT_PORT: Final = 80

Answer = Callable[[], web.Response]


@asynccontextmanager
async def answered(option: str, url: str, answer: Answer, beside: Mapping[str, Answer]) -> AsyncIterator[None]:
    """`answer` at `url`, such as http://0.0.0.0:8080/healthz, and others at paths `beside` it.

    Raises ValueError if it cannot be.
    """
    where = urlsplit(url)
    path = where.path or "/"
    if where.scheme != "http" or not where.hostname or path in beside:
        but = "".join(f", and not {each}" for each in beside)
        raise ValueError(f"{option}: {url} must be like http://0.0.0.0:8080/path{but}")
    application = web.Application()
    for at, each in {path: answer, **beside}.items():
        application.router.add_get(at, _handler(each))
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, where.hostname, where.port or _DEFAULT_PORT).start()
        except OSError as error:
            raise ValueError(f"{option}: cannot listen on {where.netloc}: {error.strerror}") from error
        yield
    finally:
        await runner.cleanup()


def _handler(answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_: web.Request) -> web.Response:
        return answer()

    return handle
