"""The processes of `bench ops`: some that compile ahead side by side, then fresh ones that measure one after another.

All measuring processes start at once and compile what torch.compile keeps in memory; the first also checks every
candidate against fp64. Then each is told to measure, while the others wait. They speak in JSON lines:

    process   {"verdict": ...} ...  {"ready": ...}                {"self_test": ...}  {"record": ...} ...  {"done": ...}
    parent                                         {"go": ...}

Every record is written to a file as it arrives, so that a run that is cut keeps what it measured.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from recsys_norm import env
from recsys_norm.bench import ops as bench
from recsys_norm.bench.cases import Case


def case_fields(case: Case) -> dict:
    return asdict(case) | {"dtype": str(case.dtype).removeprefix("torch.")}


def case_of(fields: dict) -> Case:
    import torch

    return Case(**fields | {"dtype": getattr(torch, fields["dtype"])})


def command(mode: str, cases: list[Case], settings: dict) -> list[str]:
    """Of one process: "compile" ahead and end, "check" and measure, or "measure"."""
    options = {"mode": mode, "cases": [case_fields(c) for c in cases], **settings}
    return [sys.executable, "-m", "recsys_norm.bench", "ops", "--child", json.dumps(options)]


def child(options: dict) -> None:
    """What such a process does."""
    import torch

    from recsys_norm.bench.cases import compile_per_shape

    compile_per_shape()
    cases = [case_of(fields) for fields in options["cases"]]
    directions, techniques = options["directions"], options["techniques"]
    for index, case in enumerate(cases):
        if options["mode"] == "check":
            try:
                found = bench.check_case(case, directions, techniques)
            except Exception as error:  # out of memory, most likely: the other cases are still worth measuring
                print(f"{case} is left out: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                found = {}
            _say(verdict={"case": index, "found": found})
            torch.cuda.empty_cache()
        bench.compile_case(case, directions, techniques if options["mode"] == "compile" else [])
        torch.cuda.empty_cache()
    if options["mode"] == "compile":
        return
    _say(ready=True)
    _measure(cases, directions, techniques, json.loads(sys.stdin.readline())["go"])
    _say(done=True)


def _measure(cases: list[Case], directions: list[str], techniques: list[str] | None, go: dict) -> None:
    import torch

    from recsys_norm.bench.timing import Stopwatch

    watch = Stopwatch(seed=go["seed"])
    _say(self_test=watch.self_test())
    for index, case in enumerate(cases):
        if time.time() > go["until"]:
            return
        verdicts = {label: found for label, found in go["verdicts"][index].items() if label not in go["without"]}
        for record in bench.time_case(case, directions, verdicts, go["launches"], watch, techniques):
            _say(record=record)
        torch.cuda.empty_cache()


def _say(**message) -> None:
    print(json.dumps(message), flush=True)


class Failed(RuntimeError):
    """A process of the bench ended before its work did."""


class Process:
    """A measuring process, seen from the parent."""

    def __init__(self, arguments: list[str]):
        self._child = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def until(self, last: str):
        """Messages up to and without the one named `last`."""
        for line in self._child.stdout:
            if line.startswith("{"):
                message = json.loads(line)
                if last in message:
                    return
                yield message
        raise Failed(f"a process of the bench ended with exit status {self._child.wait()}; see its messages above")

    def go(self, **fields) -> None:
        with contextlib.suppress(BrokenPipeError):  # a process that has died is noticed by `until`
            self._child.stdin.write(json.dumps({"go": fields}) + "\n")
            self._child.stdin.flush()

    def end(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()


def compile_ahead(cases: list[Case], settings: dict, jobs: int) -> None:
    """Run every case once in `jobs` processes side by side, so that the compilers' caches on disk are full. Cases of one
    norm and shape share kernels and go to one process."""
    groups: dict[tuple, list[Case]] = {}
    for case in cases:
        groups.setdefault((case.norm, case.K, case.N), []).append(case)
    parts = [sum(list(groups.values())[job::jobs], []) for job in range(min(jobs, len(groups)))]
    children = [subprocess.Popen(command("compile", part, settings), stdout=subprocess.DEVNULL) for part in parts]
    for process in children:
        if process.wait() != 0:
            raise Failed(f"a process that compiles ahead ended with exit status {process.returncode}; see above")


def run(
    cases: list[Case],
    settings: dict,
    launches: int,
    runs: int,
    journal: Path,
    time_limit: float | None = None,
    retune: Callable[[list[dict], dict], None] | None = None,
    command: Callable[[str, list[Case], dict], list[str]] = command,
) -> dict:
    """Measure in `runs` fresh processes. Returns {"env": ..., "self_test": [...], "records": [...]}.

    Args:
        settings: `directions`, and `techniques` to time beside the backends (None: all).
        launches: of each candidate near the fastest, over all runs.
        journal: file that gets every record as it arrives, one JSON object a line.
        time_limit: seconds from now after which no further case begins; the processes that are still to come share
            what is left.
        retune: called with the first process' winners and the environment; the later ones then time the new choice.
    """
    start = time.time()
    until = start + (1e9 if time_limit is None else time_limit)

    def note(what: str) -> None:
        print(f"{time.time() - start:.0f} s: {what}", file=sys.stderr, flush=True)

    processes = [Process(command("measure" if seed else "check", cases, settings)) for seed in range(runs)]
    results: list[list[dict]] = []
    self_tests: list[float] = []
    failed: Failed | None = None
    environment = env.record()
    try:
        verdicts = [m["verdict"]["found"] for m in processes[0].until("ready")]
        note(f"{len(verdicts)} cases checked")
        for process in processes[1:]:
            list(process.until("ready"))
        with journal.open("w") as file:
            for seed, process in enumerate(processes):
                without = ["fused"] if retune and not seed and runs > 1 else []
                end = time.time() + (until - time.time()) / (runs - seed)
                process.go(seed=seed, launches=-(-launches // runs), verdicts=verdicts, until=end, without=without)
                records: list[dict] = []
                try:
                    for message in process.until("done"):
                        if "self_test" in message:
                            self_tests.append(_trusted(message["self_test"]))
                        if "record" in message:
                            records.append(message["record"])
                            print(json.dumps({"process": seed, **message["record"]}), file=file, flush=True)
                except Failed as error:  # what the other processes measure stands
                    failed = error
                    note(str(error))
                if records:
                    results.append(records)
                process.end()
                note(f"process {seed} has measured {len(records)} records")
                if retune and not seed and results:
                    retune(bench.winners(bench.merge(results)), environment)
    finally:
        for process in processes:
            process.end()
    if failed is not None and not results:
        raise failed
    records = bench.merge(results)
    bench.add_errors_of_fused(records)
    bench.add_compiled(records)
    return {"env": environment, "self_test": self_tests, "records": records}


def _trusted(self_test: float) -> float:
    if not 0.9 <= self_test <= 1.1:
        raise Failed(
            f"the timer reads a kernel of known duration as {self_test:.2f} of it (0.9 to 1.1 is accepted): "
            "the GPU is shared or throttled; nothing is reported"
        )
    return self_test
