"""What the figures say, in plain words: who is best, by how much, and whether to believe it."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from longtail.config import Contrast, differences
from longtail.reporting import reading
from longtail.reporting.chapter import GROUPS, DatasetResults, mean
from longtail.reporting.html import Element, el
from longtail.reporting.paired import doubt, figure_noise, holds
from longtail.reporting.parts import NBSP, Inline, listed, name, plural, points
from longtail.reporting.table import ResultRow, format_mean_std
from longtail.reporting.tested import DECIDE_NOTHING, SOUND
from longtail.reporting.ties import ENOUGH, Verdict, compare_seeds

CROWD = 6  # methods; the best of so many has had luck too
SHORT = 5  # epochs; a second stage of fewer has hardly begun


class Ranking(NamedTuple):
    """The best by one metric, and its lead over each of the others, nearest first."""

    best: ResultRow
    others: list[tuple[ResultRow, Verdict]]

    def of(self, *outcomes: str | None) -> list[tuple[ResultRow, Verdict]]:
        return [(row, verdict) for row, verdict in self.others if verdict.outcome in outcomes]


def contest(rows: Sequence[ResultRow], metric: str) -> Ranking:
    """The best is sought among rows of enough seeds, where there are two of them."""
    scored = sorted((row for row in rows if row.values(metric)), key=lambda row: -mean(row, metric))
    enough = [row for row in scored if len(row.by_seed(metric)) >= ENOUGH]
    best = enough[0] if len(enough) > 1 else scored[0]
    others = [row for row in scored if row is not best]
    return Ranking(best, [(row, compare_seeds(best.by_seed(metric), row.by_seed(metric))) for row in others])


def summary(chapter: DatasetResults) -> list[Element]:
    """A paragraph on the rare classes, and one on all, each with what it must not be taken for."""
    where, base, paragraphs = {"top1": "Over all test images "}, chapter.tested, list[Element]()
    if chapter.rare:
        rests = f"; {base}" if base.metric == chapter.rare else ""
        where = {chapter.rare: f"On rare classes ({GROUPS[chapter.rare]} training images{rests}) "} | where
    say = alone if len(chapter.peers) == 1 else ranked
    for metric, opening in where.items():
        paragraphs.append(el("p", opening, *say(chapter.peers, metric)))
        if metric == base.metric:
            paragraphs += map(_caution, cautions(chapter))
    if any(contest(chapter.peers, metric).of("ahead", "tied", "behind") for metric in where):
        says = "± is the 95 % interval of the difference, seeds in pairs, on these test images; tied: it contains zero."
        paragraphs.append(el("p", says, class_="small"))
    return paragraphs


def cautions(chapter: DatasetResults) -> "Iterator[Caveat]":
    """Test images that are too few for a verdict, and rarer classes that have none at all."""
    if chapter.tested.too_few:
        yield Caveat("test-images", False, f"{_size(chapter)}, {_too_few(chapter)}.")
    for group, classes in chapter.unseen.items():
        rarest = f"{plural(classes, 'class')} of {GROUPS[group]} training images"
        says = f"Of the rarest ({rarest}) nothing is known, as there are no test images of them."
        yield Caveat("untested-classes", False, says)


def _caution(ground: "Caveat") -> Element:
    return el("p", el("strong", "Caution: "), ground.says, class_="caution", data_kind=ground.kind)


def _too_few(chapter: DatasetResults) -> str:
    return DECIDE_NOTHING if len(chapter.peers) > 1 else "too few to say much of them"


def _size(chapter: DatasetResults) -> str:
    return chapter.tested.size.capitalize()


def alone(rows: Sequence[ResultRow], metric: str) -> list[Inline]:
    (row,) = rows
    seeds = plural(len(row.values(metric)), "seed")
    share = f"{format_mean_std(row.values(metric))} %".replace(" ", NBSP)
    return [el("strong", row.label), f" is right on {share} ({seeds})."]


def ranked(rows: Sequence[ResultRow], metric: str) -> list[Inline]:
    best, others = found = contest(rows, metric)
    share = f"{mean(best, metric):.1f}{NBSP}%"
    if not others:
        return [el("strong", best.label), f" has {share}; no other method has a figure there."]
    if not found.of("ahead", "tied", "behind"):
        return unproven(found, metric)
    tied, behind, unsaid = found.of("tied"), found.of("ahead"), found.of(None, "behind")
    says: list[Inline] = [el("strong", best.label), f" is best with {share}"]
    if tied:
        says += [", but tied with ", *listed([[el("strong", row.label), f" ({_lead(v)})"] for row, v in tied])]
    if behind:
        leads: list[list[Inline]] = [[name(row.label), f" by {_lead(v)} points"] for row, v in behind]
        says += [". It is" if tied else ",", " ahead of ", *listed(leads)]
    if unsaid:
        says += [". No verdict on ", *listed([[name(row.label)] for row, _ in unsaid]), ": other seeds, or too few"]
    return [*says, "."]


def unproven(found: Ranking, metric: str) -> list[Inline]:
    """Where no two methods have seeds enough in common."""
    best, others = found
    top = mean(best, metric)
    leads: list[list[Inline]] = [[name(row.label), f" by {top - mean(row, metric):.1f} points"] for row, _ in others]
    luck = f". That may be luck: a verdict needs {ENOUGH} common seeds."
    return [el("strong", best.label), f" has the highest figure, {top:.1f}{NBSP}%, above ", *listed(leads), luck]


def _lead(verdict: Verdict) -> str:
    return points(verdict.difference or 0, verdict.half_width)


GroundKind = Literal[
    "chance",  # among many methods, the best one was also lucky
    "data-notes",  # a note of the data set, for example about duplicates
    "left-out",  # methods outside the comparison: on other images, or of another length
    "second-stage",  # additional epochs of some methods
    "seeds",  # the number of seeds
    "short-stage",  # a second stage of very few epochs
    "skipped-images",  # images that could not be read
    "test-images",  # the number of test images, and the uncertainty that follows from it
    "training",  # whether the methods differ in more than the method
    "uncommitted",  # runs of a source tree with uncommitted changes
    "unequal-runs",  # runs that differ in commit, device or precision
    "untested-classes",  # classes without test images
    "validation",  # whether validation images were held out
]


class Caveat(NamedTuple):
    """One reason to believe the figures, or to doubt them."""

    kind: GroundKind
    sound: bool
    says: str


def trust(chapter: DatasetResults) -> Element:
    items = [
        el(
            "li",
            el("strong", "Good: " if g.sound else "Caution: "),
            g.says,
            class_="good" if g.sound else "caution",
            data_kind=g.kind,
        )
        for g in grounds(chapter)
    ]
    return el("div", el("h3", "Can it be believed?"), conclusion(chapter), el("ul", *items, class_="trust"))


class Claims(NamedTuple):
    """Labels of the methods that the best one is compared with, by what can be said of its lead."""

    best: str
    clear: list[str]
    """Behind by more than other test images could change."""
    narrow: list[str]
    """Behind by less than that, or the number of test images is not known."""
    undecided: list[str]


def sort_claims(chapter: DatasetResults) -> Claims | None:
    """Return what holds of the leads on rare classes, or over all where there are none; None if nothing can be compared."""
    base = chapter.tested
    if len(chapter.peers) == 1 or base.too_few:
        return None
    found = contest(chapter.peers, base.metric)
    leads = {row.label: holds(found.best, row, verdict, base) for row, verdict in found.of("ahead")}
    clear, narrow = ([label for label, sure in leads.items() if sure is wanted] for wanted in (True, False))
    return Claims(found.best.label, clear, narrow, [row.label for row, _ in found.of("tied", None, "behind")])


def conclusion(chapter: DatasetResults) -> Element | None:
    """What stands of the leads on rare classes (where there are none, over all), and what is open, in a sentence or two."""
    claims = sort_claims(chapter)
    if claims is None:
        return None
    base, (_, clear, narrow, open_) = chapter.tested, claims
    best, says = name(claims.best), list[Inline]()
    if clear:
        beyond = f" {base.where}, and by more than other test images would change. "
        says += ["Yes, that ", best, " is better than ", *_names(clear), beyond]
    if narrow:
        says += ["Likely, that ", best, " is better than ", *_names(narrow), f" {base.where}: {doubt(base)}. "]
    if open_:
        says += ["Undecided, whether ", best, " is better than ", *_names(open_), f" {base.where}."]
    return el("p", *says) if says else None


def _names(labels: Sequence[str]) -> list[Inline]:
    return listed([[name(label)] for label in labels])


def grounds(chapter: DatasetResults) -> Iterator[Caveat]:
    rows = chapter.peers
    fewest = min(len(row.runs) for row in rows)
    if fewest < ENOUGH:
        yield Caveat(
            "seeds",
            False,
            f"Only {plural(fewest, 'seed')} where {ENOUGH} are needed to tell a method's worth from luck.",
        )
    else:
        every = "or more of every method" if len(rows) > 1 else "of the method"
        yield Caveat("seeds", True, f"{plural(fewest, 'seed')} {every}; all that can be read are counted.")
    if len(rows) > 1:
        yield budget(rows)
        yield from second_stages(rows)
    if outside := [row.label for row in chapter.rows if row not in rows]:
        yield Caveat(
            "left-out",
            False,
            f"On other images, or of another length, and so outside the comparison: {', '.join(outside)}.",
        )
    yield held_out(rows)
    yield test_noise(chapter)
    if len(rows) >= CROWD:
        yield Caveat(
            "chance",
            False,
            f"Of {len(rows)} methods the best has had luck too: its lead over the next is likely smaller.",
        )
    yield from provenance(rows)


def budget(rows: Sequence[ResultRow]) -> Caveat:
    """Do the methods differ in anything but the method?"""
    trees = [{k: v for k, v in row.runs[0].config.identity().items() if k != "method"} for row in rows]
    fields = sorted(
        {f for tree in trees for f in differences(trees[0], tree)} - {"views.key"}
    )  # not all have two views
    if fields:
        return Caveat("training", False, f"The methods differ in more than the method: {', '.join(fields)}.")
    epochs = rows[0].runs[0].config.train.epochs
    says = f"All methods had the same images, augmentation, network and optimizer for {plural(epochs, 'epoch')}."
    return Caveat("training", True, says + _views(rows))


def _views(rows: Sequence[ResultRow]) -> str:
    """Contrastive methods see two views of an image in a step."""
    two = [row.label for row in rows if isinstance(row.runs[0].config.method, Contrast)]
    return f" Of each image {' and '.join(two)} saw two views a step." if 0 < len(two) < len(rows) else ""


def second_stages(rows: Sequence[ResultRow]) -> Iterator[Caveat]:
    """What some methods were trained beyond the common epochs."""
    more = {row.label: row.runs[0].config.method.second_epochs for row in rows}
    extra = [f"{label} {plural(epochs, 'epoch')}" for label, epochs in more.items() if epochs]
    if extra:
        yield Caveat("second-stage", False, f"Beyond these epochs some had a second stage: {', '.join(extra)}.")
    if hasty := [label for label, epochs in more.items() if 0 < epochs < SHORT]:
        yield Caveat("short-stage", False, f"A second stage this short tells little of a method: {', '.join(hasty)}.")


def held_out(rows: Sequence[ResultRow]) -> Caveat:
    shares = {row.held_out for row in rows}
    if 0 in shares:
        who = "No validation images were held out" + ("" if len(shares) == 1 else " for some methods")
        return Caveat(
            "validation",
            False,
            f"{who}: whatever is chosen by these figures (a method, a setting) is chosen on the test set.",
        )
    return Caveat("validation", True, "Validation images were held out: settings could be chosen without the test set.")


def test_noise(chapter: DatasetResults) -> Caveat:
    """What another test set of the same size would change: the share of right answers among n images has its own spread."""
    base, best = chapter.tested, contest(chapter.peers, chapter.tested.metric).best
    if base.images is None:
        return Caveat(
            "test-images",
            False,
            "The runs do not tell how many test images there are: what others would change is not known.",
        )
    half = figure_noise(best, base)
    moved = f"another such set would move a figure by ±{NBSP}{max(half, 0.1):.1f} points or so"
    if base.too_few:
        return Caveat("test-images", False, f"{_size(chapter)}, {_too_few(chapter)}: {moved}.")
    alike = ", mostly that of all methods in one direction" if len(chapter.peers) > 1 else ""
    return Caveat("test-images", half < 2 and base.images >= SOUND, f"{_size(chapter)}: {moved}{alike}.")


def provenance(rows: Sequence[ResultRow]) -> Iterator[Caveat]:
    """Where the runs come from, and what was said when their data were read."""
    runs = [run for row in rows for run in row.runs]
    for key in ("commit", "device", "precision"):
        values = sorted({str(run.environment.get(key)) for run in runs})
        if len(values) > 1:
            yield Caveat("unequal-runs", False, f"The runs differ in {key}: {', '.join(values)}.")
    if any(str(run.environment.get("commit")).endswith("-dirty") for run in runs):
        yield Caveat("uncommitted", False, "Some runs come from a source tree with changes that no commit has.")
    if lost := max(map(reading.skipped, runs)):
        yield Caveat(
            "skipped-images",
            False,
            f"{plural(lost, 'image')} could not be read and {'was' if lost == 1 else 'were'} left out.",
        )
    for note in dict.fromkeys(note for run in runs for note in run.environment["data"].get("notes", [])):
        yield Caveat("data-notes", False, f"On the data: {note}")
