"""How long several devices take to sum or to gather an array: NVLink within a host, InfiniBand between hosts.

An estimate, by the formulas with which NCCL itself chooses a protocol:

    time = start + steps in a host * NVLink's latency + steps between hosts * the network's + bytes / bandwidth

Nothing was measured with this code. Sources: the latencies and shares of the bandwidth are those of NVIDIA/nccl,
src/graph/tuning.cc of 2022; that programs reach 370 of NVLink 4's 450 GB/s each way says an author of NCCL in
NVIDIA/nccl issue 1442; an NDR adapter has 400 Gb/s, and a DGX H100 has one for each of its eight GPUs. Beside published
times of eight H100s and of two hosts: docs/scale.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import NamedTuple

PER_HOST = 8  # GPUs of an HGX board, which NVLink connects
NVLINK4_REACHED, NDR = 370e9, 50e9  # bytes/s each way, of a device; NVLink 4's data sheet says 450e9


class Protocol(NamedTuple):
    """One of NCCL's ways to exchange. Times in seconds."""

    name: str
    ring: bool  # else a tree
    start: float
    link: float  # a step over NVLink
    network: float  # a step between hosts
    share: float  # of the bandwidth that carries data
    slower_links: float = 1.0  # factor on `link` where several hosts take part

    def seconds(self, moved: float | int, bandwidth: float, steps: tuple[float | int, float | int]) -> float:
        """`moved`: bytes that a device sends; `steps`: within a host, and between hosts."""
        inside, between = steps
        link = self.link * (self.slower_links if between else 1.0)
        return self.start + inside * link + between * self.network + moved / (self.share * bandwidth)


NCCL = (
    Protocol("tree, LL", False, 6.8e-6, 0.6e-6, 5.0e-6, 1 / 3.8, 1.8),
    Protocol("ring, LL", True, 6.6e-6, 0.6e-6, 2.7e-6, 1 / 4, 1.8),
    Protocol("ring, Simple", True, 8.4e-6, 3.4e-6, 14.0e-6, 1.0),
)
DIRECT_START = 4.0e-6
"""Seconds of an exchange in one kernel of a CUDA graph, each device reading all others: 4 KB among four GPUs, measured
over PCIe in haohervchb/sglang-V100 pull request 2."""


@dataclass(frozen=True)
class Fabric:
    """What connects the devices."""

    link: float = NVLINK4_REACHED  # bytes/s each way between two devices of a host
    network: float = NDR  # bytes/s each way of a device's adapter
    per_host: int = PER_HOST
    protocols: tuple[Protocol, ...] = NCCL
    direct: float | None = None  # seconds to start an exchange in one kernel within a host; None: only `protocols`
    step: float = 0.6e-6  # and of each of its steps

    def hosts(self, devices: int) -> int:
        """Raises ValueError if the devices fill hosts unevenly."""
        hosts = -(-devices // self.per_host)
        if devices < 1 or devices % hosts:
            raise ValueError(f"{devices} devices cannot be spread evenly over hosts of {self.per_host}")
        return hosts

    def all_reduce(self, size: float | int, devices: int) -> float:
        """Seconds until each of `devices` has the sum of their arrays of `size` bytes."""
        if devices == 1:
            return 0.0
        return min(self._all_reduces(size, devices))

    def all_gather(self, size: float | int, devices: int) -> float:
        """Seconds until each of `devices` has the arrays of all, `size` bytes each."""
        if devices == 1:
            return 0.0
        hosts, bandwidth, moved = self.hosts(devices), self._bandwidth(devices), (devices - 1) * size
        steps = devices - hosts, hosts - 1
        found = [each.seconds(moved, bandwidth, steps) for each in self.protocols if each.ring]
        if self.direct is not None and hosts == 1:
            found.append(self.direct + self.step + moved / self.link)
        return min(found)

    def _bandwidth(self, devices: int) -> float:
        """Bytes/s that pass each device: in a ring over hosts, those of all adapters of one."""
        hosts = self.hosts(devices)
        return self.link if hosts == 1 else min(self.link, self.network * devices / hosts)

    def _all_reduces(self, size: float | int, devices: int) -> Iterator[float]:
        hosts, bandwidth, most = self.hosts(devices), self._bandwidth(devices), devices - 1
        for each in self.protocols:
            if each.ring:  # each device passes on 1/n of the array, 2 (n - 1) times
                steps = 2 * (devices - hosts), 2 * (hosts - 1)
                yield each.seconds(2 * most / devices * size, bandwidth, steps)
            else:  # up the tree and down
                steps = 2 * (devices / hosts - 1), 2 * log2(hosts)
                yield each.seconds(2 * size, bandwidth, steps)
        if self.direct is not None and hosts == 1:
            yield self.direct + self.step + most * size / self.link  # one step: reads all of the others
            yield self.direct + 2 * self.step + 2 * most / devices * size / self.link  # sums a part, gathers all parts


HGX = Fabric()
"""H100s and H200s on HGX boards with an NDR adapter each, by NCCL, which XLA calls."""
