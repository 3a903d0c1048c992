"""Models of other projects' kinds, written without this one, that `convert` is measured on.

Shape legend: B rows of a batch, S tokens of a row, D width, H heads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Self-attention with one linear for q, k and v, as vision transformers have it."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class PreNormBlock(nn.Module):
    """x + attention(norm(x)); x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, norm: type[nn.Module] = nn.LayerNorm):
        super().__init__()
        self.norm1, self.attn, self.norm2 = norm(width), Attention(width, heads), norm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D]
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class HSTUBlock(nn.Module):
    """x + W_o(u * norm(silu(q k^T / S) v)) with u, v, q, k = silu(norm(x) W^T), causal."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_in, self.uvqk = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.norm_out, self.out = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, D]
        u, v, q, k = F.silu(self.uvqk(self.norm_in(x))).chunk(4, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        scores = F.silu(q @ k.mT) / x.shape[1]
        o = (scores.tril() @ v).transpose(1, 2).flatten(2)
        return x + self.out(u * self.norm_out(o))


class DLRM(nn.Module):
    """A DLRM whose towers normalise between their linears. `tables`: pooled embeddings, a KeyedTensor from a
    KeyedJaggedTensor."""

    def __init__(self, tables: nn.Module, features: int, dim: int, dense: int, width: int):
        super().__init__()
        self.tables = tables
        self.bottom = tower(dense, width // 2, dim)
        self.top = nn.Sequential(*tower(dim + (features + 1) * features // 2, width, width, width // 2), nn.SiLU())
        self.head = nn.Linear(width // 2, 1)
        self.register_buffer("pairs", torch.triu_indices(features + 1, features + 1, offset=1))

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:  # [B, dense], B bags of each feature
        x = self.bottom(dense)
        pooled = self.pooled(sparse).to(x.dtype)
        tokens = torch.cat([x[:, None], pooled.unflatten(1, (-1, x.shape[1]))], 1)
        products = torch.bmm(tokens, tokens.mT)[:, self.pairs[0], self.pairs[1]]
        return self.head(self.top(torch.cat([x, products], 1)))

    @torch.compiler.disable  # a lookup that trains reads its step number, which breaks the graph anyway
    def pooled(self, sparse: Any) -> Tensor:
        return self.tables(sparse).values()


def tower(*widths: int) -> nn.Sequential:
    """linear -> norm -> SiLU -> linear ... from the first width to the last. Not ReLU: at its kink two right results in bf16
    have different gradients."""
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:]):
        layers += [nn.Linear(before, after), nn.LayerNorm(after), nn.SiLU()]
    return nn.Sequential(*layers[:-2])


@dataclass(frozen=True)
class Size:
    """Of all kinds: `rows` per batch (of the DLRM `rows * length`), `length` tokens per row, layers deep."""

    rows: int
    length: int
    width: int
    layers: int
    head_width: int = 64
    table_rows: int = 100_000

    @property
    def heads(self) -> int:
        return self.width // self.head_width


def _tokens(size: Size, rows: int, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    return (torch.randn(rows, size.length, size.width, device=device, dtype=dtype),)


def encoder(size: Size, norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        size.width, size.heads, 4 * size.width, 0.0, "gelu", batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, size.layers, nn.LayerNorm(size.width), enable_nested_tensor=False)


FEATURES, DENSE, IDS = 26, 13, 2  # as in Criteo's logs; ids per bag


def dlrm(size: Size, fused_tables: bool = False) -> nn.Module:
    """With `fused_tables` the tables train inside their backward, as TorchRec does on GPUs; without, autograd has their
    gradients."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    dim = size.width // 8
    tables = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=size.table_rows, feature_names=[f"f{i}"])
        for i in range(FEATURES)
    ]
    if fused_tables:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: F401  (registers the lookups)
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        bags = FusedEmbeddingBagCollection(tables, RowWiseAdagrad, {"lr": 0.01}, device=device)
    else:
        bags = EmbeddingBagCollection(tables=tables)
    return DLRM(bags, FEATURES, dim, DENSE, size.width)


def _bags(size: Size, rows: int, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    from torchrec import KeyedJaggedTensor

    bags = FEATURES * rows * size.length
    sparse = KeyedJaggedTensor(
        keys=[f"f{i}" for i in range(FEATURES)],
        values=torch.randint(0, size.table_rows, (bags * IDS,)),
        lengths=torch.full((bags,), IDS, dtype=torch.int64),
    )
    return torch.randn(rows * size.length, DENSE, device=device, dtype=dtype), sparse.to(torch.device(device))


@dataclass(frozen=True)
class Kind:
    """How a model is made and what it is called with: `inputs(size, rows, device, dtype)`, the first a tensor, which is
    differentiated, too, if it is what a layer before would give."""

    build: Callable[[Size], nn.Module]
    inputs: Callable[[Size, int, str, torch.dtype], tuple[Any, ...]]
    size: Size
    inner: bool = True


KINDS = {
    "encoder pre-norm": Kind(lambda size: encoder(size, True), _tokens, Size(512, 256, 512, 2)),
    "encoder post-norm": Kind(lambda size: encoder(size, False), _tokens, Size(512, 256, 512, 2)),
    "dlrm": Kind(dlrm, _bags, Size(256, 256, 1024, 1), inner=False),
    "hstu": Kind(
        lambda size: nn.Sequential(*(HSTUBlock(size.width, size.heads) for _ in range(size.layers))),
        _tokens,
        Size(512, 256, 512, 2, head_width=128),
    ),
    "pre-norm block": Kind(
        lambda size: nn.Sequential(*(PreNormBlock(size.width, size.heads) for _ in range(size.layers))),
        _tokens,
        Size(512, 197, 768, 2),
    ),
    "pre-norm block rms": Kind(
        lambda size: nn.Sequential(*(PreNormBlock(size.width, size.heads, nn.RMSNorm) for _ in range(size.layers))),
        _tokens,
        Size(512, 256, 512, 2),
    ),
}


def _timm(size: Size) -> nn.Module:
    timm = importlib.import_module("timm")  # where it is installed: no dependency of the package
    sizes = dict(depth=size.layers, embed_dim=size.width, num_heads=size.heads)
    return timm.create_model("vit_base_patch16_224", **sizes)


def _images(size: Size, rows: int, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    return (torch.randn(rows, 3, 224, 224, device=device, dtype=dtype),)


# As they come out of a library, where it is installed.
LIBRARY_KINDS = {"timm ViT-B": Kind(_timm, _images, Size(512, 197, 768, 2), inner=False)}
SMALL = Size(2, 24, 64, 2, head_width=16, table_rows=50)  # for tests of all kinds without a GPU
