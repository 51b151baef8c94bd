"""What all tests of trained networks share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_stopwatch():
    """Milliseconds are no concern here, and take long to measure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longtail.engine.evaluate.latency", lambda *_: 1.0)
        patch.setattr("longtail.inference.export.MAX_PASSES", 1)
        yield
