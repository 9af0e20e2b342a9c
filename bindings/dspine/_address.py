"""Where a server listens: its URL, whether the port is free, and which port is."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from dspine._errors import DspineError, InvalidError

LOOPBACK = "127.0.0.1"
# What a server that listens everywhere is asked on.
_WILDCARDS = {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK}


class ServerError(DspineError):
    """A server could not be started, or did not answer as expected."""


@dataclass(frozen=True)
class Address:
    """A listening address.

    Attributes:
        host: as llama-server takes it: a name, several behind commas, or a path that ends in
            `.sock`.
        port: 1 to 65535; without meaning for a socket path.
        prefix: path before every route (`--api-prefix`).
        tls: True where the server was given a certificate.
    """

    host: str = LOOPBACK
    port: int = 8080
    prefix: str = ""
    tls: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16:
            raise InvalidError(f"port {self.port}: expected 1 to 65535")

    @property
    def first_host(self) -> str:
        """The first host of the list."""
        return self.host.split(",")[0].strip()

    @property
    def socket_path(self) -> str | None:
        """The UNIX socket, if this is one."""
        return self.first_host if self.first_host.endswith(".sock") else None

    @property
    def url(self) -> str:
        """What a client on this machine connects to, without a slash at the end."""
        scheme = "https" if self.tls else "http"
        if self.socket_path:
            return f"{scheme}://localhost{self.prefix}"
        host = _WILDCARDS.get(self.first_host, self.first_host)
        shown = f"[{host}]" if ":" in host else host
        return f"{scheme}://{shown}:{self.port}{self.prefix}"


def free_port(host: str = LOOPBACK) -> int:
    """A port of `host` that is free now; it is not reserved."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def check_free(address: Address) -> None:
    """Raise ServerError where nothing can listen on the address, a used port above all.

    Without this the server would load its model first, and report the port at the end.
    """
    if address.socket_path:
        return
    host, port = address.first_host, address.port
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ServerError(f"--host {host}: {error.strerror or error}") from None
    family, kind, protocol, _, place = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: a connection that is only being closed does not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ServerError(
                    f"port {port} of {host} is in use; --port N chooses another"
                ) from None
            raise ServerError(
                f"--host {host} --port {port}: cannot listen there: {error.strerror or error}"
            ) from None
