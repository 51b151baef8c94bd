"""Help texts: length, flags and examples, the values for given data, and short names of flags."""

import re
import shlex

import pytest

from longtail import recipes
from longtail.cli import COMMAND_GROUPS, COMMANDS, SUBCOMMANDS, main, parse
from longtail.cli.compare import resolve_comparison
from longtail.cli.help import EXAMPLES
from longtail.cli.train import resolve_training
from longtail.training import SHORT_NAMES
from tests.compat import present
from tests.test_cli import images

KINDS = {name: kind for name, (kind, _) in COMMANDS.items() if name not in SUBCOMMANDS} | {
    f"{name} {key}": kind for name, commands in SUBCOMMANDS.items() for key, (kind, _) in commands.items()
}


def show(capsys, *args: str) -> str:
    assert main(args) == 0
    return capsys.readouterr().out


def read_options(text: str) -> list[str]:
    """Return the options that a short help lists."""
    return re.findall(r"^  (--[\w.-]+)", text, re.M)


def accepted_flags(kind: type) -> set[str]:
    listed = parse.list_flags(kind)
    for name, section in parse.list_sections(kind).items():
        listed += parse.list_flags(section, f"{name}.")
    short = {f"--{name}" for name in parse.find_short_flags(kind)}
    return {flag.name for flag in listed} | short | {name.replace("_", "-") for name in short}


@pytest.mark.parametrize("command", [*KINDS, *SUBCOMMANDS])
def test_help_fits_on_one_screen(command, capsys):
    shown = show(capsys, *command.split(), "--help")
    lines = shown.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert EXAMPLES[command] in shown and f"longtail {command}" in shown
    assert show(capsys, *command.split(), "-h") == shown


@pytest.mark.parametrize("command", KINDS)
def test_help_lists_existing_options(command, capsys):
    options = read_options(show(capsys, *command.split(), "--help"))
    own = getattr(KINDS[command], "short_names", SHORT_NAMES).keys() - SHORT_NAMES.keys()
    assert len(options) <= 10 + len(own) and set(options) <= accepted_flags(KINDS[command])


def test_usage_shows_what_can_be_left_out(capsys):
    usage = {
        name: show(capsys, *name.split(), "--help").splitlines() for name in ("recipes", "docs", "report", "train")
    }
    found = {name: next(line for line in lines if line.startswith("usage:")) for name, lines in usage.items()}
    assert {name: line.split(maxsplit=3)[3] for name, line in found.items()} == {
        "recipes": "[RECIPE]",  # this command has no options
        "docs": "[PAGE]",
        "report": "RUNS ... [options]",
        "train": "DATA [options]",
    }


@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_help_shows_options_of_one_letter(capsys, option):
    found = {name for name in KINDS if "--out, -o PATH" in show(capsys, *name.split(), option)}
    assert found == {"export", "figure", "report"}


def test_the_main_options_have_short_names(capsys):
    main_options = "--method --epochs --lr --batch-size --image-size --model --seeds --device --out --resume"
    assert read_options(show(capsys, "train", "--help")) == main_options.split()
    shown = {*read_options(show(capsys, "compare", "--help"))}
    assert shown == {*main_options.split(), "--methods", "--imbalance"} - {"--method", "--resume"}


@pytest.mark.parametrize("command", KINDS)
def test_help_all_lists_every_flag(command, capsys):
    lines = show(capsys, *command.split(), "--help-all").splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(line.strip() for line in lines)
    own = [flag.name for flag in parse.list_flags(KINDS[command])]
    sections = parse.list_sections(KINDS[command])
    every = own + [flag.name for name, section in sections.items() for flag in parse.list_flags(section, f"{name}.")]
    assert [name for name in every if name not in text] == []


def test_help_all_shows_ranges_and_short_names(capsys):
    text = " ".join(show(capsys, "train", "digits-lt", "--help-all").split())
    assert "--image-size, --data.image_size INTEGER, between 4 and 7168 [8]" in text
    assert "--lr, --optim.lr NUMBER, greater than 0 [0.1]" in text
    assert "--views.key.policy" in text and "--method.alpha" in text


