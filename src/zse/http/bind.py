"""Opening the listening socket: done before anything heavy is imported, so that clients queue from the first moment."""

import errno
import os
import socket

from zse.errors import ConfigError

BACKLOG = 2048


def is_ip(name: str) -> bool:
    """Is it an IPv4 or IPv6 literal?"""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, name.partition("%")[0])
            return True
        except OSError:
            continue
    return False


def is_loopback(host: str) -> bool:
    """Does binding to `host` reach only this machine?"""
    return host in ("localhost", "::1") or is_ip(host) and host.startswith("127.")


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises ConfigError with one clear line."""
    # As bytes, a plain name needs no module of international ones.
    name = host.encode() if host.isascii() else host
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(_explain(host, port, error)) from None
    sock.setblocking(False)
    return sock


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program; stop it or choose another with --port"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} on {host} needs privileges; choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: this machine has no such address"
    return f"cannot listen on {host} port {port}: {error.strerror or os.strerror(error.errno or 0)}"


def url(host: str, port: int) -> str:
    """The address that a client on this machine would use."""
    if host in ("0.0.0.0", ""):
        host = "127.0.0.1"
    elif host == "::":
        host = "::1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
