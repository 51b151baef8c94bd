import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.odd.harness import Zoo

MEMORY = 4 * 2**30  # bytes, beside what the tests before it have left in this process


@pytest.fixture(scope="session")
def odd(tmp_path_factory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("odd"))


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """What would fill the machine fails here instead."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (in_use() + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def in_use() -> int:
    """Bytes, as the limit counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
