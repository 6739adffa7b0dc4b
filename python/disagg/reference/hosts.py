"""Which hosts may be dialled, in plain Python: names, wildcards and networks (DESIGN.md section 8)."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.errors import ConfigError
from disagg.reference.addresses import canonical_address, host_of

__all__ = ["HostList"]

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass
class HostList:
    """The same as `disagg._core.HostList`."""

    entries: Sequence[str]
    option: str = "allowed_hosts"
    names: list[str] = field(default_factory=list)
    wildcards: list[str] = field(default_factory=list)
    networks: list[Network] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.entries:
            raise ConfigError(self.option, "is empty; leave it out to allow every host")
        for entry in self.entries:
            try:
                self._add(entry)
            except ValueError as error:
                raise ConfigError(self.option, f'entry "{entry}" {error}') from None

    def verdict(self, host: str) -> str:
        """Return "allowed", "refused" or "after_look_up" for a host that nobody has looked up yet."""
        ip, name = _ip(host), _name(host)
        if ip is not None:
            return "allowed" if self._has(ip) else "refused"
        if name is None:
            return "refused"
        if name in self.names or any(name.endswith(f".{parent}") for parent in self.wildcards):
            return "allowed"
        return "refused" if self.names or self.wildcards else "after_look_up"

    def allows_resolved(self, ip: str) -> bool:
        """Whether an IP address that a name resolved to may be dialled."""
        number = _ip(ip)
        return number is not None and (not self.networks or self._has(number))

    def _has(self, ip: Address) -> bool:
        return any(ip in network for network in self.networks)

    def _add(self, entry: str) -> None:
        if not entry:
            raise ValueError("is empty")
        if entry == "*":
            raise ValueError("would allow every name; leave the option out to allow every host")
        if "*" in entry:
            parent = _name(entry.removeprefix("*."))
            if not entry.startswith("*.") or parent is None:
                raise ValueError("must have its only * in front of a name, as *.prefill.svc")
            self.wildcards.append(parent)
        elif "/" in entry:
            self.networks.append(_network(entry))
        elif "%" in entry:
            raise ValueError("must have no zone; hosts are compared without theirs")
        elif (ip := _ip(entry)) is not None:
            self.networks.append(ipaddress.ip_network(ip))
        elif (name := _name(entry)) is not None:
            self.names.append(name)
        elif ":" in entry:
            raise ValueError("must have no port; all ports of a host are allowed")
        else:
            raise ValueError("must be a name, *.name, an IP address or address/prefix")


def _ip(text: str) -> Address | None:
    """Return the IP address in `text`, with or without brackets and zone; IPv4-mapped IPv6 is IPv4."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        if ":" not in bare:
            return ipaddress.IPv4Address(text)
        v6 = ipaddress.IPv6Address(bare.partition("%")[0])
    except ValueError:
        return None
    return v6.ipv4_mapped or v6


def _name(text: str) -> str | None:
    """Return the name in `text`, lower-cased and without the final dot."""
    try:
        canonical = host_of(canonical_address(text, 1)) if ":" not in text else text
    except ValueError:
        return None
    if ":" in canonical or _ip(canonical) is not None:
        return None
    return canonical.removesuffix(".")


def _network(entry: str) -> Network:
    ip, _, prefix = entry.partition("/")
    number: Address
    try:
        number = ipaddress.IPv6Address(ip) if ":" in ip and "%" not in ip else ipaddress.IPv4Address(ip)
    except ValueError:
        if "%" in ip:
            raise ValueError("must have no zone; hosts are compared without theirs") from None
        raise ValueError("must be a name, *.name, an IP address or address/prefix") from None
    if not (prefix.isascii() and prefix.isdigit() and len(prefix) <= 3 and int(prefix) <= number.max_prefixlen):
        raise ValueError("must have a prefix length from 0 to 32, for IPv6 to 128")
    try:
        network = ipaddress.ip_network(f"{number}/{int(prefix)}")
    except ValueError:
        raise ValueError("has bits set behind its prefix") from None
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return network if mapped is None else ipaddress.ip_network(f"{mapped}/{int(prefix) - 96}")
