"""What a comparison comes to, in the words of its page, for a terminal; and whether PaCo was worth it."""

from collections.abc import Iterable, Sequence

from longtail.metrics import TOO_FEW
from longtail.report import reading
from longtail.report.chapter import make_chapters
from longtail.report.html import Element
from longtail.report.parts import NBSP, Inline, plural
from longtail.report.table import Row
from longtail.report.tested import Tested
from longtail.report.ties import ENOUGH, compare_seeds
from longtail.report.words import contest, summary

OURS = "PaCo"


def verdict(rows: Sequence[Row]) -> list[str]:
    """A line on the rare classes, one on all, and an answer to whoever asks if PaCo is worth its second network."""
    lines = []
    for chapter in make_chapters(list(rows)):
        lines += ["".join(plain(paragraph.children)).replace(NBSP, " ") for paragraph in summary(chapter)]
        metric = chapter.rare or "top1"
        where = "on rare classes" if chapter.rare else "over all"
        lines += worth(chapter.peers, metric, where, chapter.tested)
        images_C = reading.tested(chapter.peers[0].runs[0])
        enough = images_C is not None and int(images_C.sum()) >= TOO_FEW
        if chapter.tested and chapter.tested.too_few and enough:
            lines += worth(chapter.peers, "top1", "over all test images", ask="And over all?")
    return lines


def worth(
    rows: Sequence[Row], metric: str, where: str, base: Tested | None = None, ask: str = "Is PaCo worth it?"
) -> list[str]:
    """PaCo against the best of the others; nothing, where it was not among the methods. `base` is what the figures rest on."""
    ours = [row for row in rows if row.label.startswith(OURS)]
    others = [row for row in rows if row not in ours]
    if not ours or not others:
        return []
    best, mine = contest(others, metric).best, contest(ours, metric).best
    found = compare_seeds(mine.by_seed(metric), best.by_seed(metric))
    if found.difference is None or found.half_width is None:
        return [f"{ask} No verdict: it takes {ENOUGH} common seeds, and there are {len(found.seeds)}."]
    if base and base.too_few:
        images = plural(base.images or 0, "test image")
        return [f"{ask} No verdict: {where} there {'is' if base.images == 1 else 'are'} {images}, too few to decide."]
    lead = f"{abs(found.difference):.1f} ± {found.half_width:.1f} points"
    said = {
        "ahead": f"Yes: {where} it is {lead} ahead of the best of the others, {best.label}.",
        "tied": f"Not shown: {where} it is tied with {best.label} ({lead} apart), which is simpler.",
        "behind": f"No: {where} it is {lead} behind {best.label}.",
    }
    return [f"{ask} {said[found.outcome or 'tied']}"]


def plain(parts: Iterable[Inline]) -> Iterable[str]:
    """The text of a paragraph."""
    for part in parts:
        yield from plain(part.children) if isinstance(part, Element) else [str(part)]
