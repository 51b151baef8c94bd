"""Results in sentences: which method is best, by how much, how reliable that is, and whether PaCo is worth its cost."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from longtail import run_folder
from longtail.config import ContrastSettings, DistillationSettings, NCLSettings, ThreeViewSettings, differences
from longtail.metrics import SHOT_GROUPS
from longtail.reporting import run_artifacts
from longtail.reporting.dataset_results import DatasetResults, group_by_dataset
from longtail.reporting.html import NBSP, Element, Inline, el, format_count, format_difference, join_items, user_text
from longtail.reporting.result_rows import ResultRow, format_mean_std
from longtail.reporting.significance import (
    MIN_IMAGES_FOR_GOOD,
    MIN_SEEDS,
    TOO_FEW_TO_DECIDE,
    Ranking,
    SeedComparison,
    Support,
    accuracy_half_width,
    exceeds_test_set_noise,
    explain_doubt,
    judge_paco,
    overall_support,
    rank_methods,
)

MANY_METHODS = 6  # with so many methods, the margin of the best is noticeably biased upward
MIN_STAGE_EPOCHS = 5  # a shorter second stage is too short to judge a method
MAX_GOOD_HALF_WIDTH = 2  # points; a wider interval over test sets is not called good

# Best methods


def summarize(dataset: DatasetResults) -> list[Element]:
    """Return a paragraph on the rare classes and one on all test images, with cautions about the test set."""
    openings, support, paragraphs = {"top1": "Over all test images, "}, dataset.support, list[Element]()
    if group := dataset.rare_group:
        details = f"; {support}" if support.metric == group else ""
        openings = {group: f"On rare classes ({SHOT_GROUPS[group].description} training images{details}), "} | openings
    describe = describe_single if len(dataset.comparable) == 1 else describe_ranking
    for metric, opening in openings.items():
        paragraphs.append(el("p", opening, *describe(dataset.comparable, metric)))
        if metric == support.metric:
            paragraphs += map(_caution, test_set_cautions(dataset))
    if any(rank_methods(dataset.comparable, metric).with_outcome("ahead", "tied", "behind") for metric in openings):
        legend = "± is the 95 % interval of the seed-paired difference on these test images; tied: the interval contains zero."
        paragraphs.append(el("p", legend, class_="small"))
    return paragraphs


def describe_single(rows: Sequence[ResultRow], metric: str) -> list[Inline]:
    """Describe the accuracy of the only method."""
    (row,) = rows
    seeds = format_count(len(row.values(metric)), "seed")
    accuracy = f"{format_mean_std(row.values(metric))} %".replace(" ", NBSP)
    return [el("strong", row.label), f" has {accuracy} accuracy ({seeds})."]


def describe_ranking(rows: Sequence[ResultRow], metric: str) -> list[Inline]:
    """Describe which method is best, which are tied with it, and its lead over the others."""
    best, others = ranking = rank_methods(rows, metric)
    accuracy = f"{best.mean(metric):.1f}{NBSP}%"
    if not others:
        return [el("strong", best.label), f" has {accuracy}; there is no other method to compare with."]
    if not ranking.with_outcome("ahead", "tied", "behind"):
        return describe_unproven(ranking, metric)
    tied, behind = ranking.with_outcome("tied"), ranking.with_outcome("ahead")
    without_verdict = ranking.with_outcome(None, "behind")
    text: list[Inline] = [el("strong", best.label), f" is best with {accuracy}"]
    if tied:
        items: list[list[Inline]] = [
            [el("strong", row.label), f" ({_format_lead(comparison)})"] for row, comparison in tied
        ]
        text += [", but tied with ", *join_items(items)]
    if behind:
        leads: list[list[Inline]] = [
            [user_text(row.label), f" by {_format_lead(comparison)} points"] for row, comparison in behind
        ]
        text += [". It is" if tied else ",", " ahead of ", *join_items(leads)]
    if without_verdict:
        labels = join_items([[user_text(row.label)] for row, _ in without_verdict])
        text += [". Not compared with ", *labels, ", because there are too few common seeds"]
    return [*text, "."]


def describe_unproven(ranking: Ranking, metric: str) -> list[Inline]:
    """Describe the order of methods when no two of them have enough common seeds for a verdict."""
    best, others = ranking
    top = best.mean(metric)
    leads: list[list[Inline]] = [
        [user_text(row.label), f" by {top - row.mean(metric):.1f} points"] for row, _ in others
    ]
    ending = f". This may be due to chance: a verdict needs {MIN_SEEDS} common seeds."
    return [
        el("strong", best.label),
        f" has the highest accuracy, {top:.1f}{NBSP}%, above ",
        *join_items(leads),
        ending,
    ]


def _format_lead(comparison: SeedComparison) -> str:
    return format_difference(comparison.difference or 0, comparison.half_width)


# Reliability

CaveatKind = Literal[
    "data-notes",  # a note of the data set, for example about duplicates
    "left-out",  # methods that are not compared: other images, or another length of training
    "mixed-runs",  # runs that differ in commit, device or precision
    "second-stage",  # additional epochs of some methods
    "seeds",  # the number of seeds
    "selection-bias",  # with many methods, the margin of the best is biased upward
    "short-stage",  # a second stage of very few epochs
    "skipped-images",  # images that could not be read
    "test-images",  # the number of test images, and the uncertainty that follows from it
    "training",  # whether the methods differ in more than the method
    "uncommitted",  # runs of a source tree with uncommitted changes
    "untested-classes",  # classes without test images
    "validation",  # whether validation images were held out
]


class Caveat(NamedTuple):
    """One reason to trust the results, or to doubt them."""

    kind: CaveatKind
    is_good: bool
    text: str


def reliability(dataset: DatasetResults) -> Element:
    """Return the part of the page on how reliable the results are."""
    items = [
        el(
            "li",
            el("strong", "Good: " if caveat.is_good else "Caution: "),
            caveat.text,
            class_="good" if caveat.is_good else "caution",
            data_kind=caveat.kind,
        )
        for caveat in caveats(dataset)
    ]
    return el("div", el("h3", "How reliable is this?"), conclusion(dataset), el("ul", *items, class_="reliability"))


class Leads(NamedTuple):
    """Labels of the methods that the best one is compared with, by how certain its lead is."""

    best: str
    significant: list[str]
    """The lead exceeds the noise of the seeds and of the test set."""
    likely: list[str]
    """The lead exceeds the noise of the seeds, but not that of the test set, or the number of test images is unknown."""
    inconclusive: list[str]
    """Tied, or without a verdict."""


def group_leads(dataset: DatasetResults) -> Leads | None:
    """Group the leads of the best method on the rare classes (or over all images if there are none) by certainty.

    None if there is only one method or the test set is too small.
    """
    support = dataset.support
    if len(dataset.comparable) == 1 or support.is_too_small:
        return None
    ranking = rank_methods(dataset.comparable, support.metric)
    is_significant = {
        row.label: exceeds_test_set_noise(ranking.best, row, comparison, support)
        for row, comparison in ranking.with_outcome("ahead")
    }
    significant, likely = (
        [label for label, found in is_significant.items() if found is wanted] for wanted in (True, False)
    )
    inconclusive = [row.label for row, _ in ranking.with_outcome("tied", None, "behind")]
    return Leads(ranking.best.label, significant, likely, inconclusive)


def conclusion(dataset: DatasetResults) -> Element | None:
    """Return sentences on which leads are significant, which are likely and which are inconclusive."""
    leads = group_leads(dataset)
    if leads is None:
        return None
    scope, best, sentences = dataset.support.scope, user_text(leads.best), list[list[Inline]]()
    if leads.significant:
        sentences.append([best, " is better than ", *_join_labels(leads.significant), f" {scope} (significant)."])
    if leads.likely:
        doubt = explain_doubt(dataset.support)
        sentences.append([best, " is likely better than ", *_join_labels(leads.likely), f" {scope}, but {doubt}."])
    if leads.inconclusive:
        sentences.append(["Inconclusive: ", best, " against ", *_join_labels(leads.inconclusive), f" {scope}."])
    separated = [part for i, sentence in enumerate(sentences) for part in ([" "] if i else []) + sentence]
    return el("p", *separated) if sentences else None


def _join_labels(labels: Sequence[str]) -> list[Inline]:
    return join_items([[user_text(label)] for label in labels])


def caveats(dataset: DatasetResults) -> Iterator[Caveat]:
    """Yield the reasons to trust the results of a data set, or to doubt them."""
    rows = dataset.comparable
    fewest = min(len(row.runs) for row in rows)
    if fewest < MIN_SEEDS:
        text = f"Only {format_count(fewest, 'seed')}; {MIN_SEEDS} are needed to rule out random variation."
        yield Caveat("seeds", False, text)
    else:
        seeds = format_count(fewest, "seed")
        seeds = f"At least {seeds} of every method" if len(rows) > 1 else f"{seeds} of the method"
        yield Caveat("seeds", True, f"{seeds}; every readable run is included.")
    if len(rows) > 1:
        yield budget_caveat(rows)
        yield from second_stage_caveats(rows)
    if left_out := [row.label for row in dataset.rows if row not in rows]:
        text = f"Not compared, because of different images or a different length of training: {', '.join(left_out)}."
        yield Caveat("left-out", False, text)
    yield validation_caveat(rows)
    yield test_set_caveat(dataset)
    if len(rows) >= MANY_METHODS:
        text = f"With {len(rows)} methods compared, the winner's margin is biased upward."
        yield Caveat("selection-bias", False, text)
    yield from provenance_caveats(rows)


def test_set_cautions(dataset: DatasetResults) -> Iterator[Caveat]:
    """Yield cautions about too few test images, and about rarer classes that have none."""
    if dataset.support.is_too_small:
        yield Caveat("test-images", False, f"{_capitalized_size(dataset)}, {_too_few(dataset)}.")
    for group, classes in dataset.untested_groups.items():
        rarest = f"{format_count(classes, 'class')} with {SHOT_GROUPS[group].description} training images"
        text = f"There are no results for the rarest classes ({rarest}), because they have no test images."
        yield Caveat("untested-classes", False, text)


def _caution(caveat: Caveat) -> Element:
    return el("p", el("strong", "Caution: "), caveat.text, class_="caution", data_kind=caveat.kind)


def _too_few(dataset: DatasetResults) -> str:
    return TOO_FEW_TO_DECIDE if len(dataset.comparable) > 1 else "too few for a reliable result"


def _capitalized_size(dataset: DatasetResults) -> str:
    return dataset.support.size.capitalize()


def budget_caveat(rows: Sequence[ResultRow]) -> Caveat:
    """Return whether the methods were trained with the same settings apart from those of the method."""
    trees = [{k: v for k, v in row.runs[0].config.identity().items() if k != "method"} for row in rows]
    fields = sorted({f for tree in trees for f in differences(trees[0], tree)} - {"views.key"})  # some have one view
    if fields:
        return Caveat("training", False, f"The methods were trained with different settings: {', '.join(fields)}.")
    epochs = format_count(rows[0].runs[0].config.train.epochs, "epoch")
    text = f"All methods were trained for {epochs} with the same images, augmentation, network and optimizer."
    return Caveat("training", True, text + _view_notes(rows))


def _view_notes(rows: Sequence[ResultRow]) -> str:
    """Return sentences on the methods that use several views of each image per step."""
    text = ""
    for views, kind in (("two", ContrastSettings), ("three", ThreeViewSettings)):
        labels = [row.label for row in rows if isinstance(row.runs[0].config.method, kind)]
        if 0 < len(labels) < len(rows):
            text += f" {' and '.join(labels)} used {views} views of each image per step."
    several = [row.label for row in rows if isinstance(row.runs[0].config.method, NCLSettings)]
    if several:
        text += (
            f" {' and '.join(several)} trained several networks, each on its own view; only one of them is evaluated."
        )
    taught = [row.label for row in rows if isinstance(row.runs[0].config.method, DistillationSettings)]
    if taught:
        text += f" {' and '.join(taught)} learned from teachers, whose training is not counted."
    return text


def second_stage_caveats(rows: Sequence[ResultRow]) -> Iterator[Caveat]:
    """Yield caveats about methods that have a second stage after the common epochs."""
    second_epochs = {row.label: row.runs[0].config.method.second_epochs for row in rows}
    extra = [f"{label} {format_count(epochs, 'epoch')}" for label, epochs in second_epochs.items() if epochs]
    if extra:
        yield Caveat("second-stage", False, f"Some methods had a second stage in addition: {', '.join(extra)}.")
    if short := [label for label, epochs in second_epochs.items() if 0 < epochs < MIN_STAGE_EPOCHS]:
        yield Caveat("short-stage", False, f"The second stage is too short to judge the method: {', '.join(short)}.")


def validation_caveat(rows: Sequence[ResultRow]) -> Caveat:
    """Return whether validation images were held out, or cross-validation on the training images took their place."""
    fractions = {row.held_out for row in rows}
    if 0 not in fractions:
        text = "Validation images were held out: settings could be chosen without the test set."
        return Caveat("validation", True, text)
    has_cross_validation = all((row.runs[0].folder / run_folder.CROSS_VALIDATION).exists() for row in rows)
    if has_cross_validation and len(rows) == 1:
        text = "Cross-validation on the training images selected method and settings, without the test set."
        return Caveat("validation", True, text)
    subject = "No validation images were held out" + ("" if len(fractions) == 1 else " for some methods")
    selected = "a method" if has_cross_validation else "a method or a setting"
    found = "cross-validation selected the settings of each method, but " if has_cross_validation else ""
    text = f"{subject}: {found}selecting {selected} by these results means selecting it on the test set."
    return Caveat("validation", False, text)


def test_set_caveat(dataset: DatasetResults) -> Caveat:
    """Return how much the results would change with another test set of the same size."""
    support = dataset.support
    best = rank_methods(dataset.comparable, support.metric).best
    if support.num_images is None:
        text = "The runs do not store the number of test images, so the sampling noise of the test set is unknown."
        return Caveat("test-images", False, text)
    half = accuracy_half_width(best, support)
    noise = f"another test set of this size would change the accuracy by about ±{NBSP}{max(half, 0.1):.1f} points"
    if support.is_too_small:
        return Caveat("test-images", False, f"{_capitalized_size(dataset)}, {_too_few(dataset)}: {noise}.")
    shared = ", mostly in the same direction for all methods" if len(dataset.comparable) > 1 else ""
    is_good = half < MAX_GOOD_HALF_WIDTH and support.num_images >= MIN_IMAGES_FOR_GOOD
    return Caveat("test-images", is_good, f"{_capitalized_size(dataset)}: {noise}{shared}.")


def provenance_caveats(rows: Sequence[ResultRow]) -> Iterator[Caveat]:
    """Yield caveats about differences between the runs, skipped images, and notes on the data."""
    runs = [run for row in rows for run in row.runs]
    for key in ("commit", "device", "precision"):
        values = sorted({str(run.environment.get(key)) for run in runs})
        if len(values) > 1:
            yield Caveat("mixed-runs", False, f"The runs differ in {key}: {', '.join(values)}.")
    if any(str(run.environment.get("commit")).endswith("-dirty") for run in runs):
        yield Caveat("uncommitted", False, "Some runs used a source tree with uncommitted changes.")
    if skipped := max(map(run_artifacts.count_skipped, runs)):
        text = f"{format_count(skipped, 'image')} could not be read and {'was' if skipped == 1 else 'were'} left out."
        yield Caveat("skipped-images", False, text)
    for note in dict.fromkeys(note for run in runs for note in run.environment["data"].get("notes", [])):
        yield Caveat("data-notes", False, f"Data: {note}")


# Terminal


def summary_lines(rows: Sequence[ResultRow]) -> list[str]:
    """Return the summary of the page as lines for a terminal, followed by whether PaCo is worth its cost."""
    lines = []
    for dataset in group_by_dataset(list(rows)):
        lines += ["".join(plain_text(paragraph.children)).replace(NBSP, " ") for paragraph in summarize(dataset)]
        support, overall = dataset.support, overall_support(dataset.comparable[0].runs[0])
        lines += is_paco_worth_it(dataset.comparable, support)
        if support.is_too_small and not overall.is_too_small:
            lines += is_paco_worth_it(dataset.comparable, overall, question="Is PaCo worth it over all test images?")
    return lines


def is_paco_worth_it(rows: Sequence[ResultRow], support: Support, question: str = "Is PaCo worth it?") -> list[str]:
    """Return the verdict on PaCo against the best of the other methods; empty if there is nothing to compare.

    Args:
        rows: Comparable rows.
        support: Classes and images to compare on.
        question: Text before the answer.
    """
    judgment = judge_paco(rows, support)
    if judgment is None:
        return []
    (kind, other, comparison), scope = judgment, support.scope
    if comparison.difference is None or comparison.half_width is None:
        return [f"{question} No verdict: {MIN_SEEDS} common seeds are needed, and there are {len(comparison.seeds)}."]
    if kind == "too-few-images":
        return [f"{question} No verdict: {support.size}, too few to decide."]
    lead = f"{abs(comparison.difference):.1f} ± {comparison.half_width:.1f} points"
    doubt = explain_doubt(support)
    answers = {
        "yes": f"Yes: it is {lead} ahead of the best other method, {other}, {scope} (significant).",
        "likely": f"Likely: it is {lead} ahead of the best other method, {other}, {scope}, but {doubt}.",
        "tied": f"Inconclusive: it is tied with the simpler {other} {scope} (difference {lead}).",
        "likely-not": f"Likely not: it is {lead} behind {other} {scope}, but {doubt}.",
        "no": f"No: it is {lead} behind {other} {scope} (significant).",
    }
    return [f"{question} {answers[kind]}"]


def plain_text(parts: Iterable[Inline]) -> Iterator[str]:
    """Yield the text of elements, without their tags."""
    for part in parts:
        yield from plain_text(part.children) if isinstance(part, Element) else [str(part)]
