"""The RDMA devices of this machine: what each port can do, and what is in the way of using it.

pyverbs (PyPI or the distribution's python3-pyverbs) tells more than sysfs; without it sysfs serves.
Whether groups can use a port is the core's own judgement, which `PYCOMM_IB_*` settings enter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pycomm import _core

FOLDER = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Gid:
    """An address of a port: its index, "RoCE v2" or "IB/RoCE v1", and the address itself."""

    index: int
    type: str
    address: str


@dataclass(frozen=True)
class Port:
    """One port. `rate`, `state` and `link_layer` are the kernel's words; None is unknown."""

    device: str
    number: int
    state: str
    rate: str
    link_layer: str
    gids: tuple[Gid, ...]
    usable: bool
    reason: str  # why it is not
    gid_index: int  # that groups use
    source: str = "sysfs"
    mtu_bytes: int | None = None
    atomics: bool | None = None
    on_demand_paging: bool | None = None

    def describe(self) -> str:
        """One line for people."""
        parts = [self.state, self.rate, self.link_layer]
        if self.mtu_bytes is not None:
            parts.append(f"MTU {self.mtu_bytes}")
        for gid in self.gids:
            if gid.index == self.gid_index:
                parts.append(f"GID {gid.index} {gid.address} ({gid.type})")
        for name, value in (("atomics", self.atomics), ("paging", self.on_demand_paging)):
            if value is not None:
                parts.append(f"{name} {'yes' if value else 'no'}")
        return ", ".join(part for part in parts if part) + f" [{self.source}]"


def list_ports() -> tuple[list[Port], str]:
    """All ports, and, where there are none, why."""
    known = _core.rdma_ports()
    judged = {(row["device"], row["port"]): row for row in known["ports"]}
    ports = []
    for device in sorted(FOLDER.iterdir()) if FOLDER.is_dir() else []:
        for folder in sorted((device / "ports").iterdir()):
            number = int(folder.name)
            row = judged.get((device.name, number), {})
            port = Port(
                device=device.name,
                number=number,
                state=_word(folder / "state").split(":")[-1].strip(),
                rate=_word(folder / "rate"),
                link_layer=_word(folder / "link_layer"),
                gids=tuple(_gids(folder)),
                usable=bool(row.get("usable", False)),
                reason=str(row.get("reason", known["refusal"] or "the driver does not show it")),
                gid_index=int(row.get("gid_index", 0)),
                atomics=row.get("atomics"),
            )
            ports.append(_ask_pyverbs(port))
    return ports, str(known["refusal"])


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _gids(folder: Path) -> list[Gid]:
    found = []
    for path in sorted((folder / "gids").iterdir(), key=lambda path: int(path.name)):
        address = _word(path)
        if address.strip("0:"):
            kind = _word(folder / "gid_attrs" / "types" / path.name)
            found.append(Gid(int(path.name), kind, address))
    return found


def _ask_pyverbs(port: Port) -> Port:
    try:
        import pyverbs.device
        from pyverbs import enums
    except ImportError:
        return port
    try:
        context: Any = pyverbs.device.Context(name=port.device)
        device, extended = context.query_device(), context.query_device_ex()
        attributes = context.query_port(port.number)
    except Exception as error:  # the kernel refuses, or a version that has other names
        return replace(port, source=f"sysfs; pyverbs: {error}")
    return replace(
        port,
        source="pyverbs",
        mtu_bytes=128 << int(attributes.active_mtu),
        atomics=device.atomic_caps != enums.IBV_ATOMIC_NONE,
        on_demand_paging=bool(extended.odp_caps.general_caps & enums.IBV_ODP_SUPPORT),
    )
