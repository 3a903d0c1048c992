"""The race check finds the race it was written for, and none in what ships."""

import os
from pathlib import Path

import pytest

from recsys_norm.kernels.race_check import UnsupportedIR, check, run_checks

LOOP = """
module {
  tt.func public @k(%x: !tt.tensordesc<tensor<64x64xbf16>>, %K: i32) attributes {noinline = false} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %true = arith.constant true
    %acc = arith.constant dense<0.000000e+00> : tensor<64x64xf32>
    %buf = ttg.local_alloc : () -> !ttg.memdesc<1x64x64xbf16>
    %bar = ttg.local_alloc : () -> !ttg.memdesc<1x1xi64>
    %b = ttg.memdesc_index %bar[%c0] : !ttg.memdesc<1x1xi64> -> !ttg.memdesc<1xi64>
    %s = ttg.memdesc_index %buf[%c0] : !ttg.memdesc<1x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
    ttng.init_barrier %b, 1 : !ttg.memdesc<1xi64>
    %out = scf.for %k = %c0 to %K step %c1 iter_args(%a = %acc) -> (tensor<64x64xf32>)  : i32 {
      ttng.barrier_expect %b, 8192, %true : !ttg.memdesc<1xi64>
      ttng.async_tma_copy_global_to_local %x[%k, %c0] %s, %b, %true : !tt.tensordesc<tensor<64x64xbf16>>
      %p = arith.andi %k, %c1 : i32
      WAIT
      %d = ttng.warp_group_dot LEFT, %s, %a {isAsync = true} : !ttg.memdesc<64x64xbf16>
      %w = ttng.warp_group_dot_wait %d {pendings = PENDING : i32} : tensor<64x64xf32>
      scf.yield %w : tensor<64x64xf32>
    }
    tt.return
  }
}
"""
WAIT = "ttng.wait_barrier %b, %p : !ttg.memdesc<1xi64>"


def loop(wait=WAIT, left="%s", pending=0):
    if left == "%r":
        wait += "\n      %r = ttg.local_load %s : !ttg.memdesc<64x64xbf16> -> tensor<64x64xbf16>"
    return LOOP.replace("WAIT", wait).replace("LEFT", left).replace("PENDING", str(pending))


@pytest.mark.parametrize(
    "text,complaint",
    [
        (loop(), None),
        (loop(pending=1), "refills %buf while an asynchronous product reads it"),
        (loop(wait=""), "reads %buf before its copy has been waited for"),
        (loop(left="%r"), None),
        (loop(left="%r", pending=1), "left operand is in registers is in flight across the end of a loop body"),
        (loop(wait=WAIT.replace("%p", "%c1")), "phase that no copy completes"),
    ],
)
def test_what_it_reports(text, complaint):
    violations = check(text, {"K": 5})
    assert (violations == []) if complaint is None else any(complaint in v for v in violations), violations


def test_unknown_sizes_are_an_error():
    with pytest.raises(UnsupportedIR, match="%K is not a known integer"):
        check(loop(), {})
    with pytest.raises(ValueError, match="no argument Q"):
        check(loop(), {"Q": 1})


def test_the_known_race_is_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    rows = run_checks("racy")
    assert len(rows) == 6
    for row in rows:
        assert any("refills" in v and "asynchronous product reads it" in v for v in row["violations"]), row


@pytest.mark.parametrize("package", ["lazy", "postnorm"])
def test_shipped_configurations_are_free_of_races(package):
    rows = run_checks(f"recsys_norm.kernels.{package}.cases")
    assert len(rows) >= 8
    assert [row for row in rows if row["violations"]] == []
