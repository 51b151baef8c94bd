"""What was trained on what, and what came out."""

from longtail.report import reading
from longtail.report.by_class import NO_COUNTS, shade_groups
from longtail.report.chapter import GROUPS, Chapter, Classes, mean
from longtail.report.html import Element, el
from longtail.report.parts import Cell, absent, download, figure, name, plural, section, table
from longtail.report.svg import Look, Plot, Scale, swatch
from longtail.report.table import COLUMNS, TIES, Row, caption, standing

SHOTS = ", ".join(f"{group} ({images})" for group, images in GROUPS.items())
RESULTS = ("top1", "few", "medium", "many", "macro_f1", "ece", "knn_top1")  # few early: a phone shows the first two


def data(chapter: Chapter) -> Element:
    """What was trained on what."""
    classes = chapter.classes
    drawn = counts_figure(chapter.data, classes) if classes else absent("drawing of the counts", NO_COUNTS)
    return section("Data and training", el("div", drawn, facts(chapter), class_="grid"))


def counts_figure(title: str, classes: Classes) -> Element:
    n = classes.counts[classes.order]
    top = Scale(0.7, 1.6 * max(int(n.max()), 1), log=True)
    shows = f"{plural(len(classes.counts), 'class')}, from {n.max():,} training images down to {n.min():,}."
    x, labels = Scale(0, len(n)), ("classes, from frequent to rare", "training images")
    plot = Plot("Training images of each class", shows, x, top, *labels, x_ticks=False)
    shade_groups(plot, n)
    names = [f"{classes.names[c]}: {classes.counts[c]:,} images" for c in classes.order]
    plot.bars([(i, i + 0.9, max(float(v), 0.7)) for i, v in enumerate(n)], Look(0), names, base=0.7)
    columns = {"class": [classes.names[c] for c in classes.order], "training images": n.tolist()}
    return figure(plot, "counts", columns, f"{title}; shaded by group: {SHOTS} training images.{classes.some}")


def facts(chapter: Chapter) -> Element:
    first, classes = chapter.peers[0].runs[0], chapter.classes
    config, environment, images_C = first.config, first.environment, reading.tested(first)
    known = {
        "data": chapter.data,
        "training images": f"{environment['data']['images']:,}" if "images" in environment["data"] else None,
        "classes": f"{len(classes.counts):,}" if classes else None,
        "test images": f"{int(images_C.sum()):,}" if images_C is not None else None,
        "held out for validation": f"{100 * config.data.val_fraction:g} %" if config.data.val_fraction else "nothing",
        "network": config.model.name + (", pretrained" if config.model.pretrained else ""),
        "training": f"{config.train.epochs} epochs, batch {config.train.batch_size}, learning rate {config.optim.lr:g}",
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


def results(chapter: Chapter) -> Element:
    """The table, with who is best and who is tied, over all images and on rare classes."""
    marks = {m: standing(chapter.rows, m) for m in ("top1", chapter.rare) if m}
    body = []
    for i, row in enumerate(chapter.rows):
        named = el("span", swatch(chapter.look(row)), " ", name(row.label))
        cells = [Cell(row.cell(m), _sorted_by(row, m), marks[m][i] if m in marks else "") for m in RESULTS]
        body.append([Cell(named), *cells, Cell(str(len(row.runs)), len(row.runs))])
    head = ["method", *(COLUMNS[m][0] for m in RESULTS), "seeds"]
    said = caption(RESULTS, chapter.peers) + (f" {TIES}" if any(map(any, marks.values())) else "")
    columns = {"method": [row.label for row in chapter.rows]} | {
        m: [_sorted_by(row, m) for row in chapter.rows] for m in RESULTS
    }
    below = el("p", said, " ", download("results", columns), class_="small")
    return section("Results", table(head, body, "Accuracy in percent, mean ± standard deviation over seeds"), below)


def _sorted_by(row: Row, metric: str) -> float | None:
    return mean(row, metric) if row.values(metric) else None
