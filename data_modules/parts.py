"""A batch divided among a few threads, for what numpy does without Python's lock."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

MOST_THREADS = 4
LEAST_ROWS = 128
"""Fewer are done sooner than a thread wakes up."""


def in_row_blocks(work: Callable[[slice], None], rows: int) -> None:
    """Calls `work` with slices that make up `range(rows)`, on as many threads as torch may have here.

    Where the other cores are busy it takes as long as one call. torch's own threads, which wait for one another in each
    operation, then take twice as long.

    Args:
        work: Works on some rows; may raise.
        rows: How many there are.
    """
    parts = max(1, min(torch.get_num_threads(), MOST_THREADS, rows // LEAST_ROWS))
    ends = [rows * part // parts for part in range(parts + 1)]
    first, *others = map(slice, ends, ends[1:])
    under_way = [_threads().submit(work, part) for part in others]
    work(first)
    for future in under_way:
        future.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix="parts")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a process that was forked has none of them
