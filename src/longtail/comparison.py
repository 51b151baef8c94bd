"""`longtail compare`: the chosen methods on one set of images under one budget, and a table that says which to trust."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from longtail import recipes
from longtail.config import Config
from longtail.data.sources import load
from longtail.engine.train import train
from longtail.errors import Interrupted, UserError
from longtail.report.plots import compared
from longtail.report.table import Row, make_dots, table

USUAL = ("ce", "balanced-softmax", "paco")
SEEDS = (0, 1, 2)  # as many as a verdict needs


def compare(
    data: str | Path,
    methods: Sequence[str] = USUAL,
    out: Path | str | None = None,
    seeds: Sequence[int] | None = None,
    imbalance: float | None = None,
    epochs: int | None = None,
    change: Callable[[Config], Config] | None = None,
) -> list[Row]:
    """Train `methods` ("all": every one) on a data set's recipe or a folder of images; the rows of their table, best last.

    The twin of `longtail compare`. Backbone, epochs, augmentation and seeds (0 1 2, if not said) are the same for all;
    `change` may make them others. What OUT has is not trained again. Writes OUT/table.md, OUT/table.json and
    OUT/comparison.png.
    """
    configs = {name: configure(data, name, seeds, imbalance, epochs, change) for name in chosen(methods)}
    where = Path(out) if out else default_out(data, next(iter(configs.values())))
    shown = False
    for number, (name, config) in enumerate(configs.items(), 1):
        images = load(config.data)
        if not shown:
            print(*images.describe(), sep="\n", flush=True)
            shown = True
        print(f"method {number} of {len(configs)}: {config.method.label}", flush=True)
        try:
            train(config, where / name, resume=True, data=images)
        except Interrupted as stop:  # its message speaks of --resume, which this verb needs not
            raise Interrupted(
                f"stopped in {name}, and saved: the same command continues", stop.exit_code - 128
            ) from stop
    rows = table([where / name for name in configs], where)
    compared(make_dots(rows), where / "comparison.png")
    return rows


def chosen(methods: Sequence[str]) -> list[str]:
    """Their names, each once; "all" is all."""
    names = list(recipes.METHODS) if "all" in methods else list(dict.fromkeys(methods))
    if not names:
        raise UserError("--methods without a value: name some, or all")
    for name in names:
        recipes.entry(name)  # an unknown one is an error before the first is trained
    return names


def configure(
    data: str | Path,
    method: str,
    seeds: Sequence[int] | None = None,
    imbalance: float | None = None,
    epochs: int | None = None,
    change: Callable[[Config], Config] | None = None,
) -> Config:
    """The recipe's one budget for all methods."""
    usual = recipes.one_budget(data, method, imbalance)
    config = replace(usual, train=replace(usual.train, seeds=SEEDS))
    config = change(config) if change else config
    held_out = max(usual.data.val_fraction, config.data.val_fraction)  # by methods that choose something on it
    config = replace(config, data=replace(config.data, val_fraction=held_out))
    if seeds is not None:
        config = replace(config, train=replace(config.train, seeds=tuple(seeds)))
    return recipes.with_epochs(config, epochs or config.train.epochs, usual.train.epochs)


def default_out(data: str | Path, config: Config) -> Path:
    return Path("runs") / f"compare-{Path(data).resolve().name}-{config.data.imbalance:g}"
