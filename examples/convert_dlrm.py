"""Put fused norms into a TorchRec model that was written without them, and compare the time of a training step.

Run: python examples/convert_dlrm.py
"""

import statistics
import time

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import recsys_norm


class NormalizedDLRM(nn.Module):
    """A DLRM whose towers normalise between their linears, as many production models do."""

    def __init__(self, features: int = 4, rows: int = 1000, dim: int = 32, dense: int = 13, width: int = 128):
        super().__init__()
        names = [f"f{i}" for i in range(features)]
        tables = [
            EmbeddingBagConfig(name=f"t_{n}", embedding_dim=dim, num_embeddings=rows, feature_names=[n]) for n in names
        ]
        self.tables = EmbeddingBagCollection(tables=tables)
        self.bottom = nn.Sequential(nn.Linear(dense, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, dim))
        pairs = (features + 1) * features // 2
        self.top = nn.Sequential(nn.LayerNorm(dim + pairs), nn.Linear(dim + pairs, width), nn.RMSNorm(width), nn.SiLU(),
                                 nn.Linear(width, 1))  # fmt: skip
        self.register_buffer("upper", torch.triu_indices(features + 1, features + 1, offset=1))

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        tokens = torch.cat([x[:, None], self.tables(sparse).values().unflatten(1, (-1, x.shape[1]))], 1)
        products = torch.bmm(tokens, tokens.mT)[:, self.upper[0], self.upper[1]]
        return self.top(torch.cat([x, products], 1)).squeeze(1)


def batch(rows: int, features: int = 4, device: str = "cpu"):
    lengths = torch.randint(0, 4, (features * rows,))
    values = torch.randint(0, 1000, (int(lengths.sum()),))
    sparse = KeyedJaggedTensor(keys=[f"f{i}" for i in range(features)], values=values, lengths=lengths)
    return (
        torch.randn(rows, 13, device=device),
        sparse.to(torch.device(device)),
        torch.randint(0, 2, (rows,)).float().to(device),
    )


def step_ms(model: nn.Module, data, repeats: int) -> float:
    dense, sparse, label = data
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), label).backward()
        if dense.is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[repeats // 3 :])


def main(rows: int = 4096, repeats: int = 12):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, data = NormalizedDLRM().to(device), batch(rows, device=device)
    before, expected = step_ms(model, data, repeats), model(*data[:2]).detach()
    report = recsys_norm.convert(model)  # in place; parameters and state_dict keys stay
    after, found = step_ms(model, data, repeats), model(*data[:2]).detach()
    return report, before, after, float((found - expected).abs().max())


if __name__ == "__main__":
    report, before, after, difference = main()
    print(f"{report}\nstep {before:.2f} ms -> {after:.2f} ms, largest difference of a logit {difference:.1e}")
