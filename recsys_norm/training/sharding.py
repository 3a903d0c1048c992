"""The embedding tables of a model under TorchRec's DistributedModelParallel, with their optimizer in the backward pass.

One process is sharded too (every table whole), so that a run on one device and a run on many are the same code.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys_norm.training.config import ConfigError, DistributedConfig, SparseOptimizerConfig
from recsys_norm.training.runtime import RunError, Runtime

_BLOCK = 65_536  # rows of a table that share a seed
_SHARDING = ("table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel")
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

    Initial values depend on the seed and the table's name alone, not on how the tables are placed. Tables that are
    data_parallel have no fused optimizer, see `replicated`.

    Raises:
        ConfigError: for a sharding type or table that does not exist, or a type that cannot be had here.
        RunError: if the planner finds no place for the tables; every rank raises it.
    """
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
    from torchrec.distributed import DistributedModelParallel
    from torchrec.optim import RowWiseAdagrad

    initializers = dict(_initializers(sparse))
    settings = {"lr": optimizer.lr, "eps": optimizer.eps}
    apply_optimizer_in_backward(RowWiseAdagrad, sparse.parameters(), settings)
    sharders = _sharders(runtime.device, distributed.exchange)
    plan = _plan(sparse, sharders, distributed, runtime, batch_size)
    parallel = DistributedModelParallel(
        sparse,
        env=_environment(runtime.group or dist.group.WORLD),
        device=runtime.device,
        plan=plan,
        sharders=sharders,
        init_data_parallel=False,  # there are no dense parameters beside the tables
    )
    for name, table in parallel.state_dict().items():
        for tensor, offsets in local_parts(table):
            _initialize(tensor, offsets, table.size(), name, seed, initializers[name])
    return parallel


def _environment(group: dist.ProcessGroup) -> Any:
    from torchrec.distributed.types import ShardingEnv

    if group.size() == dist.get_world_size():
        return ShardingEnv.from_process_group(group)
    # TorchRec would make a device mesh of the group, which with NCCL takes all ranks. Only DTensors would need it.
    environment = ShardingEnv(group.size(), group.rank())
    environment.process_group = group
    return environment


def describe(parallel: nn.Module, runtime: Runtime) -> dict[str, dict[str, Any]]:
    """Per table: its size, how it is sharded, and the bytes of its weights on each rank. Call it on every rank."""
    tables = {}
    state, kinds = parallel.state_dict(), _sharding_types(parallel)
    for name, table in sorted(state.items()):
        tables[name] = {"size": list(table.size()), "sharding": kinds[name]}
    parts = {name: [tensor for tensor, _ in local_parts(table)] for name, table in state.items()}
    local = {name: sum(t.numel() * t.element_size() for t in tensors) for name, tensors in parts.items()}
    counts = torch.zeros(runtime.size, len(tables), dtype=torch.int64)
    counts[runtime.rank] = torch.tensor([local.get(name, 0) for name in tables])
    for entry, column in zip(tables.values(), runtime.sum(counts).T.tolist(), strict=True):
        entry["bytes_per_rank"] = column
    return tables


def _sharding_types(parallel: nn.Module) -> dict[str, str]:
    """By the name of the table in the sharded state_dict."""
    kinds = {}
    for module, plan in parallel.plan.plan.items():
        for name in parallel.state_dict():
            table = name.split(".")[-2]
            if name.startswith(f"{module}.") and table in plan:
                kinds[name] = plan[table].sharding_type
    return kinds


def local_parts(table: Any) -> Iterator[tuple[Tensor, list[int]]]:
    """(values, offsets) of the parts of a table on this rank; one whole part where it is replicated."""
    if hasattr(table, "local_shards"):
        yield from ((shard.tensor, shard.metadata.shard_offsets) for shard in table.local_shards())
    else:
        yield table, [0, 0]


