"""Whatever is typed: a command does what it was asked, or says in one line why not, and leaves nothing half-done."""

import pytest
from hypothesis import given, settings

from tests.odd.harness import STEADY, Zoo, ends_well
from tests.odd.words import commands, kinds


def tried(odd: Zoo, words: list[str]) -> None:
    ends_well(odd, words)


@pytest.mark.parametrize("verb", kinds())
def test_every_verb(verb, odd):
    @settings(STEADY, max_examples=8)
    @given(commands([verb]))
    def each(words):
        ends_well(odd, words)

    each()


@pytest.mark.long
@pytest.mark.parametrize("verb", kinds())
def test_every_verb_many_times(verb, odd):
    @settings(STEADY, max_examples=120)
    @given(commands([verb]))
    def each(words):
        ends_well(odd, words)

    each()
