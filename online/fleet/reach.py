"""Explain in one line why a server cannot be reached, with the remedy."""

import errno
import socket
import ssl
from collections.abc import Iterable, Iterator

import httpcore
import httpx

from redraft.files.printable import printable

REFUSED = "nothing listens at this address: start the server, or correct the address"
UNKNOWN_NAME = "the host name cannot be resolved: correct the address, or the name server"
NO_ROUTE = "there is no network route to it: correct the address, or the route"
SILENT = (
    "it did not answer in time: check whether a firewall blocks the connection, or the server hangs"
)
UNTRUSTED = (
    "its certificate is not trusted here: set SSL_CERT_FILE to a file with its certificate "
    "authority"
)
OTHER_NAME = "its certificate is for a different host name: use the address in the certificate"
EXPIRED = "its certificate has expired: renew it"
WANTS_CERTIFICATE = (
    "it requires a certificate from clients, but redraft has none: start vLLM "
    "without --ssl-cert-reqs"
)
FOREIGN = (
    "a login page answers instead: use the address behind it, or exempt /redraft/, /metrics and "
    "/v1/ from the login"
)
IS_PLAIN = "it uses plain HTTP: start its address with http://"
IS_TLS = "it does not answer in HTTP: if it uses TLS, start its address with https://"
NO_NETWORK = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL}
BY_CODE = {10: EXPIRED, 62: OTHER_NAME, 64: OTHER_NAME}  # OpenSSL's verify codes.
REDIRECTS = (301, 302, 303, 308)  # without 307: vLLM itself uses it to remove a trailing slash
TLS_REASONS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNEXPECTED_EOF")


def explain(error: BaseException) -> str:
    """Explain an error and its remedy; an uncommon error is described by its own message."""
    for cause in list_causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return BY_CODE.get(cause.verify_code, UNTRUSTED)
        if isinstance(cause, ssl.SSLError) and "CERTIFICATE_REQUIRED" in (cause.reason or ""):
            return WANTS_CERTIFICATE
        if (
            isinstance(cause, ssl.SSLError)
            and (cause.reason or "").upper().replace(" ", "_") in TLS_REASONS
        ):
            return IS_PLAIN
        if isinstance(cause, socket.gaierror):
            return UNKNOWN_NAME
        if isinstance(cause, ConnectionRefusedError):
            return REFUSED
        if isinstance(cause, OSError) and cause.errno in NO_NETWORK:
            return NO_ROUTE
        if isinstance(cause, TimeoutError | httpx.TimeoutException):
            return SILENT
        # h11 raises this error for a response that does not begin with HTTP/1.1.
        if isinstance(
            cause, httpx.RemoteProtocolError | httpcore.RemoteProtocolError
        ) and "illegal" in str(cause):
            return IS_TLS
    return printable((str(error) or type(error).__name__).splitlines()[0])


def explain_answer(status: int, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Explain a response from a proxy or gateway in front of the server, with the remedy.

    Empty if the response comes from the server itself.
    """
    found = {name.lower(): value.lower() for name, value in headers}
    is_page = status < 500 and found.get(b"content-type", b"").startswith(b"text/html")
    wants_login = not found.get(b"www-authenticate", b"bearer").startswith(b"bearer")
    return FOREIGN if status in REDIRECTS or is_page or wants_login else ""


def list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and all of its causes.

    httpx, httpcore and anyio wrap the system's error, sometimes more than once.
    """
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                yield from list_causes(part)
        error = error.__cause__ or error.__context__
