"""One table of many runs: a row per configuration, mean ± standard deviation over its seeds."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from longtail import files, run_folder
from longtail.config import differences
from longtail.errors import UserError, error_text, unknown_name
from longtail.metrics import mean_std
from longtail.reporting.tested import few_rests_on
from longtail.reporting.ties import ComparisonKey, explained, rank_labels, why_not_comparable
from longtail.text import escape_markdown, escape_nonprintable

# metric -> (heading, digits after the point)
COLUMNS = {
    "top1": ("all", 1),
    "many": ("many", 1),
    "medium": ("medium", 1),
    "few": ("few", 1),
    "macro_f1": ("F1", 1),
    "ece": ("ECE", 1),
    "knn_top1": ("k-NN", 1),
    "seconds": ("seconds", 0),
    "latency_b64": ("ms", 1),
    "parameters": ("parameters", 0),
}
WIDE = {"ece": 100, "seconds": 130, "latency_b64": 130, "parameters": 130, "macro_f1": 170, "knn_top1": 170}
"""Columns of a terminal that a column is shown from; what there is no room for stands in table.md (`longtail table`)."""
SAYS = {
    "top1": "accuracy over all images, and mean over classes with many (>100), medium (20-100) and few (<20) training images",
    "macro_f1": "macro F1",
    "ece": "expected calibration error (lower is better)",
    "knn_top1": "k-NN accuracy of the features",
    "seconds": "seconds of training",
    "latency_b64": "milliseconds for a batch of 64",
}


def caption(
    shown: Collection[str], rows: Sequence["ResultRow"] = (), escape: Callable[[object], str] = escape_nonprintable
) -> str:
    """Return a caption that explains the columns and the test images behind `few`; `escape` is applied to names."""
    words = "; ".join(SAYS[c] for c in shown if c in SAYS)
    if "top1" not in shown:  # the rest of a table that has said so
        return f"{words.capitalize()}."
    spreads = "Mean ± standard deviation over seeds; – where there is nothing."
    return f"Last epoch, test set, in percent: {words}. {spreads}" + few_rests_on(
        ((row.data, row.runs[0]) for row in rows), escape
    )


@dataclass(frozen=True)
class ResultRow:
    """The runs of one configuration."""

    data: str
    label: str
    runs: tuple[run_folder.FinishedRun, ...]

    def values(self, metric: str) -> list[float]:
        """Of the runs that have it; parameters are the network's, and stand with its environment."""
        found = [r.metrics.get(metric, r.environment.get(metric)) for r in self.runs]
        return [value for value in found if value is not None]

    @property
    def held_out(self) -> float:
        return self.runs[0].config.data.val_fraction

    def note(self, others: set[float]) -> str:
        """A method that learned from fewer images than others did says so."""
        return f", {100 * self.held_out:g} % held out" if self.held_out and len(others) > 1 else ""

    def by_seed(self, metric: str = "top1") -> dict[int, float]:
        return {r.seed: value for r in self.runs if (value := r.metrics.get(metric)) is not None}

    def cell(self, metric: str) -> str:
        """As tables show it; `metric` by its name in metrics.json, or as tables head it."""
        key = {heading: name for name, (heading, _) in COLUMNS.items()}.get(metric, metric)
        if key not in COLUMNS:
            raise unknown_name("metric", metric, COLUMNS)
        return figure(key, self.values(key))

    def to_dict(self) -> dict[str, Any]:
        stats = {m: mean_std(self.values(m)) if self.values(m) else (None, None) for m in COLUMNS}
        return {
            "data": self.data,
            "method": self.label,
            "config": self.runs[0].config.identity(),
            "seeds": [r.seed for r in self.runs],
            "commits": sorted({str(r.environment.get("commit")) for r in self.runs}),
            "devices": sorted({str(r.environment.get("device")) for r in self.runs}),
            "folders": [str(r.folder) for r in self.runs],
            "metrics": {m: {"mean": mean, "std": std, "values": self.values(m)} for m, (mean, std) in stats.items()},
        }


def figure(metric: str, values: Sequence[float]) -> str:
    """A metric over seeds; all of them have the same number of parameters."""
    return format_mean_std(values[:1] if metric == "parameters" else values, COLUMNS[metric][1])


def format_mean_std(values: Sequence[float], digits: int = 1) -> str:
    """Mean ± standard deviation as tables print it; – where there is nothing."""
    if not values:
        return "–"
    mean, std = mean_std(values)
    return f"{mean:,.{digits}f}" + (f" ± {std:,.{digits}f}" if std is not None else "")


