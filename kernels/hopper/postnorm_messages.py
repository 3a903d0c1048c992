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

_PUBLISH = gl.constexpr("""{
 .reg .b64 a, b;
 mov.b64 a, {$1, $3};
 mov.b64 b, {$2, $3};
 st.relaxed.gpu.global.v2.b64 [$4], {a, b};
 mov.u32 $0, 0;
}""")


@gluon.constexpr_function
def message_layout(peers):
    """Neighbouring lanes of one warp read the peers' messages of a row, of 32 / peers rows at a time."""
    return gl.BlockedLayout([1, 1], [32 // peers, peers], [1, 1], [1, 0])


@gluon.constexpr_function
def message_type(peers):
    return gl.distributed_type(gl.float32, [32, peers], message_layout(peers))


@gluon.constexpr_function
def _await_asm(outputs, inputs):
    """Poll the messages of a lane's rows until all carry their number. A message that does not come, because a CTA of
    the group is gone, ends the kernel with an error after some seconds."""
    (means, squares), ((address,), (number,)) = outputs, inputs
    n = len(means)  # the number of peers, too
    lines = [f"{{ .reg .pred p, lost; .reg .b64 a<{n}>, b<{n}>; .reg .b32 s, t, tries;", "mov.b32 tries, 0;", "POLL:"]
    lines += [f"ld.relaxed.gpu.global.v2.b64 {{a{i}, b{i}}}, [{address}+{512 // n * i}];" for i in range(n)]
    lines.append("setp.ne.u32 p, 0, 0;")
    for i in range(n):
        lines.append(f"mov.b64 {{{means[i]}, s}}, a{i}; mov.b64 {{{squares[i]}, t}}, b{i};")
        lines.append(f"setp.ne.or.u32 p, s, {number}, p; setp.ne.or.u32 p, t, {number}, p;")
    lines.append(f"add.u32 tries, tries, 1; setp.gt.u32 lost, tries, {1 << 22}; @lost trap;")
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
def await_messages(at, NC, sequence, PEERS: gl.constexpr):
    """(means, M2, peer): [32, PEERS] and [PEERS], by one warp. Peers at or past NC repeat the last one."""
    L: gl.constexpr = message_layout(PEERS)
    T: gl.constexpr = message_type(PEERS)
    rows = gl.arange(0, 32 // PEERS, gl.SliceLayout(1, L))
    peer = gl.arange(0, PEERS, gl.SliceLayout(0, L))
    first = at + (gl.minimum(peer, NC - 1) * 128)[None, :] + (2 * rows)[:, None]
    mean, m2 = gl.inline_asm(_await_asm, ("=&f", "=&f", "l", "r"), [first, sequence], (T, T), is_pure=False)
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
        gl.store(state, base + (used + 1) // 2 * 2)  # even, so that a number tells its tile's parity
