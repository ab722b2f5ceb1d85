"""Bytes that an optimised HLO program reads and writes, counted kernel by kernel from its text.

Every kernel reads its operands and writes its outputs, with three exceptions: a fusion that gathers or slices an
operand reads what it takes, one that scatters into an operand leaves the rest where it lies, and of `paged` arrays the
text does not say how much a kernel reads, so they count as nothing. Branches and loops are left out: steps have them
for sampled rows only. XLA's own cost analysis counts gathered arrays whole, and for a GPU that is not there is none.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from math import prod

SIZES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
         "u64": 8, "f64": 8, "s4": 0.5, "u4": 0.5}  # fmt: skip
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "conditional", "while", "after-all",
    "partition-id",
}  # fmt: skip
TAKING = {"gather", "dynamic-slice", "slice"}
PASSING = {"bitcast", "convert", "reshape"}
PLACING = {"scatter", "dynamic-update-slice"}

LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


@dataclass
class Instruction:
    name: str
    arrays: list[tuple[str, tuple[int, ...]]]  # dtype and shape of each output
    opcode: str
    operands: list[str]
    called: str | None  # computation of a fusion or a call
    index: int  # of a parameter
    root: bool

    def bytes(self, paged: Collection[tuple[int, ...]] = ()) -> float:
        return sum(SIZES.get(kind, 0) * prod(shape) for kind, shape in self.arrays if shape not in paged)


@dataclass
class Program:
    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)
    entry: str = ""


def parse(text: str) -> Program:
    program, current = Program(), None
    for line in text.splitlines():
        if header := HEADER.match(line):
            current = program.computations.setdefault(header[2], {})
            program.entry = header[2] if header[1] else program.entry
        elif current is not None and (found := LINE.match(line)):
            name, shape, opcode, rest = found.groups()
            arrays = [(kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in ARRAY.findall(shape)]
            inside = rest[: _closing(rest)]
            called = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", rest)
            index = int(inside) if opcode == "parameter" else 0
            operands = re.findall(r"%([\w.\-]+)", inside)
            current[name] = Instruction(
                name, arrays, opcode, operands, called[1] if called else None, index, "ROOT" in line[: line.find("=")]
            )
    return program


def _closing(text: str) -> int:
    """Where the parenthesis closes that was opened before the text."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place
    return len(text)


def bytes_accessed(text: str, paged: Collection[tuple[int, ...]] = ()) -> float:
    """Of one call of the program. `paged`: shapes of arrays of which kernels read an unknown part."""
    return sum(kernel_bytes(text, paged).values())


def kernel_bytes(text: str, paged: Collection[tuple[int, ...]] = ()) -> dict[str, float]:
    """By name of the kernel."""
    program = parse(text)
    return dict(_kernels(program, program.entry, paged))


def _kernels(program: Program, name: str, paged: Collection[tuple[int, ...]]) -> list[tuple[str, float]]:
    here = program.computations[name]
    found = []
    for one in here.values():
        if one.opcode in FREE:
            continue
        if one.opcode == "call" and one.called:
            found += _kernels(program, one.called, paged)
            continue
        operands = [here[operand] for operand in one.operands if operand in here]
        if one.opcode == "fusion" and one.called:
            found.append((one.name, _fusion(program.computations[one.called], operands, one, paged)))
        else:
            found.append((one.name, one.bytes(paged) + sum(operand.bytes(paged) for operand in operands)))
    return found


def _fusion(
    inside: dict[str, Instruction], operands: list[Instruction], one: Instruction, paged: Collection[tuple[int, ...]]
) -> float:
    parameters = {each.index: each for each in inside.values() if each.opcode == "parameter"}
    placed = [each for each in inside.values() if each.opcode in PLACING]
    total = one.bytes(paged)
    for each in placed:  # the output is an operand, of which the updates are written
        updates = inside[each.operands[-1 if each.opcode == "scatter" else 1]]
        total += updates.bytes() - each.bytes(paged)
    for index, operand in enumerate(operands):
        parameter = parameters.get(index)
        if parameter is None or operand.bytes(paged) == 0:
            continue
        if any(_source(inside, each.operands[0]) == parameter.name for each in placed):
            continue
        total += min(operand.bytes(), _taken(inside, parameter))
    return total


def _source(inside: dict[str, Instruction], name: str) -> str:
    """What an instruction is but another name or type of."""
    while inside[name].opcode in PASSING:
        name = inside[name].operands[0]
    return name


def _taken(inside: dict[str, Instruction], parameter: Instruction) -> float:
    """Bytes of an operand that the instructions which use it take."""
    total, names = 0.0, [parameter.name]
    while names:
        name = names.pop()
        for user in inside.values():
            if name not in user.operands:
                continue
            if user.opcode in TAKING and user.operands[0] == name:
                total += user.bytes()
            elif user.opcode in PASSING:
                names.append(user.name)
            else:
                return parameter.bytes()
    return total
