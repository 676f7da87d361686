"""PEM files of one side of mutual TLS, read anew while a process runs, so that who renews them need not restart it.

Files are replaced one after the other, and a volume of a Secret all at once: what is read in between may not fit
together. So what was read is tried before it is used, and what was good before is kept until then.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

# Whether time has run out is worked out by a handshake; hundreds of agents that come back at once need not wait for it.
_LOOK_EVERY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Pem:
    """What the three files hold: our certificate (chain) and its key, and the authority that signs the other side's."""

    certificate: bytes
    key: bytes
    authority: bytes


class TlsFiles:
    """Raises ValueError, which names the file or what does not fit, if they are of no use at first.

    Safe to be asked by several threads.
    """

    def __init__(
        self, certificate: Path, key: Path, authority: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._paths = (certificate, key, authority)
        self._clock = clock
        self._lock = threading.Lock()
        self._good = self._read()
        _try(self._good)
        self._fault = ""
        # It may be renewed any time, and what already runs here needs none.
        self._tell(self._late())
        self._looked_s = clock()

    def current(self) -> Pem:
        """What the files hold now; or held when they were last of use, and then a line in the log says why."""
        with self._lock:
            try:
                found = self._read()
                if found != self._good:
                    self._take(found)
                    self._tell("")
                elif self._fault or self._clock() - self._looked_s >= _LOOK_EVERY_S:
                    self._looked_s = self._clock()
                    self._tell(self._late())
            except ValueError as error:
                self._tell(f"{error}; the earlier files stay in use")
            return self._good

    def _take(self, found: Pem) -> None:
        _try(found)
        if late := out_of_date(found):
            raise ValueError(f"TLS certificate {self._paths[0]}: {late}")
        self._good = found
        log.info("TLS certificate, key and authority were read anew path=%s", self._paths[0])

    def _late(self) -> str:
        late = out_of_date(self._good)
        return f"TLS certificate {self._paths[0]}: {late}: the other side will refuse it" if late else ""

    def _read(self) -> Pem:
        try:
            return Pem(*(path.read_bytes() for path in self._paths))
        except OSError as error:
            raise ValueError(f"TLS file {error.filename}: {error.strerror}") from error

    def _tell(self, fault: str) -> None:
        # Once for each: it is asked at every connection.
        if fault and fault != self._fault:
            log.error("%s", fault)
        self._fault = fault


def out_of_date(pem: Pem) -> str:
    """Why nobody would take the certificate now; empty if it is in its time."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_pair(server, pem)
    # The certificate itself is what is trusted: nothing but its time can be wrong.
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=_first(pem.certificate))
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    # Client hello, all of the server's, the end of the client's.
    for end in (ends[0], ends[1], ends[0]):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
    return ""


def _try(pem: Pem) -> None:
    """Raises ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cadata=pem.authority.decode())
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"TLS: the authority's certificate cannot be read: {_shown(error)}") from error
    try:
        _load_pair(context, pem)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"TLS: certificate and key cannot be read, or do not fit: {_shown(error)}") from error


def _load_pair(context: ssl.SSLContext, pem: Pem) -> None:
    # It takes files alone, and those on disk may be others by now.
    with _in_memory(pem.certificate) as certificate, _in_memory(pem.key) as key:
        # Without a password it would ask the terminal for one.
        context.load_cert_chain(certificate, key, password="")


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    descriptor = os.memfd_create("pem")
    try:
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _first(chain: bytes) -> str:
    end = "-----END CERTIFICATE-----"
    return chain.decode().partition(end)[0] + end + "\n"


def _shown(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
