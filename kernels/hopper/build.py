"""Compile the Gluon sources ahead of time, without a GPU, into one archive per architecture and `manifest.json`.

    make cubins                                what has changed; ARGS="--module NAME", "--force", "--check NAME"
    python -m kernels.hopper.build ...         the same, from the repository's root, where triton 3.9 is installed

Each module that `SOURCES` names lists its kernels as VARIANTS (see `variants.py`); it imports its neighbours by
relative imports, so that neither torch nor the rest of the package is needed here. A cubin is compiled again when the
text of its module, or of one that this imports, has changed. All cubins of an architecture stand one after another in
one xz stream, which keeps the many similar ones small. Several builds may run side by side: each merges its own modules
into the files under a lock.

`manifest.json`, by architecture:
    archive    file name; its bytes are the cubins from `offset` to `offset` + `size`
    compiler   Triton and ptxas;   min_driver   CUDA version that a driver must support, as cuDriverGetVersion gives it
    modules    module -> hash of its sources
    kernels    name -> module, entry (symbol), sha256 of the cubin, offset, size, num_warps (all partitions), cluster
               (CTAs), registers (per thread at launch), spills (bytes per thread), shared (dynamic, bytes),
               static_shared, and params: the parameters in order, {name, kind} with kind i32 | i64 | fp32 | pointer |
               tile; a tile also has dtype, box (per CTA), swizzle (CUtensorMapSwizzle). A tile stands for a 128-byte
               CUtensorMap, then its sizes (i32 each) and strides (i64 each, elements); after the last parameter come
               two null pointers.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import hashlib
import importlib
import io
import json
import lzma
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES = HERE / "SOURCES"
MANIFEST = HERE / "manifest.json"
TRITON_VERSION = "3.9.0"
MAX_ARCHIVE_BYTES = 3_000_000
XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 26}]


def declared_sources(path: Path = SOURCES) -> dict[int, list[str]]:
    """Architecture -> source modules, from the SOURCES file."""
    found: dict[int, list[str]] = {}
    for line in path.read_text().splitlines():
        module, *archs = line.split("#")[0].split() or [None]
        for arch in archs:
            found.setdefault(int(arch), []).append(module)
    return found


def source_hash(module: str, folder: Path = HERE) -> str:
    """Hash of a module's text and of the text of every neighbour that it imports, also indirectly."""
    texts: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = folder / f"{name}.py"
        if name in texts or not path.exists():
            continue
        texts[name] = path.read_text()
        for node in ast.walk(ast.parse(texts[name])):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                waiting += [node.module] if node.module else [alias.name for alias in node.names]
    digest = hashlib.sha256()
    for name in sorted(texts):
        digest.update(f"{name}\0{texts[name]}\0".encode())
    return digest.hexdigest()[:16]


def read_archive(entry: dict[str, Any], folder: Path = HERE) -> dict[str, bytes]:
    """Kernel name -> cubin of one architecture's manifest entry."""
    data = lzma.decompress((folder / entry["archive"]).read_bytes())
    return {name: data[k["offset"] : k["offset"] + k["size"]] for name, k in entry["kernels"].items()}


# ---- compiling -------------------------------------------------------------------------------------------------------


def compile_variant(variant: Any, arch: int) -> tuple[dict[str, Any], bytes]:
    """Manifest entry and cubin of one variant."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": variant.num_warps, "num_ctas": variant.num_ctas, "enable_fp_fusion": True}
    if variant.maxnreg is not None:
        options["maxnreg"] = variant.maxnreg
    log = io.StringIO()
    with contextlib.redirect_stdout(log):  # where Triton prints what ptxas said
        compiled = triton.compile(_source(variant), target=GPUTarget("cuda", arch, 32), options=options)
    report, meta, cubin = log.getvalue(), compiled.metadata, compiled.asm["cubin"]
    if meta.global_scratch_size or meta.profile_scratch_size:
        raise ValueError(f"{variant.name}: it wants scratch memory, which the launcher does not provide")
    if "serialized" in report:
        raise ValueError(f"{variant.name}: ptxas serialises its matrix products:\n{report}")

    def number(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, report))

    entry = {
        "entry": meta.name,
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "size": len(cubin),
        "num_warps": meta.num_warps,
        "cluster": variant.num_ctas,
        "registers": number(r"Used (\d+) registers"),
        "spills": number(r"(\d+) bytes spill (?:stores|loads)"),
        "shared": meta.shared,
        "static_shared": number(r"(\d+) bytes smem"),
        "params": _params(variant, compiled),
    }
    if not entry["registers"]:
        raise RuntimeError(f"{variant.name}: no register count in what ptxas said:\n{report}")
    return entry, cubin


def _source(variant: Any) -> Any:
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    from .variants import Tile

    signature, constants, attributes = {}, {}, {}
    names = [p.name for p in variant.kernel.params]
    if list(variant.args) != names:
        raise ValueError(f"{variant.name}: args are {list(variant.args)} and the kernel's parameters are {names}")
    for index, parameter in enumerate(variant.kernel.params):
        value = variant.args[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tile):
            signature[parameter.name] = value.type_name()
        else:
            signature[parameter.name], _, divisible = value.partition(":")
            if divisible:
                attributes[(index,)] = [["tt.divisibility", int(divisible)]]
    kind = GluonASTSource if isinstance(variant.kernel, GluonJITFunction) else ASTSource
    return kind(variant.kernel, signature, constants, attributes)


def _params(variant: Any, compiled: Any) -> list[dict[str, Any]]:
    from .variants import Tile

    maps = iter(compiled.metadata.tensordesc_meta or ())
    params = []
    for parameter in variant.kernel.params:
        value = variant.args[parameter.name]
        if parameter.is_constexpr:
            continue
        if isinstance(value, Tile):
            meta = next(maps)
            box, swizzle = list(meta["block_size"]), meta["swizzle"]
            params.append(
                {"name": parameter.name, "kind": "tile", "dtype": value.dtype, "box": box, "swizzle": swizzle}
            )
        else:
            name = value.partition(":")[0]
            params.append({"name": parameter.name, "kind": "pointer" if name.startswith("*") else name})
    return params


def compiler_versions(arch: int) -> tuple[str, int]:
    """Text for the manifest and the CUDA version that a driver must support to load the cubins: drivers load what any
    toolkit of their own major version made."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    if triton.__version__ != TRITON_VERSION:
        raise SystemExit(f"the sources are written for triton {TRITON_VERSION} and {triton.__version__} is installed")
    version = get_ptxas(arch).version
    return f"triton {triton.__version__}, ptxas {version}", int(version.split(".")[0]) * 1000


