"""Which Host names a request may carry, and how operators name hosts and origins.

A web page can point a name of its own at this machine (DNS rebinding) and would then be of the same origin as the server; the name it
has to use gives it away."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}  # browsers leave them out
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*\.?")
_EVERY = ("0.0.0.0", "::", "")  # addresses that stand for all of the machine's


def host_allowed(header: str, bound: str, allowed: Sequence[str]) -> bool:
    """Whether `header`, the Host of a request to a server bound to `bound`, is loopback, the bound address or one of `allowed`.

    A server on every address takes every IP address: no page has an address as its name unless that machine served it.
    """
    try:
        name = (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if "*" in allowed or name in (host.lower() for host in allowed):
        return True
    if name == "localhost" or name.endswith(".localhost") or name == bound.lower():
        return bool(name)
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or bound in _EVERY


def host_name(text: str) -> str:
    """A name or address that a Host header may ask for, as `host_allowed` compares it; "*" is any. Raises ValueError saying what to use."""
    wanted = 'a bare host name or address such as pie.example.com, or "*"; it has no scheme, port or path'
    name = text.removeprefix("[").removesuffix("]").lower()
    if text == "*":
        return text
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        if not _NAME.fullmatch(name):
            raise ValueError(wanted) from None
    return name.rstrip(".")


def origin_name(text: str) -> str:
    """A web origin as browsers write it; "*" is any, "null" that of pages without one. Raises ValueError saying what to use."""
    wanted = 'an origin such as https://example.com or http://localhost:3000, or "*"'
    if text in ("*", "null"):
        return text
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(wanted) from None
    if not host or not parts.scheme or parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(wanted)
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{name}" + ("" if port in (None, _DEFAULT_PORTS.get(parts.scheme)) else f":{port}")
