"""Compile Triton kernels for a GPU that is not there, and say what they cost: registers, spills, shared memory.

A kernel package lists what it ships as `compile_cases(arch)`, in a module of its own, e.g. `kernels/gdpa/cases.py`:

    def compile_cases(arch):
        yield CompileCase("gdpa.forward", "bf16 d128", my_kernel, {"x_ptr": "*bf16:16", "rows": "i32", "BLOCK": 64},
                          {"num_warps": 4, "num_stages": 2})

and each kernel's architectures in the text file `ARCHS`. Then

    python -m recsys_norm.kernels.compile recsys_norm.kernels.gdpa.cases [--arch 90] [--only gdpa.forward]

prints one JSON object per case and architecture. It must run in a process without TRITON_INTERPRET, which turns
`@triton.jit` functions into Python; a test that runs kernels in the interpreter calls `run_checks`, which starts such a
process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ARCHS_FILE = Path(__file__).with_name("ARCHS")

# Shared memory one block may use, in bytes, by architecture (CUDA programming guide, compute capabilities table).
MAX_SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


@dataclass(frozen=True)
class CompileCase:
    """One kernel with the values of its constexpr parameters and the types of the others.

    `args` has an entry per parameter: for a constexpr its value, else a Triton type name ("*bf16", "i32", "fp32"), with
    ":16" appended where the launch guarantees divisibility by 16. `options` are num_warps, num_stages, maxnreg...
    """

    kernel: str
    label: str
    function: Any = field(compare=False)
    args: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class CompileStats:
    """What the assembler reports for one kernel. Spills are bytes per thread; `serialized` is True where ptxas waits after
    every asynchronous matrix product ("wgmma instructions are serialized"), a silent loss of half the speed."""

    kernel: str
    label: str
    arch: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    serialized: bool

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that registers and shared memory let run together on one SM of this architecture."""
        by_registers = 65536 // (self.num_warps * 32 * max(8, -(-self.registers // 8) * 8))
        by_shared = (MAX_SHARED[self.arch] + 1024) // (self.shared_bytes + 1024)
        return min(by_registers, by_shared, 64 // self.num_warps)


def declared_architectures(path: Path = ARCHS_FILE) -> dict[str, tuple[int, ...]]:
    """Kernel name -> architectures, from the ARCHS file."""
    declared: dict[str, tuple[int, ...]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if words[0] in declared or len(words) < 2 or not all(w.isdigit() for w in words[1:]):
            raise ValueError(f"{path}:{number}: expected '<kernel> <arch> ...' once per kernel, got {line!r}")
        declared[words[0]] = tuple(int(w) for w in words[1:])
    return declared


def _source(case: CompileCase) -> Any:
    from triton.compiler import ASTSource

    if not hasattr(case.function, "params"):
        raise RuntimeError(
            f"{case.kernel} was imported with TRITON_INTERPRET=1 and cannot be compiled; "
            "compile it in a process without that variable (run_checks starts one)"
        )
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(case.function.params):
        if parameter.name not in case.args:
            raise ValueError(f"{case.kernel} ({case.label}): no type or value for parameter {parameter.name!r}")
        value = case.args[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name], _, divisible = value.partition(":")
        if divisible:
            attributes[(index,)] = [["tt.divisibility", int(divisible)]]
    unknown = set(case.args) - {p.name for p in case.function.params}
    if unknown:
        raise ValueError(f"{case.kernel} ({case.label}): it has no parameter {', '.join(sorted(unknown))}")
    return ASTSource(case.function, signature, constants, attributes)


def compile_case(case: CompileCase, arch: int) -> Any:
    """The compiled kernel; its `.asm` dict has ttir, ttgir, llir, ptx and cubin."""
    import triton
    from triton.backends.compiler import GPUTarget

    return triton.compile(_source(case), target=GPUTarget("cuda", arch, 32), options=dict(case.options))


def _assembler_report(ptx: str, arch: int) -> str:
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
    name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [tool.path, "-v", "--regAllocOptLevel=2", f"--gpu-name={name}", str(source), "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and "regAllocOptLevel" in done.stderr:  # ptxas before CUDA 13
            command.remove("--regAllocOptLevel=2")
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas failed for sm_{arch}: {done.stderr[-2000:]}")
        return done.stderr


def measure(case: CompileCase, arch: int) -> CompileStats:
    """Compile one case for `arch` and read what the assembler reports."""
    compiled = compile_case(case, arch)
    report = _assembler_report(compiled.asm["ptx"], arch)

    def number(pattern: str) -> int:
        found = re.findall(pattern, report)
        if not found:
            raise RuntimeError(f"ptxas report of {case.kernel} has no match for {pattern!r}: {report[-2000:]}")
        return sum(int(x) for x in found)

    return CompileStats(
        kernel=case.kernel,
        label=case.label,
        arch=arch,
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill (?:stores|loads)"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        serialized="instructions are serialized" in report,
    )


def measure_module(module: str, archs: Iterable[int] | None = None, only: str | None = None) -> Iterable[CompileStats]:
    """Stats of every case of a module with `compile_cases`, for the architectures that ARCHS declares."""
    cases = importlib.import_module(module).compile_cases
    declared = declared_architectures()
    wanted = sorted({a for known in declared.values() for a in known} if archs is None else archs)
    for arch in wanted:
        for case in cases(arch):
            if case.kernel not in declared:
                raise ValueError(f"{case.kernel} has a compile case and no line in {ARCHS_FILE.name}")
            if arch in declared[case.kernel] and (only is None or case.kernel == only):
                yield measure(case, arch)


def run_checks(module: str, *arguments: str) -> list[CompileStats]:
    """`measure_module` in a process of its own, without the interpreter; arguments as on the command line."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "recsys_norm.kernels.compile", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stderr[-4000:]}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [CompileStats(**{k: v for k, v in row.items() if k != "blocks_per_sm"}) for row in rows]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recsys_norm.kernels.compile", description=__doc__.splitlines()[0])
    parser.add_argument("module", help="module with compile_cases(arch), e.g. recsys_norm.kernels.gdpa.cases")
    parser.add_argument("--arch", type=int, action="append", help="only this architecture (may be repeated)")
    parser.add_argument("--only", help="only this kernel, e.g. gdpa.forward")
    arguments = parser.parse_args(argv)
    for stats in measure_module(arguments.module, arguments.arch, arguments.only):
        print(json.dumps({**asdict(stats), "blocks_per_sm": stats.blocks_per_sm}), flush=True)


if __name__ == "__main__":
    main()
