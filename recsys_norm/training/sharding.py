"""The embedding tables of a model under TorchRec's DistributedModelParallel, with their optimizer in the backward pass.

One process is sharded too (every table whole), so that a run on one device and a run on many are the same code.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys_norm.training.config import ConfigError, DistributedConfig, SparseOptimizerConfig
from recsys_norm.training.runtime import RunError, Runtime

_BLOCK = 65_536  # rows of a table that share a seed
_SHARDING = ("table_wise", "row_wise", "column_wise", "table_row_wise")
_RESERVED = 0.15  # of the device memory, for activations, before the planner places tables


def shard(
    sparse: nn.Module,
    optimizer: SparseOptimizerConfig,
    distributed: DistributedConfig,
    runtime: Runtime,
    *,
    batch_size: int,
    seed: int,
) -> nn.Module:
    """`sparse` (tables on the meta device) as a DistributedModelParallel with fused row-wise Adagrad.

    Initial values depend on the seed and the table's name alone, not on how the tables are placed.

    Raises:
        ConfigError: for a sharding type or table that does not exist.
        RunError: if the planner finds no place for the tables; every rank raises it.
    """
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim import RowWiseAdagrad

    initializers = dict(_initializers(sparse))
    settings = {"lr": optimizer.lr, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay}
    apply_optimizer_in_backward(RowWiseAdagrad, sparse.parameters(), settings)
    sharders = _sharders(runtime.device)
    plan = _plan(sparse, sharders, distributed, runtime, batch_size)
    parallel = DistributedModelParallel(
        sparse,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=runtime.device,
        plan=plan,
        sharders=sharders,
        init_data_parallel=False,  # there are no dense parameters beside the tables
    )
    for name, table in parallel.state_dict().items():
        for shard in table.local_shards():
            _initialize(shard.tensor, shard.metadata.shard_offsets, table.size(), name, seed, initializers[name])
    return parallel


def _sharders(device: torch.device) -> list:
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    class RowWiseOnCpu(EmbeddingBagCollectionSharder):
        """TorchRec offers row-wise pooled tables on CUDA only, though they run on CPU."""

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [*super().sharding_types(compute_device_type), "row_wise"]

    bags = EmbeddingBagCollectionSharder() if device.type == "cuda" else RowWiseOnCpu()
    return [bags, EmbeddingCollectionSharder()]


def _plan(sparse: nn.Module, sharders: list, distributed: DistributedConfig, runtime: Runtime, batch_size: int):
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import PlannerError

    local = int(os.environ.get("LOCAL_WORLD_SIZE", runtime.size))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(local, 1)
    device = runtime.device
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=runtime.size,
            local_world_size=local,
            compute_device=device.type,
            hbm_cap=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0,
            ddr_cap=memory,
        ),
        batch_size=batch_size,
        constraints=_constraints(sparse, distributed, runtime.size),
        storage_reservation=FixedPercentageStorageReservation(_RESERVED),
        debug=False,
    )
    try:
        return planner.plan(sparse, sharders)  # on every rank: collective_plan hangs where planning fails
    except PlannerError as error:
        reason = " ".join(str(error).split())
        raise RunError(
            f"the planner found no place for the embedding tables on {runtime.size} process(es): {reason}; "
            "use more processes, smaller tables, or other distributed.sharding types"
        ) from error


def _constraints(sparse: nn.Module, distributed: DistributedConfig, size: int) -> dict:
    from torchrec.distributed.planner.types import ParameterConstraints

    default = distributed.sharding or (["table_wise"] if size == 1 else ["table_wise", "row_wise"])
    tables = {name.split(".")[-2] for name, _ in sparse.named_parameters()}
    for table, types in {"": default, **distributed.tables}.items():
        key = f"distributed.tables.{table}" if table else "distributed.sharding"
        if table and table not in tables:
            raise ConfigError(f"{key}: there is no table {table!r}; the tables are {', '.join(sorted(tables))}")
        if unknown := sorted(set(types) - set(_SHARDING)):
            raise ConfigError(f"{key}: {unknown[0]!r} is not one of {', '.join(_SHARDING)}")
    return {
        table: ParameterConstraints(
            sharding_types=list(distributed.tables.get(table, default)), compute_kernels=["fused"]
        )
        for table in tables
    }


def _initializers(sparse: nn.Module) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """The name of each table in the sharded state_dict and the function that fills it."""
    from torchrec import EmbeddingBagCollection, EmbeddingCollection

    for name, module in sparse.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            yield from ((f"{name}.embedding_bags.{c.name}.weight", c.init_fn) for c in module.embedding_bag_configs())
        elif isinstance(module, EmbeddingCollection):
            yield from ((f"{name}.embeddings.{c.name}.weight", c.init_fn) for c in module.embedding_configs())


@torch.no_grad()
def _initialize(
    shard: Tensor, offsets: list[int], size: torch.Size, name: str, seed: int, fill: Callable[[Tensor], Tensor]
) -> None:
    """Fill the part of a table that starts at `offsets` as if the whole table had been filled block after block."""
    first, column = offsets if len(offsets) == 2 else (offsets[0], 0)
    last = first + shard.shape[0]
    devices = [shard.device] if shard.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for block in range(first // _BLOCK, -(-last // _BLOCK)):
            begin, end = block * _BLOCK, min((block + 1) * _BLOCK, size[0])
            torch.manual_seed(zlib.crc32(f"{seed}/{name}/{block}".encode()))
            rows = fill(torch.empty(end - begin, size[1], device=shard.device))
            low, high = max(begin, first), min(end, last)
            shard[low - first : high - first] = rows[low - begin : high - begin, column : column + shard.shape[1]]
