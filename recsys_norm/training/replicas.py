"""The dense part of the model on several ranks: replicated by DDP, or sharded by FSDP2."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys_norm.training.config import DistributedConfig
from recsys_norm.training.runtime import Runtime

# What DDP calls it: torch 2.13 warns about the older name.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(nn.parallel.DistributedDataParallel).parameters
)


class Replicas:
    """`module` is the dense part as the model has to call it. With one rank it is `dense` itself."""

    def __init__(self, dense: nn.Module, config: DistributedConfig, runtime: Runtime, *, compiled: bool) -> None:
        self.module = dense
        self._norms: list[Tensor] = []  # of the gradient buckets of this rank, before they are averaged
        self._sharded = False
        if runtime.size == 1:
            return
        if compiled:  # regions are small: their gradients are complete early enough without splitting their graphs
            torch._dynamo.config.optimize_ddp = False
        if config.dense == "fsdp2":
            self._sharded = True
            _shard(dense, runtime, compiled)
            return
        ids = [runtime.device.index] if runtime.device.type == "cuda" else None
        self.module = nn.parallel.DistributedDataParallel(
            dense,
            device_ids=ids,
            process_group=runtime.group,
            gradient_as_bucket_view=True,
            bucket_cap_mb=config.bucket_mb,
            **{_SYNC_BUFFERS: False},  # they are constants
        )
        self.module.register_comm_hook(runtime.group or dist.group.WORLD, self._average)

    def accumulate(self) -> AbstractContextManager:
        """Backward passes inside keep their gradients on this rank; the next one outside adds and averages them all."""
        if self._sharded:
            return self._without_reduction()
        return self.module.no_sync() if hasattr(self.module, "no_sync") else nullcontext()

    def own_norm(self) -> Tensor | None:
        """The norm of this rank's gradients before they were averaged, of the last backward pass with an exchange: a
        number that is not finite there came from this rank. None where ranks have no gradients of their own."""
        norms, self._norms = self._norms, []
        return torch.stack(norms).norm() if norms else None

    def _average(self, group, bucket):  # DDP refuses annotations that are strings
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        self._norms.append(torch.linalg.vector_norm(bucket.buffer(), dtype=torch.float32))
        return allreduce_hook(group, bucket)

    @contextmanager
    def _without_reduction(self):
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)


def _shard(dense: nn.Module, runtime: Runtime, compiled: bool) -> None:
    """FSDP2, in place. Its hooks cannot be inside a compiled region, so regions stay whole under torch.compile."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if runtime.group is None:
        mesh = init_device_mesh(runtime.device.type, (runtime.size,))
    else:
        mesh = DeviceMesh.from_group(runtime.group, runtime.device.type)
    for region, _ in () if compiled else dense.regions():
        fully_shard(region, mesh=mesh)
    fully_shard(dense, mesh=mesh)


def local(tensor: Any) -> list[Tensor]:
    """The parts of a plain, replicated or sharded tensor that are on this rank."""
    if hasattr(tensor, "local_shards"):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor]
