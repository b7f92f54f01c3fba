"""Division of a batch among a few threads, for numpy operations that release the global interpreter lock."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

MOST_THREADS = 4
LEAST_ROWS = 128
"""Smallest number of rows for a thread: fewer rows are processed sooner than a thread wakes up."""


def in_row_blocks(work: Callable[[slice], None], rows: int) -> None:
    """Calls `work` on slices that together cover `range(rows)`, on at most as many threads as torch uses.

    If the other cores are busy, this takes as long as a single call. torch's own threads then take twice as long,
    because they wait for each other in every operation.

    Args:
        work: Processes a slice of the rows; may raise.
        rows: Number of rows.
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


os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked process has none of its parent's threads
