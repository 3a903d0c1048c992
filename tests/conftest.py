"""For every test: NaN in memory that nobody wrote, the same seeds, and the global switches of torch put back."""

import os
import random

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter, which is chosen when triton is first imported: torchrec imports it too.
    os.environ.setdefault("TRITON_INTERPRET", "1")

THREADS = int(os.environ.get("OMP_NUM_THREADS", min(2, os.cpu_count() or 1)))


def pytest_configure(config):
    torch.set_num_threads(THREADS)
    # Deterministic mode is on only for the NaN fill, so what it says about single operators is noise.
    config.addinivalue_line("filterwarnings", "ignore:.*[dD]eterministic:UserWarning")


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
