"""Which Host names a request may carry. A web page can point a name of its own at this machine (DNS rebinding) and would then be
of the same origin as the server; the name it has to use gives it away."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

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
