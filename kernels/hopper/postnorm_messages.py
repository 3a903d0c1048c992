"""Messages between the CTAs of a group, through L2: (mean, M2) of a row's columns in one CTA.

A message is two 64-bit words, each a 32-bit value and a 32-bit sequence number, written and read whole. The reader
polls until both carry the number that it expects, so no fence, flag or reset is needed. Numbers grow from launch to
launch: the first word of the space holds the last one used, the second counts the CTAs that are done, and the last CTA
of a launch moves them on. Messages begin 16 bytes after them.

Two slots per (group, warpgroup), by the parity of the tile, suffice. A CTA sends tile i only after its own `normalise`
has read all messages of tile i - 1, which each peer sent after reading those of tile i - 2, the slot's last use.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PEERS = gl.constexpr(8)  # largest group

_PUBLISH = gl.constexpr("""{
 .reg .b64 a, b;
 mov.b64 a, {$1, $3};
 mov.b64 b, {$2, $3};
 st.relaxed.gpu.global.v2.b64 [$4], {a, b};
 mov.u32 $0, 0;
}""")


@gluon.constexpr_function
def message_layout(rows, warps):
    """8 lanes read the 8 peers' messages of a row; 4 rows per warp, and again for further rows."""
    return gl.BlockedLayout([1, 1], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def message_type(rows, warps):
    return gl.distributed_type(gl.float32, [rows, 8], message_layout(rows, warps))


@gluon.constexpr_function
def _await_asm(outputs, inputs):
    """Poll the messages of a thread's rows, which are `pitch` bytes apart, until all carry their number."""
    (means, squares), ((address,), (number,), (pitch,)) = outputs, inputs
    n = len(means)
    lines = [f"{{ .reg .pred p; .reg .b64 a<{n}>, b<{n}>, at; .reg .b32 s, t;", "POLL:", f"mov.b64 at, {address};"]
    for i in range(n):
        lines.append(f"ld.relaxed.gpu.global.v2.b64 {{a{i}, b{i}}}, [at];" + (f" add.s64 at, at, {pitch};" if i < n - 1 else ""))
    lines.append("setp.ne.u32 p, 0, 0;")
    for i in range(n):
        lines.append(f"mov.b64 {{{means[i]}, s}}, a{i}; mov.b64 {{{squares[i]}, t}}, b{i};")
        lines.append(f"setp.ne.or.u32 p, s, {number}, p; setp.ne.or.u32 p, t, {number}, p;")
    return "\n".join(lines + ["@p bra POLL;", "}"])


@gluon.jit
def slot(space, group, w, parity, rank, NC):
    """Address of the 64 messages of one CTA."""
    return space + 2 + (((group * 2 + w) * 2 + parity) * NC + rank) * 128


@gluon.jit
def publish(at, mean, m2, sequence):
    rows = gl.arange(0, 64, mean.type.layout)
    gl.inline_asm_elementwise(
        _PUBLISH, "=r,f,f,r,l", [mean, m2, sequence, at + 2 * rows], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_messages(at, NC, sequence, ROWS: gl.constexpr):
    """(means, M2, peer): [ROWS, PEERS] and [PEERS], by ROWS / 32 warps. Peers at or past NC repeat the last one."""
    WARPS: gl.constexpr = ROWS // 32
    L: gl.constexpr = message_layout(ROWS, WARPS)
    rows = gl.arange(0, 4 * WARPS, gl.SliceLayout(1, L))
    peer = gl.arange(0, PEERS, gl.SliceLayout(0, L))
    first = at + (gl.minimum(peer, NC - 1) * 128)[None, :] + (2 * rows)[:, None]
    T: gl.constexpr = message_type(ROWS, WARPS)
    pitch = gl.to_tensor(4 * WARPS * 16).to(gl.int64)
    mean, m2 = gl.inline_asm(_await_asm, ("=&f", "=&f", "l", "r", "l"), [first, sequence, pitch], (T, T), is_pure=False)
    return mean, m2, peer


@gluon.jit
def sequence_base(space):
    return gl.load(space.to(gl.pointer_type(gl.int32), bitcast=True))


@gluon.jit
def next_base(space, base, used):
    """The last CTA that is done moves the sequence on, for the next launch."""
    state = space.to(gl.pointer_type(gl.int32), bitcast=True)
    done = gl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu")
    if done == gl.num_programs(0) - 1:
        gl.store(state + 1, 0)
        gl.store(state, base + used)
