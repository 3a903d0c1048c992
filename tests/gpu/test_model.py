"""The whole model on the GPU: tokens that fill up a batch change no result, whatever lies in memory behind the sequences."""

import pytest
import torch
from model_cases import LENGTHS, make_batch, make_schema

from recsys_norm.models.config import EventConfig
from recsys_norm.testing import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("backend", ["unfused", "compiled", "fused"])
@pytest.mark.parametrize("lengths", [LENGTHS, {name: [0] * 5 for name in LENGTHS}])
def test_tokens_that_fill_up_change_nothing(backend, lengths):
    from model_cases import make_config

    from recsys_norm.models.kunlun import Kunlun

    schema = make_schema()
    batch = make_batch(schema, lengths).to("cuda")
    events = {"long": EventConfig(64, 2, 3, 3, max_len=6), "short": EventConfig(32, 1, 2, 2, max_len=4)}

    def results(multiple):
        torch.manual_seed(1)
        model = Kunlun(make_config(events=events), schema, backend=backend).cuda()
        model.dense.token_multiple = multiple
        garbage = torch.full((1 << 22,), float("nan"), device="cuda", dtype=torch.bfloat16)
        del garbage  # the allocator hands it out again
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(batch)
        logits.square().sum().backward()
        return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}

    expected = results(None)
    for name, got in results(64).items():
        assert torch.isfinite(got).all(), name
        assert relative_error(got, expected[name], rows=False) <= 3e-2, name
