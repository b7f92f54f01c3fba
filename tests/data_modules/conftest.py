import urllib.error
import urllib.request

import pytest


@pytest.fixture
def no_network(monkeypatch):
    """Makes every download fail immediately."""

    def refuse(*arguments, **options):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
