"""What a lab looks like: hosts, the sites that they stand in, and the network between sites."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

HOSTS_MAX = 100
_FIRST_HOST = 10  # the last byte of the address of a site's first host; its router has 1


@dataclass(frozen=True)
class Wan:
    """The network between two sites, alike in both directions.

    Args:
        rtt_ms: Round trip, half of it each way.
        jitter_ms: Added to each way's delay, uniform from 0.
        reorders: Jitter may let packets overtake one another.
        loss: Share of packets lost, independently, 0 to 1.
        burst: Gilbert-Elliott (begins, ends, loss): probabilities a packet that a burst begins,
            ends, and of loss inside one.
        duplicates: Share of packets that come twice.
        rate_mbit: Of IP packets, Mbit/s; 0 is without bound.
        queue_ms: Longest wait for the rate, then the tail is dropped. Default: one rtt_ms, at
            least 10 ms.
        ecn: Marks Congestion Experienced above a quarter of the queue.
        mtu: Longer IP packets vanish, with no ICMP; 0: none do.
    """

    rtt_ms: float = 0
    jitter_ms: float = 0
    reorders: bool = False
    loss: float = 0
    burst: tuple[float, float, float] | None = None
    duplicates: float = 0
    rate_mbit: float = 0
    queue_ms: float | None = None
    ecn: bool = False
    mtu: int = 0

    def __post_init__(self) -> None:
        if self.burst is not None:
            object.__setattr__(self, "burst", tuple(self.burst))  # from JSON it is a list
            if len(self.burst) != 3:
                raise ValueError("a burst is three probabilities: begins, ends, loss")
        shares = (self.loss, self.duplicates, *(self.burst or ()))
        if any(not 0 <= share <= 1 for share in shares):
            raise ValueError(f"loss, duplicates and burst are shares from 0 to 1, not {shares}")
        lengths = (self.rtt_ms, self.jitter_ms, self.rate_mbit, self.queue_ms or 0, self.mtu)
        if min(lengths) < 0:
            raise ValueError("times, rates and the MTU cannot be negative")

    def to_link(self) -> dict[str, float]:
        """The fields of `_core.Relay.set_link`."""
        queue_ms = max(self.rtt_ms, 10) if self.queue_ms is None else self.queue_ms
        begins, ends, burst_loss = self.burst or (0, 1, 1)
        return {
            "delay_ns": round(self.rtt_ms * 1e6 / 2),
            "jitter_ns": round(self.jitter_ms * 1e6),
            "reorders": self.reorders,
            "loss": self.loss,
            "burst_begins": begins,
            "burst_ends": ends,
            "burst_loss": burst_loss,
            "duplicates": self.duplicates,
            "rate_bits_per_s": round(self.rate_mbit * 1e6),
            "queue_ns": round(queue_ms * 1e6),
            "marks_ecn": self.ecn,
            "mtu_bytes": self.mtu,
        }


@dataclass(frozen=True)
class LabPlan:
    """Hosts in sites.

    Args:
        hosts: Number of hosts.
        sites: Number of sites, which hosts are dealt to in even, contiguous parts. Default: one,
            or, with a `wan`, one a host.
        rates_mbit: Each host's link, both ways, Mbit/s; 0 is without bound. Fewer than hosts: the
            last one counts for the rest.
        wan: Between all sites; `Lab.set_wan` changes single pairs.
        seed: Of all chance in the relay.
        tcp: Congestion control of TCP in the hosts ("cubic", "bbr"); "" leaves the system's.
    """

    hosts: int = 2
    sites: int = 0
    rates_mbit: tuple[float, ...] = ()
    wan: Wan | None = None
    seed: int = 0
    tcp: str = ""
    _site_of: tuple[int, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= HOSTS_MAX:
            raise ValueError(f"{self.hosts} hosts; there can be 1 to {HOSTS_MAX}")
        sites = self.sites or (1 if self.wan is None else self.hosts)
        if not 1 <= sites <= self.hosts:
            raise ValueError(f"{sites} sites for {self.hosts} hosts")
        if len(self.rates_mbit) > self.hosts or any(rate < 0 for rate in self.rates_mbit):
            raise ValueError(f"rates {self.rates_mbit} for {self.hosts} hosts")
        object.__setattr__(self, "sites", sites)
        dealt = tuple(host * sites // self.hosts for host in range(self.hosts))
        object.__setattr__(self, "_site_of", dealt)

    def site_of(self, host: int) -> int:
        """The site that `host` stands in."""
        return self._site_of[host]

    def hosts_of(self, site: int) -> list[int]:
        """The hosts of `site`."""
        return [host for host in range(self.hosts) if self._site_of[host] == site]

    def rate_mbit(self, host: int) -> float:
        """Of the host's link; 0 is without bound."""
        return self.rates_mbit[min(host, len(self.rates_mbit) - 1)] if self.rates_mbit else 0

    def subnet(self, site: int) -> str:
        """The site's first three bytes."""
        return f"10.77.{site}"

    def address(self, host: int) -> str:
        """The host's IPv4 address."""
        site = self.site_of(host)
        return f"{self.subnet(site)}.{_FIRST_HOST + host - self.hosts_of(site)[0]}"

    def to_json(self) -> dict[str, Any]:
        """For the lab's file."""
        return {name: value for name, value in asdict(self).items() if name != "_site_of"}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> LabPlan:
        """What `to_json` gave."""
        wan = fields["wan"]
        return LabPlan(
            **{
                **fields,
                "rates_mbit": tuple(fields["rates_mbit"]),
                "wan": None if wan is None else Wan(**wan),
            }
        )
