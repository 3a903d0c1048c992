"""The Hopper backward of norm_attention without a GPU: what it refuses, its kernels, and what it hands to them."""

import dataclasses

import pytest
import torch

from recsys_norm.kernels.hopper import attention_backward, launch
from recsys_norm.ops.problem import AttentionSpec, Problem

SPEC = AttentionSpec(1024, 128, ("gelu_tanh",), False, 0.1, False, None, "layer", "q", "all_heads", "rms", True)
PROBLEM = Problem("norm_attention", "rms", 300, 512, 512, torch.bfloat16, torch.float32, 1e-5, H=4, d=128, affine=True,
                  training=True, device="cuda", arch=90, attention=SPEC)  # fmt: skip


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(launch, "_driver_version", lambda: 13000)
    launch.why_not.cache_clear()
    yield
    launch.why_not.cache_clear()


@pytest.mark.parametrize(
    "change,words",
    [
        ({}, None),
        (dict(H=8, dtype=torch.float16), None),
        (dict(dtype=torch.float32), "float32"),
        (dict(d=64), "these are 64"),
        (dict(H=9), "there are 9"),
        (dict(arch=80), "compute capability"),
        (dict(activation=("relu",)), "not relu"),
        (dict(activation=("gelu", "gelu", "gelu_tanh", "gelu")), "not gelu, gelu_tanh"),
        (dict(softmax=True), "not softmax"),
        (dict(causal=True), "causal=True"),
        (dict(max_k_len=129), "max_k_len is 129"),
        (dict(pre_norm_on="qk"), "of qk"),
        (dict(pre_norm_scope="head"), "(head)"),
        (dict(pre_norm=None, post_norm=None), None),
    ],
)
def test_what_it_refuses(change, words, driver):
    fields = {f.name for f in dataclasses.fields(AttentionSpec)}
    spec = dataclasses.replace(SPEC, **{n: v for n, v in change.items() if n in fields})
    problem = dataclasses.replace(PROBLEM, attention=spec, **{n: v for n, v in change.items() if n not in fields})
    reason = attention_backward.why_not(problem)
    assert reason is None if words is None else words in reason


def test_every_form_has_a_kernel():
    kernels = launch.manifest()["90"]["kernels"]
    for name in attention_backward.NAMES.values():
        for activation in attention_backward.ACTIVATIONS:
            assert kernels[f"attention_backward_{name}_{activation}"]["cluster"] == 1  # the launch sets the size
        assert f"attention_backward_finish_{name}" in kernels


def test_rows_that_tma_reads_as_they_lie():
    pair = torch.randn(5, 2, 4, 128).bfloat16()
    rows = attention_backward.as_rows(pair[:, 1])
    assert rows.data_ptr() == pair[:, 1].data_ptr() and rows.stride() == (1024, 1) and rows.shape == (5, 512)
    assert torch.equal(rows, pair[:, 1].flatten(1))
    swapped = pair[:, 1].transpose(1, 2).contiguous().transpose(1, 2)
    for view in (swapped, pair[:, 0, :, 1:65], pair[:1, 0].expand(5, -1, -1)):
        rows = attention_backward.as_rows(view)
        assert torch.equal(rows, view.flatten(1)) and rows.stride(0) >= rows.shape[1]


def test_offsets_as_words():
    for dtype, step in ((torch.int32, 1), (torch.int64, 2)):
        words, found = attention_backward._words(torch.tensor([0, 3, 7], dtype=dtype))
        assert found == step and words[::step].tolist() == [0, 3, 7]
