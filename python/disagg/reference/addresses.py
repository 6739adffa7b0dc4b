"""Bootstrap addresses: one canonical spelling for each, in plain Python (DESIGN.md section 8)."""

from __future__ import annotations

import ipaddress
import re

__all__ = ["FAKE_HOST", "canonical_address", "host_of"]

# The warm-up convention of SGLang: transfers to this host are fake.
FAKE_HOST = "2.2.2.2"

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_ZONE = re.compile(r"[A-Za-z0-9._-]{1,32}")
_MAX_ADDRESS = 320


def canonical_address(text: str, default_port: int | None = 8998) -> str:
    """Return `host:port` or `[v6]:port`, lower-cased and compressed; names are not resolved.

    Raises ValueError saying what is wrong with `text`.
    """
    if not text:
        raise ValueError("address is empty")
    if len(text) > _MAX_ADDRESS:
        raise ValueError(f"address has {len(text)} characters, at most {_MAX_ADDRESS} are allowed")
    if not text.isascii() or any(char <= " " or char == "\x7f" for char in text):
        raise ValueError("address has a blank, a control or a non-ASCII character")
    if "://" in text:
        raise ValueError("address is a URL; give host:port")
    if any(char in text for char in "/?#@\\"):
        raise ValueError("address has a path or user part; give host:port")
    host, port = _split(text)
    if port is None:
        if default_port is None:
            raise ValueError("address has no port and there is no default")
        return f"{_host(host)}:{default_port}"
    if not port.isdigit() or len(port) > 5 or not 1 <= int(port) <= 65_535:
        raise ValueError("port is not a number from 1 to 65535")
    return f"{_host(host)}:{int(port)}"


def host_of(canonical: str) -> str:
    """Return the host of a canonical address."""
    return canonical.rpartition(":")[0]


def _split(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        inside, bracket, rest = text.partition("]")
        if not bracket:
            raise ValueError("address has an opening bracket that is not closed")
        if rest and not rest.startswith(":"):
            raise ValueError("address has text between the bracket and the port")
        return inside + "]", rest[1:] if rest else None
    if text.count(":") > 1:
        raise ValueError("IPv6 address needs brackets: [v6]:port")
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _host(host: str) -> str:
    if host.startswith("["):
        return f"[{_ipv6(host[1:-1])}]"
    if not host:
        raise ValueError("address has no host")
    labels = host.lower().split(".")
    last = labels[-2] if labels[-1] == "" and len(labels) > 1 else labels[-1]
    if last.isdigit() or re.fullmatch(r"0x[0-9a-f]*", last):
        # Other number forms (127.1, 0x7f.1, 010.0.0.1) would be second spellings of an address.
        if not re.fullmatch(r"(0|[1-9][0-9]{0,2})(\.(0|[1-9][0-9]{0,2})){3}", host) or any(
            int(part) > 255 for part in labels
        ):
            raise ValueError("host is not a dotted IPv4 address of four numbers from 0 to 255")
        return host
    named = labels[:-1] if labels[-1] == "" else labels
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in named):
        raise ValueError("host is neither a name nor an IP address")
    return host.lower()


def _ipv6(text: str) -> str:
    number, percent, zone = text.partition("%")
    if percent and not _ZONE.fullmatch(zone):
        raise ValueError("zone id of the IPv6 address is malformed")
    try:
        parsed = ipaddress.IPv6Address(number)
    except ValueError:
        raise ValueError("text in brackets is not an IPv6 address") from None
    mapped = parsed.ipv4_mapped
    canonical = f"::ffff:{mapped}" if mapped is not None else parsed.compressed
    return canonical + percent + zone
