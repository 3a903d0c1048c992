"""A kernel of known duration."""

import triton
import triton.language as tl


@triton.jit
def spin(duration_ptr, nanoseconds):
    """Run for `nanoseconds` by the device's own clock and store how long it really was."""
    start = tl.extra.cuda.globaltimer()
    now = start
    while now - start < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    tl.store(duration_ptr, now - start)
