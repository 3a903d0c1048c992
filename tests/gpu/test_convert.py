"""Converted models on a GPU: outputs and every gradient by the tolerance rule, by the kernels and not their fallback."""

import warnings

import pytest
import torch

from recsys_norm.bench.convert import AFTER, COMPILED, Case, techniques_of
from recsys_norm.bench.convert_models import KINDS, Size

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZE = Size(8, 65, 256, 2, table_rows=500)  # an odd number of tokens


def made(name, **options):
    if name == "dlrm":
        pytest.importorskip("torchrec")
    return Case(KINDS[name], SIZE, **options)


CASES = [(name, torch.bfloat16) for name in KINDS]
CASES += [(name, torch.float32) for name in ("encoder post-norm", "pre-norm block rms")]


@pytest.mark.parametrize("name,dtype", CASES)
def test_outputs_and_gradients(name, dtype):
    case = made(name, dtype=dtype, on_unsupported="raise", min_elements=0)
    found = case.check()[AFTER]
    assert len(found) >= len(list(case.original.parameters()))
    served = techniques_of(case)
    assert served and not [t for by in served.values() for t in by if "(torch)" in t], served


@pytest.mark.parametrize("name", ["encoder post-norm", "pre-norm block rms"])
def test_through_torch_compile(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dynamo
        assert {COMPILED[AFTER]} <= set(made(name, compiled=True, min_elements=0).check())


def test_small_inputs_go_through_the_modules_as_they_were():
    case = made("encoder post-norm")
    assert not techniques_of(case)
    for (name, expected), found in zip(
        case.results(case.original, case.inputs).items(), case.results(case.candidates[AFTER], case.inputs).values()
    ):
        assert torch.equal(found, expected), name
