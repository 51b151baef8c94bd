"""Damaged run folders: they are read as far as possible, or refused with a one-line error."""

import pytest

from tests.odd.harness import ends_well
from tests.odd.zoo import SPOILT

READERS = {
    "table": ["table", "RUN", "--out", "out"],
    "report": ["report", "RUN"],
    "latency": ["figure", "latency", "RUN"],
    "gradient": ["figure", "gradient", "RUN"],
    "eval": ["eval", "RUN"],
    "predict": ["predict", "RUN", "ZOO/pets", "--csv", "out.csv"],
    "export": ["export", "RUN", "--to", "safetensors"],
    "resume": ["train", "digits-lt", "--out", "ZOO/spoilt", "--resume"],
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_run_is_read_or_refused(name, reader, odd):
    ends_well(odd, [word.replace("RUN", f"ZOO/spoilt/{name}") for word in READERS[reader]])
