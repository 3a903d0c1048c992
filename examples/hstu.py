"""An HSTU-style sequential recommender on jagged histories: next-item prediction with pointwise attention.

    u, v, q, k = silu(norm(x) W^T);   o = norm(silu(q k^T / L) v);   x <- x + (u * o) W_o^T

Run: python examples/hstu.py
"""

import torch
from torch import nn

from recsys_norm.nn import NormAttention, NormLinear

HOW = dict(backend="fused", on_unsupported="fallback")


class HSTULayer(nn.Module):
    def __init__(self, width: int, heads: int, max_len: int):
        super().__init__()
        self.heads, self.max_len = heads, max_len
        self.uvqk = NormLinear(width, 4 * width, norm="layer", **HOW)
        # silu attention over all heads' keys, then a norm over all heads
        self.attention = NormAttention(heads, width // heads, activation="silu", scale=1 / max_len, causal=True,
                                       post_norm="layer", **HOW)  # fmt: skip
        self.out = nn.Linear(width, width)

    def forward(self, x, offsets):
        u, v, q, k = nn.functional.silu(self.uvqk(x)).unflatten(1, (4, self.heads, -1)).unbind(1)
        o = self.attention(q, k, v, offsets, offsets, max_q_len=self.max_len, max_k_len=self.max_len, packed=True)
        return x + self.out((u * o).flatten(1))


class Recommender(nn.Module):
    def __init__(self, items: int = 50, width: int = 32, heads: int = 2, layers: int = 2, max_len: int = 20):
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.layers = nn.ModuleList(HSTULayer(width, heads, max_len) for _ in range(layers))
        self.head = NormLinear(width, items, norm="rms", **HOW)

    def forward(self, ids, offsets):
        x = self.items(ids)
        for layer in self.layers:
            x = layer(x, offsets)
        return self.head(x)


def histories(rows: int, items: int = 50, device: str = "cpu"):
    """Each user walks through the items with a step of their own; the next item follows from any two before it."""
    lengths = torch.randint(3, 20, (rows,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    position = torch.cat([torch.arange(n) for n in lengths])
    row = torch.arange(rows).repeat_interleave(lengths)
    start, stride = torch.randint(items, (rows,))[row], torch.randint(1, 4, (rows,))[row]
    ids, following = (start + position * stride) % items, (start + (position + 1) * stride) % items
    return ids.to(device), following.to(device), offsets.to(device), position.to(device)


def main(steps: int = 60) -> tuple[float, float]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Recommender().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        ids, following, offsets, position = histories(64, device=device)
        known = position > 0  # the first item tells nothing about the stride
        loss = nn.functional.cross_entropy(model(ids, offsets)[known], following[known])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses[0], sum(losses[-5:]) / 5


if __name__ == "__main__":
    print("loss {:.3f} -> {:.3f}".format(*main()))
