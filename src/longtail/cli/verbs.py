"""What each verb does: it understands its arguments first, and imports torch only then."""

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from longtail import files, recipes, run_folder
from longtail.cli.arguments import (
    Compare,
    Demo,
    Eval,
    FigureArgs,
    Inspect,
    Recipes,
    ReportArgs,
    Reproduce,
    Shard,
    TableArgs,
    Theory,
    Watch,
)
from longtail.cli.chosen import SHARED, budget_for, contrast_for, expected, sections_of, train_arguments
from longtail.cli.parsing import check_path, name_first, not_both, parse, scanned
from longtail.cli.screen import console, show_tables
from longtail.config import Config
from longtail.errors import UserError, error_text, unknown_name
from longtail.progress import columns, wrapped


def run_train(args: list[str]) -> None:
    name, given, config = train_arguments(args)

    from longtail.distributed import is_main_process
    from longtail.engine.train import train
    from longtail.reporting.table import table

    chosen = (given.setting, given.network, given.augment)
    out = given.out or default_out(name, given.method_name or config.method.name, config, *chosen)
    folders = train(config, out, given.resume)
    if is_main_process():
        show_tables(table(folders))
        print(f"written to {out}")
        run = shlex.quote(str(out))
        print(
            f"next: longtail report {run} -o report.html, longtail predict {run} IMAGES, longtail export {run} --to onnx"
        )


def default_out(name: str, method: str, config: Config, *chosen: str | None) -> Path:
    factor = config.data.imbalance
    drawn = f"{factor:g}" if factor > 1 or not recipes.is_user_data(name) else None
    return Path("runs") / "-".join(filter(None, [run_folder.short_name(name), method, drawn, *chosen]))


def run_eval(args: list[str]) -> None:
    given = parse(Eval, "eval", args)

    from longtail.engine.evaluate import evaluate
    from longtail.reporting.table import table

    folders = list(evaluate(given.run, given.data_root, given.device))
    show_tables(table(folders))


def run_table(args: list[str]) -> None:
    given = parse(TableArgs, "table", args)
    if not given.runs:
        raise UserError("name the runs, as in `longtail table runs`")

    from longtail.reporting.table import table, to_rich

    out = given.out or given.runs[0]
    screen = console()
    screen.print(to_rich(table(given.runs, out), screen.width))
    print(f"written to {out}/table.md and {out}/table.json")


def run_report(args: list[str]) -> None:
    given = parse(ReportArgs, "report", args)
    if not given.runs:
        raise UserError("name the runs, as in `longtail report runs -o report.html`")

    from longtail.reporting.document import report

    print(f"written to {report(given.runs, given.out)}")


def run_figure(args: list[str]) -> None:
    given = parse(FigureArgs, "figure", args)
    if not given.name:
        raise UserError("name the figure, latency, gradient, framework or extra: as in `longtail figure extra`")

    from longtail.paper.figures import figure

    print(f"written to {figure(given.name, given.runs, given.out)}")


def run_watch(args: list[str]) -> None:
    given = parse(Watch, "watch", args)
    if not given.runs:
        raise UserError("name the runs, as in `longtail watch runs`")

    from longtail.reporting.server import watch

    watch(given.runs, given.port)


def run_demo(args: list[str]) -> None:
    given = parse(Demo, "demo", args)

    from longtail.demo_run import demo, verdict
    from longtail.reporting.table import to_rich

    rows = demo(given.out, given.seeds)
    screen = console()
    screen.print(to_rich(rows, screen.width))
    print(*verdict(rows, given.out), sep="\n")


def run_compare(args: list[str]) -> None:
    name = name_first("compare", args)
    not_both(args, ("--epochs", "--train.epochs"), ("--seeds", "--train.seeds"), ("--imbalance", "--data.imbalance"))
    config = recipes.equal_budget(name, imbalance=scanned(args[1:], imbalance=float)["imbalance"])
    given, budget = parse(Compare, "compare", args, Compare(images=name, **sections_of(config, *SHARED))), None
    if recipes.is_user_data(name):
        budget, seeds = budget_for(name, args, given), config.train.seeds
        config = budget("ce")
        config = replace(config, train=replace(config.train, seeds=seeds))
        given = parse(Compare, "compare", args, Compare(images=name, **sections_of(config, *SHARED)))

    from longtail.comparison import compare, default_out
    from longtail.reporting.table import cost_table, to_rich
    from longtail.reporting.verdict import verdict

    def change(config: Config) -> Config:
        return replace(config, **sections_of(given, *SHARED))

    out, screen = given.out or default_out(name, change(config)), console()
    rows = compare(name, given.methods, out, given.seeds, given.imbalance, given.epochs, change, budget)
    screen.print(to_rich(rows, screen.width))
    if cost := cost_table(rows, screen.width):
        screen.print(cost)
    print(*(wrapped(line, columns()) for line in verdict(rows)), sep="\n")
    print(f"written to {out}/table.md, {out}/table.json and {out}/comparison.png")
    print(f"all of it, and whether to believe it, on one page: {out}/report.html")
    best = rows[-1]
    run = shlex.quote(str(best.runs[0].folder.parent))
    print(
        f"next, with the best over all ({best.label}) or another: longtail predict {run} IMAGES, longtail export {run}"
    )