@pytest.mark.parametrize("command", [command for command in EXAMPLES if command in KINDS])
def test_examples_are_parsed(command, tmp_path, monkeypatch):
    monkeypatch.chdir(images(tmp_path, "photos/train").parent)
    words = shlex.split(EXAMPLES[command])
    name = command.split()
    assert words[: len(name) + 1] == ["longtail", *name]
    kind, args = KINDS[command], words[len(name) + 1 :]
    default = None
    if parse.list_sections(kind):
        assert not args[0].startswith("-")
        default = present.default_arguments(command, "paco")
    parse.parse_arguments(kind, command, parse.expand_short_flags(kind, args), default)


def test_commands_are_grouped(capsys):
    listed = [name for names in COMMAND_GROUPS.values() for name in names]
    assert set(COMMANDS) <= set(listed) and len(set(listed)) == len(listed)
    shown = show(capsys, "--help")
    lines = shown.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert re.findall(r"^  (\w+) ", shown, re.M) == [name for name in listed if name in COMMANDS]


def test_help_shows_the_values_for_a_recipe_with_the_given_flags(capsys):
    shown = show(capsys, "train", "digits-lt", "--method", "ce", "--lr", "0.3", "--help")
    values = dict(re.findall(r"^  --([\w-]+)(?:.|\n {28})*?\[(.+)\]$", shown, re.M))
    config = recipes.digits_lt("ce")
    expected = {"method": "ce", "lr": "0.3", "epochs": str(config.train.epochs), "out": "runs/digits-lt-ce-40"}
    assert values.items() >= expected.items()
    shown = show(capsys, "compare", "digits-lt", "--epochs", "3", "--help")
    assert {"3", "0 1 2"} <= set(re.findall(r"\[(.+?)\]", shown))


def test_help_shows_the_values_that_are_chosen_for_a_folder(capsys, tmp_path):
    folder = str(images(tmp_path / "pets"))
    shown = show(capsys, "train", folder, "--epochs", "7", "--help")
    config = resolve_training([folder, "--train.epochs", "7"])[2].config
    chosen = (7, config.optim.lr, config.train.batch_size, config.data.image_size, config.model.name)
    assert all(f"[{value}]" in shown for value in chosen)
    assert "[7]" in show(capsys, "compare", folder, "--epochs", "7", "--help")


# Short names


def test_short_names_set_the_same_values(capsys, tmp_path):
    short = "--epochs 3 --lr 0.2 --batch-size=16 --image_size 12 --model resnet8_cifar --seeds 1 2 --device cpu"
    full = (
        "--train.epochs 3 --optim.lr 0.2 --train.batch_size=16 --data.image_size 12 --model.name resnet8_cifar "
        "--train.seeds 1 2 --train.device cpu"
    )
    kind = COMMANDS["train"][0]
    assert parse.expand_short_flags(kind, short.split()) == full.split()
    assert parse.expand_short_flags(kind, full.split()) == full.split()
    folder = str(images(tmp_path / "pets"))
    found, expected = (
        resolve_training(parse.expand_short_flags(kind, [folder, *words.split()]))[2] for words in (short, full)
    )
    assert found == expected and found.config.train.epochs == 3 and found.config.model.name == "resnet8_cifar"


def test_own_flags_of_a_command_are_not_replaced():
    args = ["digits-lt", "--epochs", "3", "--seeds", "1", "--lr", "0.2"]
    expanded = parse.expand_short_flags(COMMANDS["compare"][0], args)
    assert expanded == [*args[:-2], "--optim.lr", "0.2"]
    found = resolve_comparison(expanded)
    assert (found.given.epochs, found.given.seeds, found.config.optim.lr) == (3, (1,), 0.2)
    assert parse.expand_short_flags(COMMANDS["reproduce"][0], ["--lr", "1"]) == ["--lr", "1"]


@pytest.mark.parametrize(("methods", "has_alpha"), [(["ce", "balanced-softmax"], False), (["ce", "paco"], True)])
def test_comparison_logs_the_settings_of_its_methods(methods, has_alpha, caplog, tmp_path):
    caplog.set_level("INFO", "longtail")
    resolve_comparison([str(images(tmp_path / "pets")), "--methods", *methods])
    assert "--model.name" in caplog.text and ("--method.alpha" in caplog.text) == has_alpha