def build_modules(modules: Iterable[str], arch: int) -> dict[str, tuple[str, dict[str, tuple[dict[str, Any], bytes]]]]:
    """Module -> (hash, {kernel: (entry, cubin)})."""
    built = {}
    for name in modules:
        digest = source_hash(name)
        module = importlib.import_module(f".{name}", __package__)
        kernels = {}
        for variant in module.VARIANTS:
            entry, cubin = compile_variant(variant, arch)
            kernels[variant.name] = ({"module": name, **entry}, cubin)
            facts = ("registers", "spills", "shared", "num_warps", "size")
            print(variant.name, *(f"{fact}={entry[fact]}" for fact in facts), flush=True)
        built[name] = (digest, kernels)
    return built


# ---- writing ---------------------------------------------------------------------------------------------------------


def merge(arch: int, compiler: tuple[str, int], built: dict[str, Any], folder: Path = HERE) -> None:
    """Put what was built into the archive and the manifest, beside the kernels of the other declared modules."""
    path = folder / MANIFEST.name
    with open(folder / SOURCES.name) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        manifest = json.loads(path.read_text()) if path.exists() else {}
        old = manifest.get(str(arch))
        cubins = read_archive(old, folder) if old else {}
        entries = dict(old["kernels"]) if old else {}
        hashes = dict(old["modules"]) if old else {}
        declared = declared_sources(folder / SOURCES.name).get(arch, [])
        for module, (digest, kernels) in built.items():
            entries = {n: e for n, e in entries.items() if e["module"] != module}
            entries.update({n: entry for n, (entry, _) in kernels.items()})
            cubins.update({n: cubin for n, (_, cubin) in kernels.items()})
            hashes[module] = digest
        kernels, data = {}, b""
        for name in sorted(entries, key=lambda n: (entries[n]["module"], n)):
            if entries[name]["module"] in declared:
                kernels[name] = {**entries[name], "offset": len(data)}
                data += cubins[name]
        packed = lzma.compress(data, lzma.FORMAT_XZ, lzma.CHECK_CRC32, filters=XZ_FILTERS)
        if len(packed) > MAX_ARCHIVE_BYTES:
            raise SystemExit(f"the archive has {len(packed)} bytes, more than {MAX_ARCHIVE_BYTES}")
        manifest[str(arch)] = {
            "archive": f"sm_{arch}.xz",
            "compiler": compiler[0],
            "min_driver": compiler[1],
            "modules": {m: hashes[m] for m in sorted(hashes) if m in declared},
            "kernels": kernels,
        }
        (folder / f"sm_{arch}.xz").write_bytes(packed)
        path.write_text(json.dumps(manifest, indent=1) + "\n")
        print(f"sm_{arch}.xz: {len(kernels)} kernels, {len(packed)} bytes", flush=True)


def stale_modules(arch: int, modules: Iterable[str], folder: Path = HERE) -> list[str]:
    """Of these modules, those whose cubins are not of their present text."""
    path = folder / MANIFEST.name
    known = json.loads(path.read_text()).get(str(arch), {"modules": {}})["modules"] if path.exists() else {}
    return [m for m in modules if known.get(m) != source_hash(m, folder)]


def check(arch: int, names: Iterable[str]) -> None:
    """Compile kernels again and compare them with the manifest."""
    known = json.loads(MANIFEST.read_text())[str(arch)]["kernels"]
    for name in names:
        module = importlib.import_module(f".{known[name]['module']}", __package__)
        variant = next(v for v in module.VARIANTS if v.name == name)
        entry, _ = compile_variant(variant, arch)
        differing = [key for key, value in entry.items() if known[name][key] != value]
        if differing:
            raise SystemExit(f"{name} differs from the manifest in {', '.join(differing)}; run `make cubins`")
        print(f"{name} is what the manifest says", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="kernels.hopper.build", description=__doc__.splitlines()[0])
    parser.add_argument("--module", action="append", help="only this source module (may be repeated)")
    parser.add_argument("--force", action="store_true", help="compile also what has not changed")
    parser.add_argument("--check", action="append", help="only compile this kernel again and compare (may be repeated)")
    arguments = parser.parse_args(argv)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for arch, modules in declared_sources().items():
            compiler = compiler_versions(arch)
            if arguments.check:
                check(arch, arguments.check)
                continue
            unknown = set(arguments.module or ()) - set(modules)
            if unknown:
                raise SystemExit(f"{SOURCES} does not name {', '.join(sorted(unknown))}")
            wanted = [m for m in modules if m in (arguments.module or modules)]
            stale = wanted if arguments.force else stale_modules(arch, wanted)
            merge(arch, compiler, build_modules(stale, arch))


if __name__ == "__main__":
    main()
