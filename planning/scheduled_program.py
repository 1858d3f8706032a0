"""Reads the scheduled HLO of a compiled step: its instructions in the order in which a device runs them."""

import math
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from ..parallel.xla.census import computations_of

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


class Array(NamedTuple):
    """The type of one array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element, at least 1."""
        bits = re.search(r"\d+", self.dtype)
        return max(1, int(bits[0]) // 8) if bits else 1

    @property
    def bytes(self) -> int:
        """Bytes of the array on one device."""
        return self.size * self.itemsize


class Instruction(NamedTuple):
    """One instruction of a computation.

    Attributes:
        name: Its name, unique in the program.
        opcode: The operation, such as "fusion" or "all-gather-start".
        results: The arrays of its result; those of a tuple are listed one after the other.
        operands: The names of the instructions that it reads.
        attributes: The rest of its line: what it calls, its groups, its source.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def bytes(self) -> int:
        """Bytes of its result on one device."""
        return sum(each.bytes for each in self.results)

    @property
    def source(self) -> str:
        """The operation of JAX that it comes from; empty if XLA does not know."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    def names_in(self, attribute: str) -> list[str]:
        """Returns the computations that an attribute names, such as `calls`."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return re.findall(r"[\w.\-]+", found[1]) if found else []


class Computation:
    """The instructions of one computation, in the order in which they run."""

    def __init__(self, instructions: list[Instruction]) -> None:
        """Creates a computation; the last instruction is its result."""
        self.instructions = instructions

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    @property
    def root(self) -> Instruction:
        """The instruction that gives the result."""
        return self.instructions[-1]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Name -> instruction."""
        return {each.name: each for each in self.instructions}

    def operands_of(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions that one reads."""
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]


class Program(NamedTuple):
    """A scheduled program.

    Attributes:
        computations: Name -> computation.
        entry: The name of the computation that runs first.
    """

    computations: dict[str, Computation]
    entry: str

    def called(self, instruction: Instruction, attribute: str = "calls") -> Computation | None:
        """Returns the first computation that an attribute of an instruction names; None without one."""
        names = instruction.names_in(attribute)
        return self.computations[names[0]] if names else None


def parse_program(text: str) -> Program:
    """Parses the text of a compiled program.

    Args:
        text: `compiled.as_text()` of a backend that schedules its programs, as GPUs' does.
    """
    lines, entry = computations_of(text)
    return Program({name: Computation(list(_instructions(each))) for name, each in lines.items()}, entry)


def _instructions(lines: Iterable[str]) -> Iterator[Instruction]:
    for line in lines:
        if found := _INSTRUCTION.match(line):
            operands, attributes = _split(line[found.end() :])
            yield Instruction(found[1], found[3], _arrays(found[2]), tuple(_OPERAND.findall(operands)), attributes)


def _arrays(text: str) -> tuple[Array, ...]:
    return tuple(Array(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _ARRAY.findall(text))


def _split(text: str) -> tuple[str, str]:
    """Splits the rest of a line at the parenthesis that closes the operands."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:position], text[position + 1 :]
    return text, ""