def run_reproduce(args: list[str]) -> None:
    given = dict(vars(parse(Reproduce, "reproduce", args)))

    from longtail.paper.reproduce import reproduce
    from longtail.paper.results_page import to_rich
    from longtail.reporting.cells import lengths, pictures

    tree = reproduce(given.pop("table"), **given)
    screen, place = console(), given["results"] / tree["name"].replace("-", "_")
    for headline in to_rich(tree, screen.width):
        screen.print(headline)
    drawn = [given["results"] / p.name for epochs in lengths(tree) for p in pictures(tree, epochs).values()]
    print("written to", " and ".join(map(str, [f"{place}.json", f"{place}.md", *drawn])))


def run_data(args: list[str]) -> int | None:
    if not args or args[0] in ("-h", "--help"):
        print("longtail data inspect DATA            what it holds, and what is wrong with it")
        print("longtail data shard DATA --out DIR    the same as parquet shards")
        return 0
    if args[0] not in DATA_VERBS:
        raise unknown_name("command", f"data {args[0]}", [f"data {verb}" for verb in DATA_VERBS])
    return DATA_VERBS[args[0]][1](args[1:])


def run_inspect(args: list[str]) -> int:
    """1, where an image cannot be read: a training would stop there."""
    name = name_first("data inspect", args)
    given = parse(Inspect, "data inspect", args, Inspect(images=name, data=recipes.make(name).data))

    from longtail.cli.inspected import show
    from longtail.data.inspection import inspect

    check_writable(json=given.json)
    found = inspect(given.data, given.quick)
    show(found, console())
    if recipes.is_user_data(name) and (given.quick or found.read):
        print("", *expected(name, args, given, not found.unreadable), sep="\n")
    if given.json:
        with writing(given.json):
            files.write_output_json(given.json, found.to_dict())
        print(f"written to {given.json}")
    return 1 if found.unreadable else 0


def check_writable(**outputs: Path | None) -> None:
    """Before the work is done whose result goes there."""
    for flag, file in outputs.items():
        if file and (os.path.isdir(file) or not os.access(file.absolute().parent, os.W_OK)):
            raise UserError(
                f"--{flag} {file}: name a file in a folder that is there and can be written", kind="not-writable"
            )


@contextlib.contextmanager
def writing(file: Path) -> Iterator[None]:
    """A disk that has gone away in the meantime; a full one is told of where it is written to."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {file} ({error_text(error)}): name another file", kind="not-writable") from error


def run_theory(args: list[str]) -> None:
    given = dict(vars(parse(Theory, "theory", args)))
    json, figure, counts = (given.pop(name) for name in ("json", "figure", "counts"))
    check_writable(json=json, figure=figure)
    check_path(given["recipe"] or "")

    from longtail.cli.theorised import show
    from longtail.paper.figures import check_out
    from longtail.theory import table

    if figure:
        check_out("theory", figure, "--figure")
    name = given["recipe"]
    if name and recipes.is_user_data(name) and given["setting"] is None:
        given |= {what: n for what, n in contrast_for(name).items() if given[what] is None}
    found = table(counts=counts_given(counts), **given)
    show(found, console())
    if json:
        with writing(json):
            files.write_output_json(json, found.to_dict())
    if figure:
        from longtail.paper import theory_figures

        with writing(figure):
            theory_figures.draw_theory(
                found.counts, found.positives["expected"], [o.alpha for o in found.optima], figure
            )
    for file in filter(None, (json, figure)):
        print(f"written to {file}")


def counts_given(words: tuple[str, ...]) -> tuple[int, ...] | Path | None:
    """Numbers, or the name of a file."""
    if len(words) == 1 and not words[0].isdigit():
        return Path(words[0])
    try:
        return tuple(map(int, words)) or None
    except ValueError as error:
        raise UserError(f"--counts {' '.join(words)}: give whole numbers, or one file") from error


def run_shard(args: list[str]) -> None:
    name = name_first("data shard", args)
    given = parse(Shard, "data shard", args, Shard(images=name, data=recipes.make(name).data))
    if given.out is None:
        raise UserError("say where to write the shards: --out DIR")

    from longtail.data.write_shards import shard

    packed = shard(given.data, given.out, given.megabytes)
    for line in (*packed.notes, *(f"left out: {image.id} ({image.why})" for image in packed.skipped)):
        print(line, file=sys.stderr)
    print(f"{packed.images:,} images written to {given.out}")


DATA_VERBS: dict[str, tuple[type, Callable[[list[str]], int | None]]] = {
    "inspect": (Inspect, run_inspect),
    "shard": (Shard, run_shard),
}


def run_recipes(args: list[str]) -> None:
    given = parse(Recipes, "recipes", args)

    from longtail.cli.listed import show_all, show_one

    if given.recipe is None:
        show_all(console())
    else:
        show_one(given.recipe, console())
