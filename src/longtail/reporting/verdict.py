"""What a comparison comes to, in the words of its page, for a terminal; and whether PaCo was worth it."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from longtail.reporting.chapter import make_chapters
from longtail.reporting.html import Element
from longtail.reporting.paired import doubt, holds
from longtail.reporting.parts import NBSP, Inline
from longtail.reporting.table import ResultRow
from longtail.reporting.tested import Tested, whole
from longtail.reporting.ties import ENOUGH, Verdict, compare_seeds
from longtail.reporting.words import contest, summary

OURS = "PaCo"


def verdict(rows: Sequence[ResultRow]) -> list[str]:
    """A line on the rare classes, one on all, and an answer to whoever asks if PaCo is worth its second network."""
    lines = []
    for chapter in make_chapters(list(rows)):
        lines += ["".join(plain(paragraph.children)).replace(NBSP, " ") for paragraph in summary(chapter)]
        base, every = chapter.tested, whole(chapter.peers[0].runs[0])
        lines += worth(chapter.peers, base)
        if base.too_few and not every.too_few:
            lines += worth(chapter.peers, every, ask="And over all?")
    return lines


class Judgment(NamedTuple):
    """PaCo compared with the best of the other methods."""

    kind: Literal["yes", "likely", "tied", "likely-not", "no", "too-few-seeds", "too-few-images"]
    other: str
    """Label of the best of the other methods."""
    found: Verdict


def judge(rows: Sequence[ResultRow], base: Tested) -> Judgment | None:
    """Compare PaCo with the best of the others; None if it was not among the methods, or was the only one."""
    metric = base.metric
    scored = [row for row in rows if row.values(metric)]
    ours = [row for row in scored if row.label.startswith(OURS)]
    others = [row for row in scored if row not in ours]
    if not ours or not others:
        return None
    best, mine = contest(others, metric).best, contest(ours, metric).best
    found = compare_seeds(mine.by_seed(metric), best.by_seed(metric))
    if found.outcome is None:
        return Judgment("too-few-seeds", best.label, found)
    if base.too_few:
        return Judgment("too-few-images", best.label, found)
    if found.outcome == "tied":
        return Judgment("tied", best.label, found)
    if holds(mine, best, found, base):
        return Judgment("yes" if found.outcome == "ahead" else "no", best.label, found)
    return Judgment("likely" if found.outcome == "ahead" else "likely-not", best.label, found)


def worth(rows: Sequence[ResultRow], base: Tested, ask: str = "Is PaCo worth it?") -> list[str]:
    """PaCo against the best of the others; nothing, where it was not among the methods. `base` is what the figures rest on."""
    judgment = judge(rows, base)
    if judgment is None:
        return []
    (kind, other, found), where = judgment, base.where
    if found.difference is None or found.half_width is None:
        return [f"{ask} No verdict: it takes {ENOUGH} common seeds, and there are {len(found.seeds)}."]
    if kind == "too-few-images":
        return [f"{ask} No verdict: {base.size}, too few to decide."]
    lead = f"{abs(found.difference):.1f} ± {found.half_width:.1f} points"
    said = {
        "yes": f"Yes: {where} it is {lead} ahead of the best of the others, {other}.",
        "likely": f"Likely: {where} it is {lead} ahead of the best of the others, {other}; {doubt(base)}.",
        "tied": f"Not shown: {where} it is tied with {other} ({lead} apart), which is simpler.",
        "likely-not": f"Likely not: {where} it is {lead} behind {other}; {doubt(base)}.",
        "no": f"No: {where} it is {lead} behind {other}.",
    }
    return [f"{ask} {said[kind]}"]


def plain(parts: Iterable[Inline]) -> Iterable[str]:
    """The text of a paragraph."""
    for part in parts:
        yield from plain(part.children) if isinstance(part, Element) else [str(part)]
