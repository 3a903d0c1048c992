"""Run the ahead-of-time kernels through the CUDA driver, under any torch and without Triton.

    reason = why_not(arch)                      # None, or why no kernel of this package can run
    kernel = get("lazy_rms_bf16_wide")          # by its name in the manifest; loaded on first use, once per device
    kernel(grid, x, weight, y, rstd, M, eps)    # the parameters in the manifest's order

Arguments: for a tile a tensor of the box's rank with a last stride of 1 and a base and other strides that are multiples
of 16 bytes; for a pointer a tensor or None (null); for numbers a Python int or float. `grid` counts CTAs along x (a
multiple of the cluster size) or is a triple. `after=True` lets the launch overlap with the end of the kernel before it
in the stream (programmatic dependent launch): the kernel must execute `griddepcontrol.wait` before it touches what that
one writes. `cooperative=True` makes the driver refuse a grid whose CTAs cannot all be resident at once.

The launch goes to the current stream of the tensors' device and can be captured in a CUDA graph. What a launch needs
(tensor maps, packed parameters) is kept per combination of addresses, shapes, strides and numbers, in a bounded table
that holds no tensor, so that a repeated call costs one look-up and one driver call.
"""

from __future__ import annotations

import ctypes
import functools
import json
import lzma
import struct
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
MAX_KEPT = 512  # packed launches per kernel and device
_FORMATS = {"i32": "i", "i64": "q", "fp32": "f", "pointer": "Q"}
_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
_MAP_TYPES = {"fp16": "FLOAT16", "fp32": "FLOAT32", "bf16": "BFLOAT16"}
_MAP_BYTES = 128
_STREAM_OFFSET = 32  # of hStream in a CUlaunchConfig, after seven 32-bit numbers
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_NUMBERS = (int, float, type(None))
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


@functools.cache
def manifest() -> dict[str, Any]:
    """By architecture; see build.py. Empty if nothing was built."""
    path = HERE / "manifest.json"
    return json.loads(path.read_text()) if path.exists() else {}


def target(arch: int | None) -> int | None:
    """The architecture whose cubins serve a compute capability: cubins for sm_90a run on 9.0 alone. The one place that
    decides this."""
    return {90: 90}.get(arch)


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@functools.cache
def _library() -> ctypes.CDLL:
    """The driver library itself, for the two calls that launches wait for: making their arguments from the classes of
    cuda.bindings takes longer than the calls do."""
    library, pointer, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p, ctypes.c_int
    library.cuLaunchKernelEx.argtypes = [pointer] * 4
    numbers = [number] * 4  # interleave, swizzle, L2 promotion, fill
    library.cuTensorMapEncodeTiled.argtypes = [pointer, number, ctypes.c_uint32, *[pointer] * 5, *numbers]
    library.cuGetErrorName.argtypes = [number, ctypes.POINTER(ctypes.c_char_p)]
    return library


def _error_name(status: int) -> str:
    name = ctypes.c_char_p()
    _library().cuGetErrorName(status, ctypes.byref(name))
    return (name.value or b"an unknown CUDA error").decode()


@functools.cache
def _driver_version() -> int:
    return _check(_driver().cuDriverGetVersion())


@functools.cache
def why_not(arch: int | None) -> str | None:
    """None if the kernels of this package can run on compute capability `arch` (None: no GPU), else the reason."""
    if arch is None:
        return "its kernels need a CUDA device"
    if target(arch) is None:
        return (
            f"its kernels are compiled for compute capability 9.0 (H100, H200) and this device has "
            f"{arch // 10}.{arch % 10}; use a technique of provider 'triton'"
        )
    entry = manifest().get(str(target(arch)))
    if entry is None:
        return "its kernels are not built; run `make cubins`"
    try:
        found = _driver_version()
    except ImportError as error:
        return f"it launches through cuda.bindings, which cannot be imported ({error}); pip install cuda-bindings"
    except RuntimeError as error:
        return f"the CUDA driver does not answer ({error})"
    if found < entry["min_driver"]:
        need = entry["min_driver"]
        return (
            f"its kernels need a driver that supports CUDA {need // 1000}.{need % 1000 // 10} and this one supports "
            f"{found // 1000}.{found % 1000 // 10}; update the driver or use a technique of provider 'triton'"
        )
    return None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def get(name: str, arch: int = 90) -> Kernel:
    """The kernel of that name for compute capability `arch`."""
    return _kernel(name, str(target(arch)))


@functools.cache
def _kernel(name: str, arch: str) -> Kernel:
    kernels = manifest().get(arch, {"kernels": {}})["kernels"]
    if name not in kernels:
        raise KeyError(f"no kernel {name!r} for sm_{arch} in the manifest; it has {', '.join(kernels) or 'none'}")
    return Kernel(name, arch, kernels[name])


@functools.lru_cache(maxsize=1)
def _archive(arch: str) -> bytes:
    return lzma.decompress((HERE / manifest()[arch]["archive"]).read_bytes())


