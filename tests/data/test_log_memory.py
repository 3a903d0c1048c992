"""A log of many times the buffer takes no more memory than a small one, while it is prepared and while it is read."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from recsys_norm.data.logs import Logs

BUFFER_BYTES, BUFFER_ROWS = 1 << 16, 512


def criteo(folder, times):
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(300):
        numbers = "\t".join(map(str, rng.integers(0, 500, 13)))
        ids = "\t".join(f"{i:08x}" for i in rng.integers(0, 1 << 30, 26))
        lines.append(f"{rng.integers(0, 2)}\t{numbers}\t{ids}\n")
    text = "".join(lines)  # a bit more than the buffer
    with open(folder / "train.txt", "w") as file:
        for _ in range(times):
            file.write(text)
    return dict(format="criteo", split="order", encoding="hash", hash_rows=1000)


def kuairand(folder, times):
    """With histories: they are made from groups of users, in which the whole log is sorted."""
    rng = np.random.default_rng(0)
    with open(folder / "log_standard_pure.csv", "w") as file:
        file.write("user_id,video_id,time_ms,is_click,long_view,is_like,duration_ms,tab\n")
        for part in range(times):
            u, v, y = rng.integers(0, 5000, 2000), rng.integers(0, 300, 2000), rng.integers(0, 2, (2000, 3))
            file.writelines(
                f"{u[i]},{v[i]},{1_650_000_000_000 + 2000 * part + i},{y[i, 0]},{y[i, 1]},{y[i, 2]},500,1\n"
                for i in range(2000)
            )
    return dict(format="kuairand", encoding="hash", hash_rows=1000)


def peak(work):
    """Bytes that Python, NumPy and Arrow held at most while `work` ran, beyond what was there before. Pages of files
    that are mapped into memory do not count: the system takes them back when it needs the room."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


@pytest.mark.parametrize("write", [criteo, kuairand])
def test_memory_is_flat(tmp_path, write):
    prepared, read = {}, {}
    for times in (1, 10, 40):  # the first one imports what it needs
        folder = tmp_path / str(times)
        folder.mkdir()
        options = write(folder, times)
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert size >= times * BUFFER_BYTES
        options |= dict(batch_size=256, num_workers=0, buffer_bytes=BUFFER_BYTES, buffer_rows=BUFFER_ROWS)
        options |= dict(path=str(folder), cache=str(tmp_path / "cache"), shuffle_rows=2048)
        modules = []
        prepared[times] = peak(lambda options=options, modules=modules: modules.append(Logs(**options)))
        loader = modules[0].train_loader()
        read[times] = peak(lambda loader=loader: [len(batch) for batch in loader])
    # The file has grown by 2 MB, a column of 8 bytes per row by 0.07 (criteo) or 0.5 MB (kuairand).
    assert prepared[40] < prepared[10] + 200_000
    assert read[40] < read[10] + 200_000
