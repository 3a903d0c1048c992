"""Of the post-norm kernels over clusters (postnorm_cluster_common.py): statistics of whole rows from the messages of
attention_exchange.py, slots handed back, and where the CTAs meet.

Inline assembly gets addresses of shared memory as those of the cluster's first CTA: hence `own_address`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .attention_exchange import ROWS, own_address, row_layout
from .barriers import arrive
from .postnorm_cluster_common import COLUMNS
from .postnorm_multiply import RMS


@gluon.jit
def meet_cluster():
    """All threads of all CTAs: nobody sends before the others' barriers are there. Every partition begins with it."""
    asm: gl.constexpr = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;"
    gl.inline_asm(asm, "=r", [], gl.int32, is_pure=False)


@gluon.jit
def release(bar, wanted):
    """Hand a slot back, once per warp."""
    arrive(own_address(bar), wanted)


@gluon.constexpr_function
def _await(outputs, inputs):
    (bar,), (phase,) = inputs
    return f"""{{ .reg .pred p;
    again: mbarrier.try_wait.parity.shared::cta.b64 p, [{bar}], {phase};
    @!p bra again; }}"""


@gluon.constexpr_function
def _load(peers, buffer, members):
    """Text that loads all parts of a thread's two rows, zeros for peers that are not there: p<j> says who is."""
    names = [[f"v{j}_{i}" for i in range(4)] for j in range(peers)]
    lines = [f"{{ .reg .pred p<{peers}>; .reg .b32 at; .reg .f32 {', '.join(n for four in names for n in four)};"]
    lines.append(
        f"mov.u32 at, %tid.x; and.b32 at, at, 127; shr.u32 at, at, 2; shl.b32 at, at, 4; add.u32 at, at, {buffer};"
    )
    for j, four in enumerate(names):
        lines.append(f"setp.gt.u32 p{j}, {members}, {j};")
        lines += [f"mov.f32 {n}, 0f00000000;" for n in four]
        lines.append(f"@p{j} ld.shared.v4.f32 {{{', '.join(four)}}}, [at + {512 * j}];")
    return names, lines


@gluon.constexpr_function
def _merge(peers, outputs, inputs):
    """Chan's formula for parts of `columns` columns and a last one of `last`: the weighted mean of the means, and all
    squares plus each part's columns times its mean's squared distance from that."""
    (mean, square), ((buffer,), (members,), (columns,), (last,), (inverse,)) = outputs, inputs
    names, lines = _load(peers, buffer, members)
    weights = [f"c{j}" for j in range(peers)]
    lines.append(f"{{ .reg .pred q; .reg .f32 d, {', '.join(weights)};")
    for j, weight in enumerate(weights):
        lines.append(f"setp.eq.u32 q, {members}, {j + 1}; selp.f32 {weight}, {last}, {columns}, q;")
        lines.append(f"selp.f32 {weight}, {weight}, 0f00000000, p{j};")
    for i in range(2):
        lines.append(f"mov.f32 {mean[i]}, 0f00000000; mov.f32 {square[i]}, 0f00000000;")
        for weight, four in zip(weights, names):
            lines.append(f"fma.rn.f32 {mean[i]}, {weight}, {four[2 * i]}, {mean[i]};")
            lines.append(f"add.f32 {square[i]}, {square[i]}, {four[2 * i + 1]};")
        lines.append(f"mul.f32 {mean[i]}, {mean[i]}, {inverse};")
        for weight, four in zip(weights, names):
            lines.append(f"sub.f32 d, {four[2 * i]}, {mean[i]}; mul.f32 {four[2 * i]}, {weight}, d;")
            lines.append(f"fma.rn.f32 {square[i]}, {four[2 * i]}, d, {square[i]};")
    return "\n".join([*lines, "} }"])


@gluon.constexpr_function
def _merge_squares(peers, outputs, inputs):
    (mean, square), ((buffer,), (members,), *_) = outputs, inputs
    names, lines = _load(peers, buffer, members)
    for i in range(2):
        lines.append(f"mov.f32 {mean[i]}, 0f00000000; mov.f32 {square[i]}, 0f00000000;")
        lines += [f"add.f32 {square[i]}, {square[i]}, {four[2 * i + 1]};" for four in names]
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _merge4(outputs, inputs):
    return _merge(4, outputs, inputs)


@gluon.constexpr_function
def _merge8(outputs, inputs):
    return _merge(8, outputs, inputs)


@gluon.constexpr_function
def _squares4(outputs, inputs):
    return _merge_squares(4, outputs, inputs)


@gluon.constexpr_function
def _squares8(outputs, inputs):
    return _merge_squares(8, outputs, inputs)


@gluon.jit
def collect(buffer, bar, phase, members, last, inverse, NORM: gl.constexpr, PEERS: gl.constexpr):
    """(mean, or 0 for RMS; sum of squared deviations from it) of whole rows, once all parts are there."""
    kind: gl.constexpr = gl.distributed_type(gl.float32, [ROWS], row_layout())
    merge: gl.constexpr = _merge4 if PEERS == 4 else _merge8
    squares: gl.constexpr = _squares4 if PEERS == 4 else _squares8
    asm: gl.constexpr = squares if NORM == RMS else merge
    gl.inline_asm(_await, "r,r,~{memory}", [own_address(bar), phase], (), is_pure=False)
    args = [own_address(buffer), members, 1.0 * COLUMNS, last, inverse]
    return gl.inline_asm(asm, "=&f,=&f,=&f,=&f,r,r,f,f,f,~{memory}", args, (kind, kind), is_pure=False)
