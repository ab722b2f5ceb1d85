"""Reads the thunk sequence that XLA dumps during compilation for a GPU: graphs, kernels, copies, host decisions.

    executable = lowered.compile(compiler_options=dump_options(folder))
    counts(*read_dump(folder))

A command buffer is a CUDA graph. The host decides loops and branches outside of one, and waits for the device. A
matrix product by cuBLAS is one kernel thunk, even if it runs as two kernels.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def dump_options(folder: str) -> dict[str, Any]:
    """Compiler options that write a program's texts to `folder`."""
    return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def read_dump(folder: str) -> tuple[list[Thunk], Places] | None:
    """The largest program in `folder`. None: no GPU program was compiled (a CPU, or a hit in the compilation cache)."""

    def read(ending: str) -> str | None:
        files = sorted(Path(folder).glob(f"*{ending}"), key=lambda file: file.stat().st_size)
        return files[-1].read_text() if files else None

    sequence = read(".thunk_sequence_after_thunk_passes.txt")
    metadata, hlo = read(".thunk_metadata.txt"), read("gpu_after_optimizations.txt")
    return None if sequence is None else (read_thunks(sequence), Places(metadata or "", hlo or ""))


def bytes_read(hlo: str, argument: str = "params") -> dict[str, int]:
    """Bytes of the leaves of an argument that kernels of an optimised program read, by name: the size of a parameter
    for each kernel with that operand. A gather, such as an embedding, reads less than its operand's size."""
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}  # instruction -> the parameter that it is a view of
    read: Counter[str] = Counter()
    start = hlo.index("\nENTRY ")
    entry = hlo[start : hlo.index("\n}", start)]
    for name, dtype, shape, kind, operands in re.findall(
        r"^  (?:ROOT )?(%[\w.-]+) = (?:\(.*?\)|(\w+)\[([\d,]*)\]\S*) ([\w-]+)\(([^)]*)\)", entry, re.MULTILINE
    ):
        if kind == "parameter" and name.startswith(f"%{argument}"):
            bits = re.sub(r"\D*(\d+).*", r"\1", dtype)
            sizes[name] = math.prod(map(int, filter(None, shape.split(",")))) * int(bits) // 8
            origin[name] = name
            continue
        parameters = {origin[operand] for operand in re.findall(r"%[\w.-]+", operands) if operand in origin}
        if kind == "bitcast":
            for parameter in parameters:
                origin[name] = parameter
        elif parameters and kind not in ("fusion", "custom-call"):
            raise ValueError(f"{name} passes {sorted(parameters)} to a {kind}, whose kernels are not followed")
        else:
            read.update({parameter: sizes[parameter] for parameter in parameters})
    return dict(read)


def counts(thunks: list[Thunk], places: Places) -> dict[str, Any]:
    """Numbers of graphs, kernels and copies, and the loops and branches that host and device decide.
    `kernels_every_call` leaves out kernels inside branches and loops."""
    work = [thunk for thunk in thunks if thunk.kind not in CONTROL]
    kernels = [thunk for thunk in work if thunk.kind not in COPIES]
    outside = [thunk for thunk in thunks if not thunk.in_graph]
    decisions = [thunk for thunk in thunks if thunk.kind in ("kConditional", "kWhile")]

    def described(thunk: Thunk) -> dict[str, Any]:
        within = sum(kind in ("kConditional", "kWhile") for kind in thunk.above)
        inside = sum(thunk.number in kernel.inside for kernel in kernels)
        return {"kind": thunk.kind[1:], "within": within, "kernels": inside, **places.of(thunk)}

    return {
        "graphs": sum(thunk.kind == "kCommandBuffer" for thunk in thunks),
        "one_graph": [thunk.kind for thunk in thunks if not thunk.above] == ["kCommandBuffer"],
        "kernels": len(kernels),
        "kernels_every_call": sum(thunk.always for thunk in kernels),
        "copies": len(work) - len(kernels),
        "copies_every_call": sum(thunk.always for thunk in work) - sum(thunk.always for thunk in kernels),
        "outside_graphs": dict(Counter(thunk.kind for thunk in outside)),
        "kinds": dict(Counter(thunk.kind for thunk in thunks)),
        # The host reads back the condition of a branch, and that of a loop unless its number of trips is known.
        "host_decides": [described(thunk) for thunk in decisions if not thunk.in_graph],
        "device_decides": [described(thunk) for thunk in decisions if thunk.in_graph],
    }


