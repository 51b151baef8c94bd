"""Fixtures of all tests of trained networks."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_stopwatch():
    """Skip latency measurements, which take long and are not tested here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longtail.engine.evaluate.latency", lambda *_: 1.0)
        patch.setattr("longtail.inference.export.MAX_PASSES", 1)
        yield