def make_rows(records: Sequence[run_folder.FinishedRun]) -> list[ResultRow]:
    """Runs that differ in nothing but the seed make one row; where a seed was run twice, the later run counts."""
    groups: dict[str, dict[int, run_folder.FinishedRun]] = {}
    for record in sorted(records, key=lambda r: r.environment["started"]):
        groups.setdefault(_key(record), {})[record.seed] = record
    seeds = [tuple(by_seed[s] for s in sorted(by_seed)) for by_seed in groups.values()]
    rows = [ResultRow(data_name(g[0]), g[0].config.method.label, g) for g in seeds]
    alike: dict[tuple[str, str], list[ResultRow]] = {}
    for row in rows:
        alike.setdefault((row.data, row.label), []).append(row)
    held = {row.data: {other.held_out for other in rows if other.data == row.data} for row in rows}
    named = [
        ResultRow(row.data, row.label + row.note(held[row.data]) + _apart(row, alike[row.data, row.label]), row.runs)
        for row in rows
    ]
    return sorted(named, key=lambda row: (row.data, sum(row.values("top1")) / len(row.runs)))


def _key(run: run_folder.FinishedRun) -> str:
    """Equal for repetitions: the configuration, and what it came to: the images with their classes, and the precision."""
    return json.dumps(_traits(run) | {"classes": len(run.metrics["per_class"])}, sort_keys=True)


def _traits(run: run_folder.FinishedRun) -> dict[str, Any]:
    came_to = {"images": run.environment["data"]["checksum"], "precision": run.environment["precision"]}
    return run.config.identity() | came_to


def _apart(row: ResultRow, alike: list[ResultRow]) -> str:
    """What this row has that rows of the same name have not, as ' (alpha=0.02, lr=0.1)'; what it held out its note has said."""
    every = [_traits(other.runs[0]) for other in (row, *alike)]
    mine, *others = ({**one, "data": {**one["data"], "val_fraction": 0}} for one in every)
    return apart(mine, others)


def apart(here: dict[str, Any], others: Iterable[dict[str, Any]]) -> str:
    """The fields in which `here` differs from any of the others, in brackets; nothing where it differs in none."""
    fields = {f: pair[0] for other in others for f, pair in differences(here, other).items()}
    return " (" + ", ".join(f"{f}={v}" for f, v in sorted(fields.items())) + ")" if fields else ""


def data_name(run: run_folder.StartedRun) -> str:
    """The data of a run, as a reader of the table would say it."""
    data = run.config.data
    place = data.train_list.with_suffix("") if data.train_list else data.root
    name = place.resolve().name if data.name in ("folder", "list", "shards") and place else data.name
    return f"{name}-lt, imbalance {data.imbalance:g}" if data.imbalance > 1 else name


def standing(rows: Sequence[ResultRow], metric: str = "top1") -> list[str]:
    """Of each row, among those of its data on the same images and of the same length; or that it is not one of them."""
    words = why_not_comparable([place_of(row) for row in rows])
    for data in {row.data for row in rows}:
        here = [i for i, row in enumerate(rows) if row.data == data and not words[i]]
        for i, word in zip(here, rank_labels([rows[i].by_seed(metric) for i in here]), strict=True):
            words[i] = word
    return words


def place_of(row: ResultRow) -> ComparisonKey:
    return ComparisonKey(row.data, row.runs[0].environment["data"]["checksum"], row.runs[0].config.train.epochs)


class Dot(NamedTuple):
    """A method's figures as pictures need them: for each metric one per seed, and how it stands."""

    label: str
    word: str
    values: Mapping[str, Sequence[float]]
    paper: float | None = None
    """The published accuracy, where there is one."""


def make_dots(rows: Sequence[ResultRow]) -> dict[str, list[Dot]]:
    """By data, in the order of the rows."""
    panels: dict[str, list[Dot]] = {}
    for row, word in zip(rows, standing(rows), strict=True):
        panels.setdefault(row.data, []).append(Dot(row.label, word, {m: row.values(m) for m in COLUMNS}))
    return panels


def to_markdown(rows: Sequence[ResultRow]) -> str:
    head = ["data", "method", "seeds", *(heading for heading, _ in COLUMNS.values())]
    body = [[row.data, row.label, str(len(row.runs)), *map(row.cell, COLUMNS)] for row in rows]
    words = standing(rows)
    if not any(words):
        return markdown(head, body, 2) + f"\n\n{caption(COLUMNS, rows, escape_markdown)}\n"
    head.insert(2, "")
    for line, word in zip(body, words, strict=True):
        line.insert(2, word)
    return markdown(head, body, 3) + f"\n\n{caption(COLUMNS, rows, escape_markdown)}{explained(words)}\n"


