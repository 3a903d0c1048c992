"""Prove that a compiled Hopper kernel never refills shared memory that an asynchronous matrix product still reads.

Triton's pipeliner (3.6 to 3.9) gives a tile that feeds both an asynchronous wgmma and an ordinary load one buffer slot
too few: the copy of a later tile may land in the slot while wgmma reads it, and results change from run to run. This
module executes the control flow of the TTGIR (integers, slots, barriers; tensors stay opaque) for given sizes, and
reports

- a copy or store into a slot that a product in flight reads, or that a TMA store still reads,
- a read of a slot whose copy has not been waited for, and a wait that nothing completes,
- a product in flight across the end of a loop body whose left operand sits in registers defined in that body,
- a use of a product's result, or the release of its operands' buffers, before the product has been waited for.

    violations = check(compiled.asm["ttgir"], {"M": 1000, "N": 512, "K": 448})

    python -m recsys_norm.kernels.race_check recsys_norm.kernels.lazy.cases

lowers every case of a module's `race_cases(90)` and prints one JSON object for each.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

OPAQUE = None  # a value that the control flow does not depend on
MAX_TRIPS = 4096


class UnsupportedIR(NotImplementedError):
    """The TTGIR holds control flow or an operation that this check does not know."""


@dataclass
class Op:
    name: str
    results: tuple[str, ...]
    text: str  # what follows the name
    regions: list[list[Op]] = field(default_factory=list)


@dataclass(frozen=True)
class Slot:
    buffer: int
    name: str
    index: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}{list(self.index)}"


@dataclass(frozen=True)
class Product:
    """An asynchronous matrix product: the slots it reads and whether its left operand is in registers."""

    serial: int
    reads: tuple[Slot, ...]
    loop_registers: bool


@dataclass
class Barrier:
    phase: int = 0
    pending: list[Slot] = field(default_factory=list)


# ---------------------------------------------------------------- parsing

_LOCATION = re.compile(r"\s*loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_RESULT = re.compile(r"^((?:%[\w$.#-]+(?::\d+)?)(?:, %[\w$.#-]+(?::\d+)?)*) = (.*)$")
_NAME = re.compile(r'^"?([a-z_]+\.[\w.]+)"?')
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")


def parse(ttgir: str) -> tuple[list[str], list[Op]]:
    """(argument names, body) of the one function of a TTGIR module."""
    lines = [_LOCATION.sub("", line).strip() for line in ttgir.splitlines()]
    start = next((i for i, line in enumerate(lines) if line.startswith("tt.func public")), None)
    if start is None or not lines[start].endswith("{"):
        raise UnsupportedIR("no public function on one line")
    names = re.findall(r"(%[\w$.-]+): ", lines[start])
    body, _ = _block(lines, start + 1)
    return names, body


def _block(lines: list[str], at: int) -> tuple[list[Op], int]:
    ops: list[Op] = []
    while at < len(lines):
        line = lines[at]
        if line.startswith("}"):
            return ops, at
        if not line or line.startswith(("//", "^", "#")):
            at += 1
            continue
        op = _op(line)
        at += 1
        if line.endswith("{") or line.endswith("({"):
            region, at = _block(lines, at)
            op.regions.append(region)
            while lines[at].startswith("} else") or lines[at].startswith("}, {"):
                region, at = _block(lines, at + 1)
                op.regions.append(region)
            at += 1
        ops.append(op)
    return ops, at


def _op(line: str) -> Op:
    found = _RESULT.match(line)
    results: tuple[str, ...] = ()
    if found:
        results = tuple(r.split(":")[0] for r in found.group(1).split(", "))
        line = found.group(2)
    name = _NAME.match(line)
    if name is None:
        raise UnsupportedIR(f"cannot parse {line[:120]!r}")
    return Op(name.group(1), results, line[name.end() :])


def _operands(text: str) -> list[str]:
    """Values named before the type signature of an operation."""
    return _VALUE.findall(text.split(" : ")[0])


# ---------------------------------------------------------------- execution

_INTEGER: dict[str, Callable[..., int]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.divsi": lambda a, b: int(a / b),
    "arith.divui": lambda a, b: a // b,
    "arith.remsi": lambda a, b: a - int(a / b) * b,
    "arith.remui": lambda a, b: a % b,
    "arith.ceildivsi": lambda a, b: -(-a // b),
    "arith.andi": lambda a, b: a & b,
    "arith.ori": lambda a, b: a | b,
    "arith.xori": lambda a, b: a ^ b,
    "arith.shli": lambda a, b: a << b,
    "arith.shrsi": lambda a, b: a >> b,
    "arith.maxsi": max,
    "arith.minsi": min,
    "arith.extsi": lambda a: a,
    "arith.extui": lambda a: a,
    "arith.trunci": lambda a: a,
    "arith.index_cast": lambda a: a,
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "slt": lambda a, b: a < b,
    "sle": lambda a, b: a <= b,
    "sgt": lambda a, b: a > b,
    "sge": lambda a, b: a >= b,
    "ult": lambda a, b: a < b,
    "ule": lambda a, b: a <= b,
    "ugt": lambda a, b: a > b,
    "uge": lambda a, b: a >= b,
}
_VIEWS = ("ttg.memdesc_trans", "ttg.memdesc_subslice", "ttg.memdesc_reinterpret", "ttg.memdesc_reshape")


class Machine:
    """Runs one program of a kernel and collects violations (each text once)."""

    def __init__(self, values: dict[str, int], program: int, programs: int):
        self.env: dict[str, Any] = {f"%{name}": value for name, value in values.items()}
        self.program, self.programs = program, programs
        self.violations: dict[str, None] = {}
        self.in_flight: list[Product] = []
        self.loading: set[Slot] = set()
        self.barriers: dict[Slot, Barrier] = {}
        self.copies: list[Slot] = []  # cp.async copies of the open group
        self.groups: list[list[Slot]] = []
        self.stores: list[Slot] = []  # TMA stores that may still read
        self.loops: list[set[str]] = []  # names defined in the bodies of the open loops
        self.serial = 0

    def report(self, text: str) -> None:
        self.violations.setdefault(text)

    def value(self, name: str) -> Any:
        base, _, index = name.partition("#")
        value = self.env.get(base, OPAQUE)
        return value[int(index)] if index and isinstance(value, list) else value

    def define(self, op: Op, *values: Any) -> None:
        if len(op.results) == 1 and len(values) > 1:
            self.env[op.results[0]] = list(values)
        for name, value in zip(op.results, values if len(op.results) == len(values) else ()):
            self.env[name] = value
        for names in self.loops:
            names.update(op.results)

    def integer(self, name: str, what: str) -> int:
        value = self.value(name)
        if not isinstance(value, int):
            raise UnsupportedIR(f"{what} {name} is not a known integer; give it a value")
        return int(value)

    # -- what the asynchronous engines do

    def write(self, slot: Slot, how: str) -> None:
        for product in self.in_flight:
            if slot in product.reads:
                self.report(f"{how} refills {slot.name} while an asynchronous product reads it")
        if slot in self.stores:
            self.report(f"{how} refills {slot.name} while a TMA store reads it")

    def read(self, slot: Slot, how: str) -> None:
        if slot in self.loading:
            self.report(f"{how} reads {slot.name} before its copy has been waited for")

    def retire(self, pendings: int) -> None:
        self.in_flight = self.in_flight[len(self.in_flight) - pendings :] if pendings else []

    # -- execution

    def run(self, block: Iterable[Op]) -> list[Any]:
        for op in block:
            if op.name in ("scf.yield", "tt.return"):
                return [self.value(v) for v in _operands(op.text)]
            self.step(op)
        return []

    def step(self, op: Op) -> None:
        handler = getattr(self, "on_" + op.name.replace(".", "_"), None)
        if handler is not None:
            handler(op)
        elif op.name in _INTEGER:
            args = [self.value(v) for v in _operands(op.text)]
            known = all(isinstance(a, int) for a in args)
            self.define(op, _INTEGER[op.name](*args) if known else OPAQUE)
        elif op.name in _VIEWS:
            self.define(op, self.value(_operands(op.text)[0]))
        elif op.name.startswith(("scf.", "cf.", "tt.call")) or "tc_gen5" in op.name or "warp_specialize" in op.name:
            raise UnsupportedIR(op.name)
        else:
            for name in _operands(op.text):
                self.use(self.value(name), op.name)
            self.define(op, *(OPAQUE for _ in op.results))

    def use(self, value: Any, how: str) -> None:
        if isinstance(value, Product) and value in self.in_flight:
            self.report(f"{how} uses the result of a product that has not been waited for")

    def on_arith_constant(self, op: Op) -> None:
        found = re.match(r"^ (-?\d+|true|false)\b", op.text)
        literal = found.group(1) if found and "." not in op.text.split(":")[0] else None
        known = {"true": 1, "false": 0, None: OPAQUE}
        self.define(op, known[literal] if literal in known else int(literal))

    def on_arith_cmpi(self, op: Op) -> None:
        predicate = re.match(r"^ (\w+),", op.text).group(1)
        a, b = (self.value(v) for v in _operands(op.text))
        known = isinstance(a, int) and isinstance(b, int)
        self.define(op, int(_COMPARE[predicate](a, b)) if known else OPAQUE)

    def on_arith_select(self, op: Op) -> None:
        condition, a, b = (self.value(v) for v in _operands(op.text))
        if isinstance(condition, int):
            self.define(op, a if condition else b)
        else:
            self.define(op, OPAQUE)

    def on_tt_get_program_id(self, op: Op) -> None:
        self.define(op, self.program if op.text.strip().startswith("x") else 0)

    def on_tt_get_num_programs(self, op: Op) -> None:
        self.define(op, self.programs if op.text.strip().startswith("x") else 1)

    def on_scf_if(self, op: Op) -> None:
        taken = self.integer(_operands(op.text)[0], "the condition")
        if taken or len(op.regions) > 1:
            values = self.run(op.regions[0 if taken else 1])
            if op.results:
                self.define(op, *values)

    def on_scf_for(self, op: Op) -> None:
        head = re.match(r"^ (%[\w$.-]+) = (\S+) to (\S+) step (\S+)", op.text)
        variable, *bounds = head.groups()
        low, high, step = (self.integer(b, "the loop bound") for b in bounds)
        carried = re.findall(r"(%[\w$.-]+) = (%[\w$.#-]+)", op.text[head.end() :].split(" -> ")[0])
        values = [self.value(v) for _, v in carried]
        for trip, i in enumerate(range(low, high, step)):
            if trip > MAX_TRIPS:
                raise UnsupportedIR(f"a loop with more than {MAX_TRIPS} trips; give smaller sizes")
            self.env[variable] = i
            self.env.update((name, value) for (name, _), value in zip(carried, values))
            self.loops.append(set())
            values = self.run(op.regions[0])
            self.loops.pop()
            if any(p.loop_registers for p in self.in_flight):
                self.report("a product whose left operand is in registers is in flight across the end of a loop body")
        if op.results:
            self.define(op, *values)

    # -- shared memory

    def on_ttg_local_alloc(self, op: Op) -> None:
        self.serial += 1
        self.define(op, Slot(self.serial, op.results[0]))

    def on_ttg_memdesc_index(self, op: Op) -> None:
        base, index = _operands(op.text)[:2]
        slot = self.value(base)
        self.define(op, Slot(slot.buffer, slot.name, (*slot.index, self.integer(index, "the slot"))))

    def on_ttg_local_dealloc(self, op: Op) -> None:
        slot = self.value(_operands(op.text)[0])
        if any(r.buffer == slot.buffer for p in self.in_flight for r in p.reads):
            self.report(f"{slot.name} is released while an asynchronous product reads it")
        if any(s.buffer == slot.buffer for s in self.loading):
            self.report(f"{slot.name} is released while a copy into it has not been waited for")

    def on_ttg_local_load(self, op: Op) -> None:
        self.read(self.value(_operands(op.text)[0]), "a load")
        self.define(op, OPAQUE)

    def on_ttg_local_store(self, op: Op) -> None:
        source, target = (self.value(v) for v in _operands(op.text)[:2])
        self.use(source, op.name)
        self.write(target, "a store")

    # -- copies

    def on_ttng_init_barrier(self, op: Op) -> None:
        self.barriers[self.value(_operands(op.text)[0])] = Barrier()

    def on_ttng_inval_barrier(self, op: Op) -> None:
        self.barriers.pop(self.value(_operands(op.text)[0]), None)

    def on_ttng_barrier_expect(self, op: Op) -> None:
        barrier, *_, predicate = _operands(op.text)
        if self.integer(predicate, "the predicate") and self.barriers[self.value(barrier)].pending:
            self.report("a barrier expects a second copy before the first has been waited for")

    def on_ttng_async_tma_copy_global_to_local(self, op: Op) -> None:
        target, barrier, predicate = _operands(re.sub(r"^ %\S+\[[^\]]*\]", "", op.text))[:3]
        if not self.integer(predicate, "the predicate"):
            return
        slot = self.value(target)
        self.write(slot, "a TMA copy")
        self.loading.add(slot)
        self.barriers[self.value(barrier)].pending.append(slot)

    def on_ttng_wait_barrier(self, op: Op) -> None:
        name, parity, *rest = _operands(op.text.split(" deps ")[0])
        if rest and not self.integer(rest[0], "the predicate"):
            return
        barrier = self.barriers[self.value(name)]
        if barrier.pending:
            self.loading.difference_update(barrier.pending)
            barrier.pending.clear()
            barrier.phase ^= 1
        if barrier.phase == self.integer(parity, "the phase"):
            self.report("a wait for a barrier phase that no copy completes")

    def on_ttg_async_copy_global_to_local(self, op: Op) -> None:
        slot = self.value(_operands(op.text)[1])
        self.write(slot, "an asynchronous copy")
        self.loading.add(slot)
        self.copies.append(slot)
        self.define(op, OPAQUE)

    def on_ttg_async_commit_group(self, op: Op) -> None:
        self.groups.append(self.copies)
        self.copies = []
        self.define(op, OPAQUE)

    def on_ttg_async_wait(self, op: Op) -> None:
        left = int(re.search(r"num = (\d+)", op.text).group(1))
        done, self.groups = self.groups[: len(self.groups) - left], self.groups[len(self.groups) - left :]
        for group in done:
            self.loading.difference_update(group)
        self.define(op, OPAQUE)

    def on_ttng_async_tma_copy_local_to_global(self, op: Op) -> None:
        self.stores.append(self.value(_operands(re.sub(r"^ %\S+\[[^\]]*\]", "", op.text))[0]))

    def on_ttng_async_tma_store_wait(self, op: Op) -> None:
        left = int(re.search(r"pendings = (\d+)", op.text).group(1))
        self.stores = self.stores[len(self.stores) - left :] if left else []

    # -- products

    def on_ttng_warp_group_dot(self, op: Op) -> None:
        left, right = _operands(op.text)[:2]
        slots = [s for s in (self.value(left), self.value(right)) if isinstance(s, Slot)]
        for slot in slots:
            self.read(slot, "a matrix product")
        self.serial += 1
        in_body = bool(self.loops) and left in self.loops[-1]
        product = Product(self.serial, tuple(slots), in_body and not isinstance(self.value(left), Slot))
        if "isAsync = true" in op.text:
            self.in_flight.append(product)
        self.define(op, product)

    def on_ttng_warp_group_dot_wait(self, op: Op) -> None:
        pendings = int(re.search(r"pendings = (\d+)", op.text).group(1))
        values = [self.value(v) for v in _operands(op.text)]
        if len(self.in_flight) > pendings:
            self.retire(pendings)
        self.define(op, *values)


def check(ttgir: str, values: dict[str, int], *, programs: int = 1) -> list[str]:
    """Violations that program 0 of `programs` commits for these integer arguments; empty if there are none.

    Raises:
        UnsupportedIR: for control flow that depends on data, and for operations of other architectures.
    """
    names, body = parse(ttgir)
    unknown = set(values) - {n[1:] for n in names}
    if unknown:
        raise ValueError(f"the kernel has no argument {', '.join(sorted(unknown))}; it has {', '.join(names)}")
    machine = Machine(values, 0, programs)
    machine.run(body)
    return list(machine.violations)


def lower(case: Any, arch: int = 90) -> str:
    """TTGIR of a CompileCase, without the later and slower stages of the compiler."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    from recsys_norm.kernels.compile import _source

    source, target = _source(case), GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    options = backend.parse_options(dict(case.options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Callable] = {}
    backend.add_stages(stages, options, source.language)
    generators = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, generators, backend.get_module_map(), context)
    metadata: dict[str, Any] = {}
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    return str(module)


def check_case(case: Any, steps: Iterable[int] = (1, 2, 3, 7)) -> list[str]:
    """Violations of one case on Hopper. Row counts are M = 643; every other integer argument is 128 times a number of
    steps that walks the loops through the first, a middle and the last round of their slots."""
    text = lower(case)
    integers = [name for name, kind in case.args.items() if isinstance(kind, str) and kind.split(":")[0] == "i32"]
    found: dict[str, None] = {}
    for count in steps:
        values = {name: 643 if name == "M" else 128 * count for name in integers}
        found.update(dict.fromkeys(check(text, values, programs=2)))
    return list(found)


def run_checks(module: str) -> list[dict[str, Any]]:
    """`main` in a process of its own, without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "recsys_norm.kernels.race_check", module]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recsys_norm.kernels.race_check", description=__doc__.splitlines()[0])
    parser.add_argument("module", help="module with race_cases(arch), e.g. recsys_norm.kernels.lazy.cases")
    for case in importlib.import_module(parser.parse_args(argv).module).race_cases(90):
        row = {"kernel": case.kernel, "label": case.label, "violations": check_case(case)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
