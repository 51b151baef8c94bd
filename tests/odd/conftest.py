import pytest

from tests.odd.harness import Zoo


@pytest.fixture(scope="session")
def odd(tmp_path_factory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("odd"))