def _check(result: tuple) -> Any:
    """The value of a driver call, or RuntimeError with the driver's name for the error."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(getattr(status, "name", str(status)))
    return values[0] if values else None


@functools.cache
def _primary_context(index: int) -> Any:
    driver = _driver()
    return _check(driver.cuDevicePrimaryCtxRetain(_check(driver.cuDeviceGet(index))))


def _ensure_context(index: int) -> None:
    """Make the device's primary context, the one torch uses, current on a thread that has no context of that device."""
    driver = _driver()
    status, device = driver.cuCtxGetDevice()
    if int(status) != 0 or int(device) != index:
        _check(driver.cuCtxSetCurrent(_primary_context(index)))


class _Launch:
    """Packed parameters and launch configuration: what one driver call needs. Never changed once made, except for the
    stream in the configuration, which the kernel's lock guards."""

    __slots__ = ("config", "config_address", "stream", "function", "parameters", "memory")

    def __init__(self, function: int, config: Any, parameters: ctypes.Array, memory: Any):
        self.function, self.config, self.memory = function, config, memory
        self.parameters = ctypes.addressof(parameters)
        self.config_address = int(config.getPtr())
        self.stream = ctypes.c_uint64.from_address(self.config_address + _STREAM_OFFSET)


class Kernel:
    """One cubin of the archive; see the module's text for how it is called."""

    def __init__(self, name: str, arch: str, entry: dict[str, Any]):
        self.name, self.arch, self.entry = name, arch, entry
        self.kinds = tuple(p["kind"] for p in entry["params"])
        self.tiles = [_Tile(p) if p["kind"] == "tile" else None for p in entry["params"]]
        self.shared = entry["shared"]
        self._functions: dict[int, Any] = {}
        self._configs: dict[tuple, Any] = {}
        self._kept: dict[tuple, _Launch] = {}
        self._lock = threading.Lock()
        self._plan()

    def _plan(self) -> None:
        """Places of the kernel's parameters in one block of memory: tensor maps first, then everything else as a C
        struct. After the last parameter the compiler expects two scratch pointers, which are null."""
        maps = iter(range(0, _MAP_BYTES * len(self.tiles), _MAP_BYTES))
        self._maps = [next(maps) if tile else None for tile in self.tiles]
        self._start = _MAP_BYTES * sum(tile is not None for tile in self.tiles)
        self._offsets, codes = [], ""
        for kind, tile, place in zip(self.kinds, self.tiles, self._maps):
            if tile is not None:
                self._offsets.append(place)
            for code in "i" * tile.rank + "q" * tile.rank if tile is not None else _FORMATS[kind]:
                codes += code
                self._offsets.append(self._start + struct.calcsize(codes) - struct.calcsize(code))
        self._format = struct.Struct(codes + "QQ")
        self._offsets += [self._start + self._format.size - 16, self._start + self._format.size - 8]
        self._bytes = self._start + self._format.size

    def __call__(
        self,
        grid: int | tuple[int, int, int],
        *args: Tensor | int | float | None,
        after: bool = False,
        cooperative: bool = False,
    ) -> None:
        device = next(a.get_device() for a in args if a.__class__ not in _NUMBERS)
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._launch(device, grid, args, (after, cooperative))
        self._launch(device, grid, args, (after, cooperative))

    def _launch(self, device: int, grid: Any, args: tuple, flags: tuple[bool, bool]) -> None:
        key = [device, grid, flags]
        for kind, a in zip(self.kinds, args, strict=True):
            if kind == "tile":
                key += (a.data_ptr(), a.shape, a.stride())
            elif kind == "pointer":
                key.append(0 if a is None else a.data_ptr())
            else:
                key.append(a)
        key = tuple(key)
        launch = self._kept.get(key)
        if launch is None:
            launch = self._prepare(device, grid, args, flags)
            with self._lock:
                if len(self._kept) >= MAX_KEPT:
                    self._kept.clear()
                self._kept[key] = launch
        stream = _current_stream(device) if _current_stream else torch.cuda.current_stream(device).cuda_stream
        call = _library().cuLaunchKernelEx
        with self._lock:
            launch.stream.value = stream
            status = call(launch.config_address, launch.function, launch.parameters, None)
            if status == _INVALID_CONTEXT:  # a thread on which torch has not run yet
                _ensure_context(device)
                status = call(launch.config_address, launch.function, launch.parameters, None)
        if status:
            raise RuntimeError(f"launch of {self.name} with grid {grid} failed: {_error_name(status)}")

    def _prepare(self, device: int, grid: Any, args: tuple, flags: tuple[bool, bool]) -> _Launch:
        _ensure_context(device)  # tensor maps need one, also on a thread on which torch has not run yet
        memory = ctypes.create_string_buffer(self._bytes + 64)
        base = -(-ctypes.addressof(memory) // 64) * 64
        values: list[int | float] = []
        for tile, place, a in zip(self.tiles, self._maps, args):
            if tile is not None:
                tile.encode(a, base + place)
                values += (*a.shape, *a.stride())
            else:
                values.append(0 if a is None else a.data_ptr() if isinstance(a, Tensor) else a)
        self._format.pack_into(memory, base - ctypes.addressof(memory) + self._start, *values, 0, 0)
        parameters = (ctypes.c_void_p * len(self._offsets))(*[base + offset for offset in self._offsets])
        config = self._configs.get((grid, flags))
        if config is None:
            if len(self._configs) >= MAX_KEPT:
                self._configs.clear()
            config = self._configs[grid, flags] = self._config(grid, *flags)
        return _Launch(int(self._function(device)), config, parameters, (memory, parameters))

    def _config(self, grid: Any, after: bool = False, cooperative: bool = False) -> Any:
        driver = _driver()
        x, y, z = grid if isinstance(grid, tuple) else (grid, 1, 1)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
        config.blockDimX, config.blockDimY, config.blockDimZ = 32 * self.entry["num_warps"], 1, 1
        config.sharedMemBytes = self.shared
        attributes = []
        if self.entry["cluster"] > 1:
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            value = cluster.value.clusterDim
            value.x, value.y, value.z = self.entry["cluster"], 1, 1
            attributes.append(cluster)
        if after:
            overlap = driver.CUlaunchAttribute()
            overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            attributes.append(overlap)
        if cooperative:
            together = driver.CUlaunchAttribute()
            together.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            together.value.cooperative = 1
            attributes.append(together)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def _function(self, device: int) -> Any:
        if device not in self._functions:
            driver = _driver()
            _ensure_context(device)
            cubin = _archive(self.arch)[self.entry["offset"] : self.entry["offset"] + self.entry["size"]]
            module = _check(driver.cuModuleLoadData(cubin))
            function = _check(driver.cuModuleGetFunction(module, self.entry["entry"].encode()))
            attribute = driver.CUfunction_attribute
            _check(
                driver.cuFuncSetAttribute(
                    function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self.shared
                )
            )
            if self.entry["cluster"] > 8:
                _check(
                    driver.cuFuncSetAttribute(
                        function, attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1
                    )
                )
            self._functions[device] = function
        return self._functions[device]

    def resident_clusters(self, device: torch.device) -> int:
        """How many clusters (CTAs, if the cluster size is 1) fit on the device at once; a persistent grid is at most
        this many times the cluster size."""
        function = self._function(device.index)
        if self.entry["cluster"] == 1:
            driver, threads = _driver(), 32 * self.entry["num_warps"]
            per_sm = _check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, self.shared))
            return per_sm * multiprocessors(device)
        config = self._config(self.entry["cluster"])
        return _check(_driver().cuOccupancyMaxActiveClusters(function, config))


