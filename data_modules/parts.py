"""Division of a batch among a few threads, for numpy operations that release the global interpreter lock."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

MAX_THREADS = 4
MIN_THREAD_ROWS = 128
"""Smallest number of rows for a thread: fewer rows are processed sooner than a thread wakes up."""


def in_row_blocks(work: Callable[[slice], None], rows: int) -> None:
    """Calls `work` on slices that together cover `range(rows)`, on at most as many threads as torch uses.

    If the other cores are busy, this takes as long as a single call. torch's own threads then take twice as long,
    because they wait for each other in every operation.

    Args:
        work: Processes a slice of the rows; may raise.
        rows: Number of rows.
    """
    block_count = max(1, min(torch.get_num_threads(), MAX_THREADS, rows // MIN_THREAD_ROWS))
    ends = [rows * number // block_count for number in range(block_count + 1)]
    first_block, *remaining_blocks = map(slice, ends, ends[1:])
    futures = [_thread_pool().submit(work, block) for block in remaining_blocks]
    work(first_block)
    for future in futures:
        future.result()


@cache
def _thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS - 1, thread_name_prefix="parts")


os.register_at_fork(after_in_child=_thread_pool.cache_clear)  # a forked process has none of its parent's threads
