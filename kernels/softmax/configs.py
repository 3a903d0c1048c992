"""The softmax kernels' tiles and where they are chosen, by what was measured; elsewhere torch's flash attention runs."""

from __future__ import annotations

from recsys_norm.kernels.gdpa.configs import Config, family, padded_width

_MEASURED_ARCH = 90
_MEASURED_WIDTH = 128
_MEASURED_LENGTH = 4096
MOST_QUERIES = 64  # per sequence, of the backward for few queries, which holds them in one block
FIRST_QUERIES = 16  # of a sequence, with a number from the weights (queries.py): a matrix product has no fewer rows
# Of a backward: one per sequence and head, of very different lengths, so fewer leave multiprocessors idle.
_LEAST_PROGRAMS = 512


def tile(arch: int, d: int) -> Config:
    """The tile for head width d: small, so that three programs on an SM hide each other's exponentials and latencies."""
    if family(arch) == "small" or padded_width(d) == 256:
        return Config(64, 32, 4, 1 if family(arch) == "small" and padded_width(d) >= 128 else 2)
    return Config(64, 32, 4, 3)


def chosen(arch: int, d: int, max_q_len: int, max_k_len: int, masked: bool) -> bool:
    """Whether the kernel was measured to be faster than torch's flash attention: causal or windowed attention, and few
    queries that see all keys."""
    if arch != _MEASURED_ARCH or d != _MEASURED_WIDTH or max(max_q_len, max_k_len) > _MEASURED_LENGTH:
        return False
    return masked or max_q_len <= MOST_QUERIES


def few_queries_tile() -> Config:
    return Config(MOST_QUERIES, 64, 4, 2)


def queries_tile() -> Config:
    """For the numbers of each query, which memory limits: 64 rows of both tensors are on their way per program."""
    return Config(64, 64, 4, 1)


def first_queries_tile() -> Config:
    """For one number of each of a sequence's first queries: small programs, so that many of them wait for memory."""
    return Config(FIRST_QUERIES, FIRST_QUERIES, 2, 1)


def few_queries_chosen(arch: int, d: int, programs: int) -> bool:
    """Whether the backward for few queries was measured to be faster than torch's flash attention."""
    return arch == _MEASURED_ARCH and d == _MEASURED_WIDTH and programs >= _LEAST_PROGRAMS


def causal_backward_chosen(arch: int, pairs: int) -> bool:
    """Whether the causal backward on Hopper is chosen, for so many pairs of a sequence and a head, each one program's."""
    return arch == _MEASURED_ARCH and pairs >= _LEAST_PROGRAMS


def through_descriptors(arch: int, d: int) -> bool:
    """Whether the forward takes keys and values through tensor descriptors, where they allow it."""
    return arch == _MEASURED_ARCH and d == padded_width(d)