CONTROL = ("kCommandBuffer", "kConditional", "kWhile")
COPIES = ("kCopy", "kMemzero", "kMemset32BitValue", "kDeviceToDeviceCopy")


@dataclass
class Thunk:
    kind: str
    number: int
    above: tuple[str, ...]  # kinds of the enclosing thunks, outermost first
    inside: tuple[int, ...] = ()  # numbers of the enclosing thunks

    @property
    def in_graph(self) -> bool:
        return "kCommandBuffer" in (*self.above, self.kind)

    @property
    def always(self) -> bool:
        """True if every call runs it exactly once."""
        return "kConditional" not in self.above and "kWhile" not in self.above


def read_thunks(text: str) -> list[Thunk]:
    """Parses lines `<indentation><number>: <kind> ...`; enclosed thunks are indented deeper."""
    thunks, stack = [], []
    for line in re.finditer(r"^( *)(?:\w+:)?( *)(\d+): (k\w+)", text, re.MULTILINE):
        depth = len(line[1]) + len(line[2])
        while stack and stack[-1][0] >= depth:
            stack.pop()
        number, kind = int(line[3]), line[4]
        thunks.append(Thunk(kind, number, tuple(above for _, above, _ in stack), tuple(above for *_, above in stack)))
        stack.append((depth, kind, number))
    return thunks


class Places:
    """Maps a thunk's number to its source line in this project, by the tables at the head of an HLO text."""

    def __init__(self, metadata: str, hlo: str) -> None:
        pairs = re.findall(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)', metadata)
        self._names = {int(number): name for name, number in pairs}
        self._hlo = hlo
        self._files = self._table("FileNames", r'"(.*)"')
        self._functions = self._table("FunctionNames", r'"(.*)"')
        self._locations = self._table("FileLocations", r"\{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
        self._frames = self._table("StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")

    def _table(self, title: str, row: str) -> dict[int, Any]:
        part = re.search(rf"^{title}\n((?:\d+ .*\n)*)", self._hlo, re.MULTILINE)
        rows = re.findall(rf"^(\d+) {row}", part[1] if part else "", re.MULTILINE)
        return {int(number): rest[0] if len(rest) == 1 else rest for number, *rest in rows}

    def of(self, thunk: Thunk) -> dict[str, Any]:
        """The innermost line in specjax or its kernels, and the number of trips of a loop if it is known."""
        name = self._names.get(thunk.number, "")
        line = re.search(rf"^ *(?:ROOT )?%?{re.escape(name)} = .*$", self._hlo, re.MULTILINE)
        if not name or line is None:
            return {}
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line[0])
        place: dict[str, Any] = {"trips": int(trips[1])} if trips else {}
        frame = re.search(r"stack_frame_id=(\d+)", line[0])
        number = int(frame[1]) if frame else 0
        while number in self._frames:
            location, parent = self._frames[number]
            file, function, at = self._locations[int(location)]
            path = Path(self._files[int(file)])
            package = next((part for part in ("specjax_kernels", "specjax") if part in path.parts), None)
            if package:
                inside = path.parts[path.parts.index(package) :]
                return place | {"place": f"{'/'.join(inside)}:{at} {self._functions[int(function)]}"}
            number = int(parent or 0) - 1  # the text counts parents from 1, 1 being none
        return place
