import resource
from collections.abc import Iterator

import pytest

from tests.odd.harness import Zoo

MEMORY = 4 * 2**30  # bytes


@pytest.fixture(scope="session")
def odd(tmp_path_factory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("odd"))


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """What would fill the machine fails here instead."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)
