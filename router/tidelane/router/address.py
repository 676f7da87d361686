"""Where a backend listens."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, order=True)
class Address:
    host: str
    port: int

    @property
    def name(self) -> str:
        """As in a URL and in the label of a metric."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of_url(cls, url: str) -> Address:
        """Raises ValueError, which says what would be right."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port or 80
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or not port:
            raise ValueError(f"{url!r}: expected http://HOST:PORT (engines speak plain HTTP)")
        if parts.path.rstrip("/") not in ("", "/v1") or parts.query or parts.username:
            raise ValueError(f"{url!r}: expected http://HOST:PORT, without a path")
        return cls(parts.hostname, port)

    @classmethod
    def of_host_port(cls, text: str) -> Address:
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or not port.isascii() or not 0 < int(port[:6]) < 1 << 16:
            raise ValueError(f"{text!r}: expected HOST:PORT, such as chat-engines.default.svc:8000")
        return cls(host.strip("[]"), int(port))
