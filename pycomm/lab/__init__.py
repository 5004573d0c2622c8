"""Hosts on one machine: network namespaces with rates, and a wide area between them.

    from pycomm.lab import Lab, LabPlan, Wan

    with Lab(LabPlan(hosts=2, wan=Wan(rtt_ms=40, loss=0.01, rate_mbit=1000))) as lab:
        lab.run(0, ["ping", "-c", "3", lab.plan.address(1)])

Needs root, iproute2 and /dev/net/tun; `refusal()` says what is missing.
"""

from pycomm.lab.lab import Lab, LabError, open_lab, refusal
from pycomm.lab.plan import LabPlan, Wan

__all__ = ["Lab", "LabError", "LabPlan", "Wan", "open_lab", "refusal"]
