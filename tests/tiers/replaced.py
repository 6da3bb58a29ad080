"""A record that is written again and again while another process of ours reads it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ridethrough.seam.fs import FileSystem


def require_old_or_new(open_fs: Callable[[], FileSystem]) -> None:
    """Whatever a reader sees is one of the contents, whole."""
    fs, other = open_fs(), open_fs()
    texts = [bytes([n]) * 3000 for n in range(20)]
    seen: set[bytes] = set()
    is_over = threading.Event()

    def write(text: bytes) -> None:
        writer = fs.create("/record", len(text))
        writer.write(text)
        writer.sync()
        writer.close()

    def look() -> None:
        while not is_over.is_set():
            seen.add(other.read("/record", max_bytes=10_000))

    write(texts[0])
    reader = threading.Thread(target=look)
    reader.start()
    for text in texts:
        write(text)
    is_over.set()
    reader.join()
    assert seen
    assert seen <= set(texts)
