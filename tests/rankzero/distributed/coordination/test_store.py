import contextlib
import socket
import threading
from datetime import timedelta

import pytest

from rankzero.distributed.coordination.store import connect_to_store, serve_store
from rankzero.messages import AnotherRankFailed
from running import reserved_port


def test_a_server_that_ended_is_reported(scale_timers):
    scale_timers(0.03)
    with reserved_port() as port:
        pass
    with pytest.raises(AnotherRankFailed, match=r"rank 0 on a has ended: nothing listens at 127\.0\.0\.1:"):
        connect_to_store("127.0.0.1", port, 300, "rank 0 on a")


def test_a_client_waits_for_a_server_that_still_imports_torch(scale_timers):
    scale_timers(0.03)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, serving = listener.getsockname()[1], []
        duplicate = listener.dup()
        timer = threading.Timer(0.7, lambda: serving.append(serve_store("127.0.0.1", duplicate, 30)))
        timer.start()
        client = connect_to_store("127.0.0.1", port, 30, "rank 0")
        timer.join()
        client.set("key", "value")
        assert serving[0].get("key") == b"value"
        serving[0].set("other", "text")
        assert client.get("other") == b"text" and client.timeout == timedelta(seconds=30)
        del client
        serving.clear()


def test_a_server_whose_queue_of_connections_is_full_has_not_ended_and_the_wait_for_it_is_limited(scale_timers):
    scale_timers(0.03)
    with socket.socket() as listener, contextlib.ExitStack() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        with pytest.raises(AnotherRankFailed, match="rank 0 on a did not answer at .* within 1 s"):
            connect_to_store(*listener.getsockname(), 1, "rank 0 on a")
