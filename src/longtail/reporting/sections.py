"""What was trained on what, and what came out."""

from collections.abc import Iterator, Sequence

from longtail.config import Contrast, ViewConfig
from longtail.reporting import reading
from longtail.reporting.by_class import NO_COUNTS, shade_groups
from longtail.reporting.chapter import GROUPS, Classes, DatasetResults, mean
from longtail.reporting.html import Element, el
from longtail.reporting.parts import TableCell, absent, download, figure, folded, name, plural, section, table
from longtail.reporting.svg import Plot, Scale, SeriesStyle, swatch
from longtail.reporting.table import COLUMNS, ResultRow, caption, standing
from longtail.reporting.ties import explained
from longtail.run_folder import FinishedRun

SHOTS = ", ".join(f"{group} ({images})" for group, images in GROUPS.items())
RESULTS = ("top1", "few", "medium", "many", "macro_f1", "ece", "knn_top1")  # few early: a phone shows the first two


def data(chapter: DatasetResults) -> Element:
    """What was trained on what."""
    classes = chapter.classes
    drawn = counts_figure(chapter.data, classes) if classes else absent("drawing of the counts", NO_COUNTS)
    return section("Data and training", el("div", drawn, facts(chapter), class_="grid"), settings(chapter))


def counts_figure(title: str, classes: Classes) -> Element:
    n = classes.counts[classes.order]
    top = Scale(0.7, 1.6 * max(int(n.max()), 1), log=True)
    shows = f"{plural(len(classes.counts), 'class')}, from {n.max():,} training images down to {n.min():,}."
    x, labels = Scale(0, len(n)), ("classes, from frequent to rare", "training images")
    plot = Plot("Training images of each class", shows, x, top, *labels, x_ticks=False)
    shade_groups(plot, n)
    names = [f"{classes.names[c]}: {classes.counts[c]:,} images" for c in classes.order]
    plot.bars([(i, i + 0.9, max(float(v), 0.7)) for i, v in enumerate(n)], SeriesStyle(0), names, base=0.7)
    columns = {"class": [classes.names[c] for c in classes.order], "training images": n.tolist()}
    return figure(plot, "counts", columns, f"{title}; shaded by group: {SHOTS} training images.{classes.some}")


def facts(chapter: DatasetResults) -> Element:
    first, classes = chapter.peers[0].runs[0], chapter.classes
    config, environment, images_C = first.config, first.environment, reading.tested(first)
    shares = {row.held_out for row in chapter.peers}
    known = {
        "data": chapter.data,
        "training images": images_of(chapter.peers),
        "classes": f"{len(classes.counts):,}" if classes else None,
        "test images": f"{int(images_C.sum()):,}" if images_C is not None else None,
        "held out for validation": ", or ".join(f"{100 * s:g} %" if s else "nothing" for s in sorted(shares)),
        "network": config.model.name + (", pretrained" if config.model.pretrained else ""),
        "training": f"{plural(config.train.epochs, 'epoch')} of {config.train.batch_size} images a step",
        "device": f"{environment.get('device', '–')}, {environment['precision']}",
        "started": environment["started"],
        "checksum of the images": environment["data"]["checksum"],
        "commit": environment.get("commit"),
        "run folders": ", ".join(sorted({str(run.folder.parent) for row in chapter.rows for run in row.runs})),
    }
    pairs = [
        el("div", el("dt", key), el("dd", name(str(value), most=1000)))
        for key, value in known.items()
        if value is not None
    ]
    return el("dl", *pairs, class_="facts")


def images_of(rows: Sequence[ResultRow]) -> str | None:
    """As many as were learned from; methods that held some out had fewer."""
    seen = {row.runs[0].environment["data"].get("images") for row in rows} - {None}
    return " to ".join(f"{n:,}" for n in sorted({min(seen), max(seen)})) if seen else None


def settings(chapter: DatasetResults) -> Element:
    """What each method was trained with, folded away."""
    body = [[TableCell(name(row.label)), *map(TableCell, _settings(row.runs[0]))] for row in chapter.rows]
    head = ["method", "its own settings", "augmentation", "optimizer"]
    return folded("Settings of each method", table(head, body, "As stored in config.json of the first seed"))


def _settings(run: FinishedRun) -> Iterator[str]:
    config, chosen = run.config, run.environment.get("chosen") or {}
    own = {key: value for key, value in config.identity()["method"].items() if key != "name"}
    if own.get("alpha") == "auto" and "alpha" in chosen:
        own["alpha"] = f"auto ({chosen['alpha']:.3g})"
    yield ", ".join(f"{key} {_plain(value)}" for key, value in own.items()) or "–"
    query, key = (_view(view) for view in (config.views.query, config.views.key))
    yield f"{query}; second view: {key}" if isinstance(config.method, Contrast) and key != query else query
    optim = config.optim
    how = f"{optim.name.upper()}, rate {optim.lr:g}, {optim.schedule}, weight decay {optim.weight_decay:g}"
    more = config.method.second_epochs
    yield how + (f"; then {plural(more, 'epoch')} of a second stage" if more else "")


def _view(view: ViewConfig) -> str:
    crop = f"{view.crop} crop" if view.crop != "none" else ""
    extras = {"flip": view.flip, f"{view.policy} policy": view.policy != "none", f"cutout {view.cutout}": view.cutout}
    return ", ".join(filter(None, [crop, *(word for word, has in extras.items() if has)])) or "none"


def _plain(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no"}.get(value, "–")  # type: ignore[arg-type]
    if isinstance(value, list | tuple):
        return " ".join(map(_plain, value)) or "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


def results(chapter: DatasetResults) -> Element:
    """The table, with who is best and who is tied, over all images and on rare classes."""
    marks = {m: standing(chapter.rows, m) for m in ("top1", chapter.rare) if m}
    body = []
    for i, row in enumerate(chapter.rows):
        named = el("span", swatch(chapter.look(row)), " ", name(row.label))
        cells = [TableCell(row.cell(m), _sorted_by(row, m), marks[m][i] if m in marks else "") for m in RESULTS]
        body.append([TableCell(named), *cells, TableCell(str(len(row.runs)), len(row.runs))])
    head = ["method", *(COLUMNS[m][0] for m in RESULTS), "seeds"]
    said = caption(RESULTS, chapter.peers) + explained({word for words in marks.values() for word in words})
    columns = {"method": [row.label for row in chapter.rows]} | {
        m: [_sorted_by(row, m) for row in chapter.rows] for m in RESULTS
    }
    below = el("p", said, " ", download("results", columns), class_="small")
    return section("Results", table(head, body, "Accuracy in percent, mean ± standard deviation over seeds"), below)


def _sorted_by(row: ResultRow, metric: str) -> float | None:
    return mean(row, metric) if row.values(metric) else None
