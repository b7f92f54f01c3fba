import multiprocessing
import threading

import pytest
import torch

from data_modules import parts
from data_modules.parts import MAX_THREADS, in_row_blocks
from data_modules.parts import MIN_THREAD_ROWS as ROWS
from running import restore_process_state


@pytest.fixture(params=[1, 2, 3, 64])
def threads(request):
    with restore_process_state():
        torch.set_num_threads(request.param)
        yield request.param


@pytest.mark.parametrize("rows", [0, 1, ROWS - 1, ROWS, 2 * ROWS, 10 * ROWS + 7])
def test_row_blocks_cover_every_row_once(threads, rows):
    blocks, workers = [], set()

    def work(block):
        blocks.append((block.start, block.stop))
        workers.add(threading.current_thread())

    in_row_blocks(work, rows)
    blocks.sort()
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])] and blocks[-1][1] == rows
    assert len(blocks) == max(1, min(threads, MAX_THREADS, rows // ROWS))
    assert threading.current_thread() in workers


def test_an_error_in_any_block_is_raised():
    for first_row in (0, ROWS):
        with restore_process_state(), pytest.raises(ZeroDivisionError):
            torch.set_num_threads(2)
            in_row_blocks(lambda block, row=first_row: 1 / (block.start != row), 2 * ROWS)


def run_in_child(queue):
    torch.set_num_threads(2)
    starts = []
    in_row_blocks(lambda block: starts.append(block.start), 2 * ROWS)
    queue.put(sorted(starts))


def test_a_forked_process_creates_its_own_threads():
    parts._thread_pool().submit(int).result()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=run_in_child, args=(queue,), daemon=True)
    process.start()
    try:
        assert queue.get(timeout=30) == [0, ROWS]
    finally:
        process.kill()
        process.join()
        process.close()
