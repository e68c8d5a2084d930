"""The ceiling that kernels bound by memory are held against: reading a buffer and nothing else."""

from zse import kernel as zl

UNROLL = 4


@zl.kernel
def probe_read(src: zl.Ptr[zl.u32, "const"], out: zl.Ptr[zl.u32], count: zl.i64):
    """Read `count` words, a multiple of 4; out[0] is written only if all of them cancel out in one thread, so that
    nothing is left out."""
    zl.grid_launch_dependents()
    step = zl.i64(zl.num_blocks(0)) * zl.target.threads * 4
    at = (zl.i64(zl.block_index(0)) * zl.target.threads + zl.thread_index()) * 4
    seen = zl.u32(0)
    zl.grid_wait()
    while at + (UNROLL - 1) * step < count:
        words = [zl.load(src + (at + u * step), 4, "stream") for u in zl.static(range(UNROLL))]
        for v in words:
            for i in zl.static(range(4)):
                seen = seen ^ v[i]
        at += UNROLL * step
    while at < count:
        v = zl.load(src + at, 4, "stream")
        for i in zl.static(range(4)):
            seen = seen ^ v[i]
        at += step
    if seen == 0x9E3779B9:
        out[0] = seen


def variants(target) -> list[zl.Variant]:
    return [zl.Variant("probe_read", probe_read, threads=512)]