def markdown(head: list[str], body: list[list[str]], words: int = 1) -> str:
    """A Markdown table whose first columns, `words` of them, are words and the others numbers."""
    lines = [head, ["---"] * words + ["---:"] * (len(head) - words), *body]
    escaped = [[escape_markdown(cell) for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped)


def to_rich(rows: Sequence[ResultRow], width: int = 150) -> Table:
    """For a terminal of so many columns."""
    shown = [c for c in COLUMNS if width >= WIDE.get(c, 0)]
    cells = [[row.cell(c) if width >= 100 else row.cell(c).replace(" ", "") for c in shown] for row in rows]
    one = len({row.data for row in rows}) == 1  # then it stands above, and leaves the width to the numbers
    words = standing(rows)
    said = [word for word in words if word]
    below = (
        caption(shown, rows)
        + explained(words)
        + ("" if len(shown) == len(COLUMNS) else " More in the table.md that `longtail table` writes.")
    )
    table = Table(
        title=plain(rows[0].data) if one else None, caption=Text(below), title_justify="left", caption_justify="left"
    )
    for heading in [*([] if one else ["data"]), "method", *([""] if said else []), "seeds"]:
        table.add_column(heading, min_width=5 if heading else 4)
    for column in shown:
        table.add_column(COLUMNS[column][0], justify="right", no_wrap=True)
    for row, word, values in zip(rows, words, cells, strict=True):
        names = [plain(row.label)] if one else [plain(row.data), plain(row.label)]
        table.add_row(*names, *([word] if said else []), str(len(row.runs)), *values)
    return table


def plain(words: str) -> Text:
    """A name as it is: brackets in it are no markup, and what a terminal would obey is spelled out."""
    return Text(escape_nonprintable(words))


def cost_table(rows: Sequence[ResultRow], width: int = 150) -> Table | None:
    """What the methods cost, where the terminal is too narrow to have it beside their accuracy."""
    columns = [c for c in ("ece", "seconds", "latency_b64", "parameters") if width < WIDE[c]]
    if not columns:
        return None
    table = Table(caption=caption(columns), caption_justify="left")
    table.add_column("method")
    for column in columns:
        table.add_column(COLUMNS[column][0], justify="right", no_wrap=True)
    for row in rows:
        table.add_row(plain(row.label), *(row.cell(c).replace(" ", "") for c in columns))
    return table


def shifted_table(rows: Sequence[ResultRow], width: int = 150) -> Table:
    """Accuracy if the test set were as long-tailed as the training set (forward) or the other way round (backward)."""
    caption = (
        "Accuracy under shifted test priors: for. (forward), the training head is frequent in the test too; "
        "bac. (backward), its tail is."
    )
    table = Table(caption=caption, caption_justify="left")
    table.add_column("method")
    first = rows[0].runs[0].metrics["shifted"]
    forward, backward = reversed(first["forward"]), first["backward"]
    keys = [("forward", f) for f in forward] + [("uniform", "")] + [("backward", f) for f in backward]
    if width < 130:
        keys = [keys[0], keys[len(keys) // 2], keys[-1]]
    for direction, factor in keys:
        table.add_column(f"{direction[:3]}. {factor}" if factor else direction, justify="right")
    for row in rows:
        shifts = [r.metrics["shifted"] for r in row.runs]
        values = [[v for s in shifts if (v := s[d].get(f) if f else s[d]) is not None] for d, f in keys]
        table.add_row(plain(row.label), *(f"{mean_std(v)[0]:.1f}" if v else "–" for v in values))
    return table


def table(paths: Iterable[Path | str] | Path | str, out: Path | str | None = None) -> list[ResultRow]:
    """The finished runs below `paths` as rows; written to OUT/table.md and OUT/table.json where `out` is given."""
    rows = make_rows(run_folder.read_finished(paths))
    if out is not None:
        write_table(rows, Path(out))
    return rows


def write_table(rows: Sequence[ResultRow], out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        files.write_text(out / "table.md", to_markdown(rows))
        files.write_json(out / "table.json", [row.to_dict() for row in rows])
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot write the table to {out} ({error_text(error)}): choose another --out", kind="not-writable"
        ) from error