def _sharders(device: torch.device, exchange: str) -> list:
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

    kind = CommType(exchange)
    codecs = get_qcomm_codecs_registry(QCommsConfig(kind, kind), device=device)  # None for fp32; fp16 for bf16 on a CPU

    def kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """On the device, with the optimizer in the backward wherever TorchRec can."""
        return ["dense" if sharding_type == "data_parallel" else "fused"]

    class Bags(EmbeddingBagCollectionSharder):
        compute_kernels = kernels

        def sharding_types(self, compute_device_type: str) -> list[str]:
            """TorchRec offers row-wise pooled tables on CUDA only, though they run on CPU."""
            return sorted({*super().sharding_types(compute_device_type), "row_wise"})

    class Sequences(EmbeddingCollectionSharder):
        compute_kernels = kernels

        def sharding_types(self, compute_device_type: str) -> list[str]:
            """TorchRec's replicated sequence tables fail on a CPU, in the lookup."""
            types = super().sharding_types(compute_device_type)
            return [name for name in types if compute_device_type != "cpu" or name != "data_parallel"]

    return [Bags(qcomm_codecs_registry=codecs), Sequences(qcomm_codecs_registry=codecs)]


def _plan(sparse: nn.Module, sharders: list, distributed: DistributedConfig, runtime: Runtime, batch_size: int):
    """The plan of rank 0, on every rank. TorchRec's `collective_plan` leaves the others waiting where it fails."""
    constraints = _constraints(sparse, distributed, runtime)
    plan = reason = None
    if runtime.main:
        try:
            plan = _planner(constraints, distributed.memory_gb, runtime, batch_size).plan(sparse, sharders)
        except Exception as error:  # PlannerError, or whatever else it stumbles over: the others have to hear of it
            reason = " ".join(str(error).split()) or type(error).__name__
    plan, reason = runtime.broadcast((plan, reason))
    if reason is not None:
        raise RunError(
            f"the planner found no place for the embedding tables on {runtime.size} process(es): {reason}; "
            "use more processes, smaller tables, other distributed.sharding types, or a higher distributed.memory_gb"
        )
    return plan


def _planner(constraints: dict, memory_gb: float | None, runtime: Runtime, batch_size: int):
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    local = int(os.environ.get("LOCAL_WORLD_SIZE", runtime.size)) if runtime.group is None else runtime.size
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // max(local, 1)
    device, limit = runtime.device, None if memory_gb is None else int(memory_gb * 1e9)
    hbm = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return EmbeddingShardingPlanner(
        topology=Topology(
            world_size=runtime.size,
            local_world_size=local,
            compute_device=device.type,
            hbm_cap=limit if limit is not None and device.type == "cuda" else hbm,
            ddr_cap=limit if limit is not None and device.type == "cpu" else host,
        ),
        batch_size=batch_size,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(_RESERVED),
        debug=False,
    )


def _constraints(sparse: nn.Module, distributed: DistributedConfig, runtime: Runtime) -> dict:
    from torchrec.distributed.planner.types import ParameterConstraints

    size = runtime.size
    default = distributed.sharding or (["table_wise"] if size == 1 else ["table_wise", "row_wise"])
    widths = {name.split(".")[-2]: parameter.shape[1] for name, parameter in sparse.named_parameters()}
    for table, types in {"": default, **distributed.tables}.items():
        key = f"distributed.tables.{table}" if table else "distributed.sharding"
        if table and table not in widths:
            raise ConfigError(f"{key}: there is no table {table!r}; the tables are {', '.join(sorted(widths))}")
        if unknown := sorted(set(types) - set(_SHARDING)):
            raise ConfigError(f"{key}: {unknown[0]!r} is not one of {', '.join(_SHARDING)}")
    _refuse_replicated_sequences(sparse, {table: distributed.tables.get(table, default) for table in widths}, runtime)
    return {
        table: ParameterConstraints(
            sharding_types=list(distributed.tables.get(table, default)),
            min_partition=_narrowest(width, size),
        )
        for table, width in widths.items()
    }


def _refuse_replicated_sequences(sparse: nn.Module, types: dict[str, list[str]], runtime: Runtime) -> None:
    from torchrec import EmbeddingCollection

    if runtime.device.type != "cpu":
        return
    for module in sparse.modules():
        if isinstance(module, EmbeddingCollection):
            for config in module.embedding_configs():
                if set(types[config.name]) == {"data_parallel"}:
                    raise ConfigError(
                        f"distributed: table {config.name!r} holds sequences, which TorchRec cannot look up in a "
                        f"data_parallel table on a CPU; add +distributed.tables.{config.name}=[table_wise]"
                    )


def _narrowest(width: int, size: int) -> int:
    """Columns of a column-wise shard: one shard per process, in the multiples of 4 that fbgemm takes."""
    return max(4, -(-width // (4 * size)) * 4)


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
