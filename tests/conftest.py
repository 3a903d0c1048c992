"""For every test: NaN in memory that nobody wrote, the same seeds, and the global switches of torch put back."""

import os
import random

import numpy as np
import pytest
import torch

THREADS = int(os.environ.get("OMP_NUM_THREADS", min(2, os.cpu_count() or 1)))


def pytest_configure(config):
    torch.set_num_threads(THREADS)
    # Deterministic mode is on only for the NaN fill, so what it says about single operators is noise.
    config.addinivalue_line("filterwarnings", "ignore:.*[dD]eterministic:UserWarning")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty and its kin return NaN (the largest value for integers), so a read of an unwritten element shows."""
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
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
