"""Of norm_attention's kernels: how the CTAs of a cluster, one per head, find the statistics of whole rows.

Each CTA sends (mean, sum of squared deviations) of its part of 64 rows to all CTAs of the cluster, itself included, and
merges what it gets. A message counts on the receiver's barrier by its bytes. Lane layout: a quad of lanes holds the same
two rows, 8 apart, as in an accumulator, so a message is 16 bytes per quad.

Inline assembly gets addresses of shared memory as those of the cluster's first CTA: hence `own_address`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # of a block
MESSAGE = gl.constexpr(128)  # fp32 values of a message


@gluon.constexpr_function
def tile_layout():
    """[64, 128] as an accumulator: columns 2 (lane % 4) + {0, 1} + 8 j of rows lane / 4 and lane / 4 + 8."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])


@gluon.constexpr_function
def row_layout():
    return gl.SliceLayout(1, tile_layout())


@gluon.constexpr_function
def _own(outputs, inputs):
    return (
        f"{{ .reg .b32 r; mov.u32 r, %cluster_ctarank; mapa.shared::cluster.u32 {outputs[0][0]}, {inputs[0][0]}, r; }}"
    )


@gluon.constexpr_function
def _send(outputs, inputs):
    """Lane l of a quad sends to CTAs l and l + 4."""
    (buffer,), (barrier,), (rank,), (heads,), mean, square = inputs
    values = f"{{{mean[0]}, {square[0]}, {mean[1]}, {square[1]}}}"
    send = f"""setp.lt.u32 p, peer, {heads};
    @p mapa.shared::cluster.u32 to, at, peer;
    @p mapa.shared::cluster.u32 done, {barrier}, peer;
    @p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {values}, [done];
    """
    return f"""{{ .reg .pred p; .reg .b32 t, peer, at, to, done;
    mov.u32 t, %tid.x; and.b32 t, t, 127;
    shl.b32 at, {heads}, 9;
    setp.eq.u32 p, t, 0;
    @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], at;
    shr.u32 at, t, 2; shl.b32 at, at, 4; add.u32 at, at, {buffer};
    shl.b32 peer, {rank}, 9; add.u32 at, at, peer;
    and.b32 peer, t, 3;
    {send} add.u32 peer, peer, 4;
    {send} }}"""


@gluon.constexpr_function
def _await(outputs, inputs):
    (bar,), (phase,) = inputs
    return f"""{{ .reg .pred p;
    again: mbarrier.try_wait.parity.shared::cta.b64 p, [{bar}], {phase};
    @!p bra again; }}"""


@gluon.constexpr_function
def _merge(peers, outputs, inputs):
    """Chan's formula for parts of 128 columns: mean of means, squares + 128 * squared deviations of means."""
    (mean, square), ((buffer,), (heads,), (inverse,)) = outputs, inputs
    names = [[f"v{j}{i}" for i in range(4)] for j in range(peers)]
    lines = [f"{{ .reg .pred p<8>; .reg .b32 at; .reg .f32 d, e, {', '.join(n for four in names for n in four)};"]
    lines.append(
        f"mov.u32 at, %tid.x; and.b32 at, at, 127; shr.u32 at, at, 2; shl.b32 at, at, 4; add.u32 at, at, {buffer};"
    )
    for j, four in enumerate(names):
        lines.append(f"setp.gt.u32 p{j}, {heads}, {j};")
        lines += [f"mov.f32 {n}, 0f00000000;" for n in four]
        lines.append(f"@p{j} ld.shared.v4.f32 {{{', '.join(four)}}}, [at + {512 * j}];")
    for i in range(2):
        lines.append(f"add.f32 {mean[i]}, {names[0][2 * i]}, {names[1][2 * i]};")
        lines.append(f"add.f32 {square[i]}, {names[0][2 * i + 1]}, {names[1][2 * i + 1]};")
        for four in names[2:]:
            lines.append(f"add.f32 {mean[i]}, {mean[i]}, {four[2 * i]};")
            lines.append(f"add.f32 {square[i]}, {square[i]}, {four[2 * i + 1]};")
        lines.append(f"mul.f32 {mean[i]}, {mean[i]}, {inverse}; mov.f32 e, 0f00000000;")
        for j, four in enumerate(names):
            lines.append(f"sub.f32 d, {four[2 * i]}, {mean[i]}; @p{j} fma.rn.f32 e, d, d, e;")
        lines.append(f"fma.rn.f32 {square[i]}, e, 0f43000000, {square[i]};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _merge4(outputs, inputs):
    return _merge(4, outputs, inputs)


@gluon.constexpr_function
def _merge8(outputs, inputs):
    return _merge(8, outputs, inputs)


@gluon.jit
def own_address(place):
    return gl.inline_asm(_own, "=r,r", [place], gl.int32, is_pure=False)


@gluon.jit
def meet_cluster():
    """All threads of all CTAs of the cluster."""
    gl.inline_asm("fence.mbarrier_init.release.cluster;", "~{memory}", [], (), is_pure=False)
    gl.inline_asm("barrier.cluster.arrive.release.aligned;", "~{memory}", [], (), is_pure=False)
    gl.inline_asm("barrier.cluster.wait.acquire.aligned;", "~{memory}", [], (), is_pure=False)


@gluon.jit
def send(buffer, bar, rank, heads, mean, square):
    """This CTA's part of the rows to everyone."""
    args = [own_address(buffer), own_address(bar), rank, heads, mean, square]
    gl.inline_asm(_send, "r,r,r,r,f,f,f,f,~{memory}", args, (), is_pure=False)


@gluon.jit
def collect(buffer, bar, phase, heads, PEERS: gl.constexpr):
    """(mean, sum of squared deviations) of whole rows, once all parts are there. PEERS: most CTAs of a cluster."""
    kind: gl.constexpr = gl.distributed_type(gl.float32, [ROWS], row_layout())
    merge: gl.constexpr = _merge4 if PEERS == 4 else _merge8
    gl.inline_asm(_await, "r,r,~{memory}", [own_address(bar), phase], (), is_pure=False)
    args = [own_address(buffer), heads, 1.0 / heads.to(gl.float32)]
    return gl.inline_asm(merge, "=&f,=&f,=&f,=&f,r,r,f,~{memory}", args, (kind, kind), is_pure=False)
