"""Export a trained model with torch.export, and run the same checkpoint with unfused ops.

The state_dict does not depend on the backend: what was trained with fused kernels on a GPU serves on a CPU without them.

Run: python examples/export_model.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

from recsys_norm.nn import LinearNormLinear, NormLinear


class Scorer(nn.Module):
    def __init__(self, width: int = 32, **how):
        super().__init__()
        self.first = NormLinear(width, 64, norm="layer", **how)
        self.tower = LinearNormLinear(64, 64, 1, norm="rms", activation="silu", **how)

    def forward(self, x):
        return self.tower(self.first(x)).squeeze(1)


def main(folder: Path) -> float:
    """The largest difference between the exported fused model and the unfused one."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Scorer(backend="fused", on_unsupported="fallback").to(device)
    torch.save(model.state_dict(), folder / "scorer.pt")

    x = torch.randn(16, 32, device=device)
    rows = torch.export.Dim("rows", min=2, max=1 << 20)
    exported = torch.export.export(model.eval(), (x,), dynamic_shapes={"x": {0: rows}})
    torch.export.save(exported, folder / "scorer.pt2")

    unfused = Scorer(backend="unfused")
    unfused.load_state_dict(torch.load(folder / "scorer.pt", map_location="cpu"))
    # whoever loads the program imports recsys_norm.ops, which registers the ops that it calls
    program = torch.export.load(folder / "scorer.pt2").module()
    y = torch.randn(100, 32)
    with torch.no_grad():
        return float((program(y.to(device)).cpu() - unfused(y)).abs().max())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(f"largest difference {main(Path(folder)):.1e}")
