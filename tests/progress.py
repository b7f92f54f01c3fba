"""Prints every 20 seconds how many tests have run, which one has run longest, and about how long is left."""

import time

import pytest

INTERVAL = 20.0


class Progress:
    """Plugin for the process that prints the results."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.count, self.done = config, 0, 0
        self.start_time = self.printed = 0.0
        self.running: dict[str, float] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.begin(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.begin(len(ids))

    def begin(self, count: int) -> None:
        """Starts the clock after the collection, whose duration says nothing about the tests."""
        if count:
            self.count, self.start_time = count, time.monotonic()
            self.printed = self.start_time

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.running.pop(nodeid, None)
        self.done += 1
        now = time.monotonic()
        if now - self.printed >= INTERVAL:
            self.printed = now
            reporter = self.config.pluginmanager.get_plugin("terminalreporter")
            reporter.ensure_newline()
            reporter.write_line(self.line(now))

    def line(self, now: float) -> str:
        """Returns the line for a time, in seconds of the monotonic clock."""
        elapsed = now - self.start_time
        left = elapsed * (self.count - self.done) / self.done
        text = f"{self.done} of {self.count} tests in {_minutes(elapsed)}, about {_minutes(left)} left"
        if self.running:
            longest, started = min(self.running.items(), key=lambda item: item[1])
            text += f"; for {now - started:.0f} s: {longest}"
        return text


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02} min"
