import multiprocessing
import threading

import pytest
import torch

from data_modules import parts
from data_modules.parts import LEAST_ROWS, MOST_THREADS, in_row_blocks


@pytest.fixture(params=[1, 2, 3, 64])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [0, 1, LEAST_ROWS - 1, LEAST_ROWS, 2 * LEAST_ROWS, 10 * LEAST_ROWS + 7])
def test_row_blocks_cover_every_row_once(threads, rows):
    seen, workers = [], set()

    def work(part):
        seen.append((part.start, part.stop))
        workers.add(threading.current_thread())

    in_row_blocks(work, rows)
    seen.sort()
    assert [start for start, _ in seen] == [0, *(stop for _, stop in seen[:-1])] and seen[-1][1] == rows
    assert len(seen) == max(1, min(threads, MOST_THREADS, rows // LEAST_ROWS))
    assert threading.current_thread() in workers


def test_an_error_in_any_block_is_raised():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for bad in (0, LEAST_ROWS):
            with pytest.raises(ZeroDivisionError):
                in_row_blocks(lambda part, bad=bad: 1 / (part.start != bad), 2 * LEAST_ROWS)
    finally:
        torch.set_num_threads(before)


def in_child(queue):
    torch.set_num_threads(2)
    seen = []
    in_row_blocks(lambda part: seen.append(part.start), 2 * LEAST_ROWS)
    queue.put(sorted(seen))


def test_a_forked_process_creates_its_own_threads():
    parts._threads().submit(int).result()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=in_child, args=(queue,), daemon=True)
    process.start()
    try:
        assert queue.get(timeout=30) == [0, LEAST_ROWS]
    finally:
        process.kill()
        process.join()
        process.close()
