"""A pre-norm feed-forward block in plain PyTorch, with both norms inside the GEMMs.

    x + W2 gelu(LN(x) W1^T)   then   RMS(y W3^T + y)

Run: python examples/fused_block.py
"""

import torch
from torch import nn

from recsys_norm.nn import LinearNorm, NormLinear


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, **how):
        super().__init__()
        self.up = NormLinear(width, hidden, norm="layer", **how)  # LN(x) W1^T + b1 in one kernel
        self.down = nn.Linear(hidden, width)
        self.mix = LinearNorm(width, width, norm="rms", residual_position="before", **how)  # RMS(y W3^T + b3 + y)

    def forward(self, x):
        y = x + self.down(nn.functional.gelu(self.up(x)))
        return self.mix(y, residual=y)


def main(steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # "fallback": where no kernel can run (a CPU, for one), PyTorch serves the op, with one warning
    block = Block(64, 256, backend="fused", on_unsupported="fallback").to(device)
    optimizer = torch.optim.AdamW(block.parameters(), lr=3e-3)
    x = torch.randn(512, 64, device=device)
    target = torch.roll(x, 1, dims=1)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(block(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
