import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.odd.harness import Zoo

MEMORY = 4 * 2**30  # bytes, in addition to what this process uses already


@pytest.fixture(scope="session")
def odd(tmp_path_factory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("odd"))


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Limit the memory, so that a test fails instead of exhausting the machine."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (in_use() + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def in_use() -> int:
    """Return the bytes in use, counted as for the limit."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