class _Tile:
    """A parameter that is a tensor map: what does not change from call to call."""

    def __init__(self, param: dict[str, Any]):
        self.name, self.dtype, self.swizzle, box = param["name"], param["dtype"], param["swizzle"], param["box"]
        self.rank, self.size = len(box), _SIZES[param["dtype"]]
        self.box = (ctypes.c_uint32 * self.rank)(*reversed(box))
        self.ones = (ctypes.c_uint32 * self.rank)(*[1] * self.rank)

    @functools.cached_property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """As the driver numbers them: type, interleave, swizzle, L2 promotion, fill."""
        driver = _driver()
        return (
            int(getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_MAP_TYPES[self.dtype]}")),
            int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
            self.swizzle,
            int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B),
            int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        )

    def encode(self, t: Tensor, address: int) -> None:
        """Write a CUtensorMap. Boxes and strides count elements here, bytes in the driver; the last dimension first."""
        strides, rank, size = t.stride(), self.rank, self.size
        if t.dim() != rank or t.element_size() != size:
            expected = f"a {rank}-D tensor of {self.dtype}"
            raise ValueError(f"parameter {self.name} takes {expected}, got {tuple(t.shape)} {t.dtype}")
        if strides[-1] != 1 or t.data_ptr() % 16 or any(s * size % 16 for s in strides[:-1]):
            raise ValueError(
                f"parameter {self.name} needs a base address and strides that are multiples of 16 bytes and a last "
                f"stride of 1; it is at {t.data_ptr():#x} with strides {strides}; make it contiguous first"
            )
        extents = (ctypes.c_uint64 * rank)(*t.shape[::-1])
        pitches = (ctypes.c_uint64 * (rank - 1))(*[s * size for s in strides[-2::-1]])
        kind, *rest = self.numbers
        encode = _library().cuTensorMapEncodeTiled
        status = encode(address, kind, rank, t.data_ptr(), extents, pitches, self.box, self.ones, *rest)
        if status:
            shape = f"{tuple(t.shape)} with strides {strides}"
            raise RuntimeError(f"no tensor map for {self.name}, {shape}: {_error_name(status)}")
