"""For every test: NaN in memory that nobody wrote, the same seeds, and the global switches of torch put back.

`--ratios FILE` counts the comparisons of the tolerance rule and writes the worst error / allowed of each test.
"""

import json
import math
import os
import random

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter, which is chosen when triton is first imported: torchrec imports it too.
    os.environ.setdefault("TRITON_INTERPRET", "1")

THREADS = int(os.environ.get("OMP_NUM_THREADS", min(2, os.cpu_count() or 1)))


def pytest_addoption(parser):
    parser.addoption("--ratios", metavar="FILE", help="write the worst error / allowed of each test as JSON")


def pytest_configure(config):
    if config.getoption("--ratios") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Ratios(config.getoption("--ratios")))
    torch.set_num_threads(THREADS)
    # Deterministic mode is on only for the NaN fill, so what it says about single operators is noise.
    config.addinivalue_line("filterwarnings", "ignore:.*[dD]eterministic:UserWarning")


def pytest_collection_modifyitems(config, items):
    """With `-n ... --dist loadgroup` the tests of 2^31 values, which want tens of GB each, run in one process."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.name.startswith("test_a6"):
                item.add_marker(pytest.mark.xdist_group("memory"))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty and its kin return NaN (the largest value for integers), so a read of an unwritten element shows."""
    mode, fill = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode(mode)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture(autouse=True)
def same_seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def restored_switches():
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def recorded_ratios(request, monkeypatch):
    """What the tolerance rule measured in this test, whether it passed or not, as a property of the test's report."""
    if not request.config.getoption("--ratios"):
        yield
        return
    from recsys_norm import testing

    found, plain = [], testing.Closeness

    def recording(*fields):
        found.append(plain(*fields))
        return found[-1]

    monkeypatch.setattr(testing, "Closeness", recording)
    yield
    if found:
        worst = max(found, key=lambda c: math.inf if math.isnan(c.ratio) else c.ratio)
        ops = sum(c.name.endswith(" output 0") for c in found)  # one per check_op
        summary = {"ops": ops, "comparisons": len(found), "worst": worst.ratio, "tensor": worst.name}
        summary |= {"error": worst.error, "unfused": worst.unfused_error, "allowed": worst.allowed}
        request.node.user_properties.append(("ratios", summary))


class Ratios:
    """Collects those properties where all reports arrive, also from the processes of pytest-xdist."""

    def __init__(self, file):
        self.file, self.found = file, {}

    def pytest_runtest_logreport(self, report):
        summary = dict(report.user_properties).get("ratios")
        if report.when == "teardown" and summary:
            self.found[report.nodeid] = summary

    def pytest_terminal_summary(self, terminalreporter):
        found = dict(sorted(self.found.items(), key=lambda item: -item[1]["worst"]))
        with open(self.file, "w") as file:
            json.dump(found, file, indent=1)
        if found:
            ops, comparisons = (sum(f[key] for f in found.values()) for key in ("ops", "comparisons"))
            test, worst = next(iter(found.items()))
            terminalreporter.write_line(
                f"{ops} ops, {comparisons} comparisons in {len(found)} tests; worst error / allowed {worst['worst']:.3f}: "
                f"{worst['tensor']} in {test}"
            )
