"""Files from other people: no unrestricted unpickling, no access outside of the folder, no interpretation of names."""

import ast
import io
import pickle
import re
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import longtail
from longtail import UserError, recipes
from longtail.data import cifar
from longtail.data.lists import open_lists
from longtail.reporting.result_rows import make_rows
from longtail.reporting.table import to_markdown, to_rich
from tests.odd.harness import STEADY, before_the_work, command, in_folder
from tests.odd.zoo import Bomb
from tests.raises import raises
from tests.report.made import FEW, make_run

SOURCES = sorted(Path(longtail.__file__).parent.rglob("*.py"))


# The code itself


def called(tree: ast.AST) -> list[tuple[str, dict[str, ast.expr]]]:
    """Return the name and the keyword arguments of every call."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(ast.unparse(call.func), {k.arg: k.value for k in call.keywords if k.arg}) for call in calls]


def unsafe(source: str) -> list[str]:
    """Return calls by which a file or a name could run code or write anywhere."""
    never = {"eval", "exec", "pickle.load", "pickle.loads", "joblib.load", "os.system", "os.popen"}
    of_anything = {"extract", "extractall", "unpack_archive", "safe_load", "full_load"}
    needs = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
    found = []
    for name, words in called(ast.parse(source)):
        keyword, value = needs.get(name, ("", None))
        said = words.get(keyword)
        open_to_all = keyword and not (isinstance(said, ast.Constant) and said.value is value)
        by_name = name in never or name.split(".")[-1] in of_anything
        if by_name or open_to_all or {"shell", "trust_remote_code"} & {*words}:
            found.append(name)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SOURCES[0].parent)))
def test_nothing_unsafe_is_called(path):
    assert unsafe(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "np.load(p)",
        "eval(x)",
        "tar.extractall(p)",
        "run(x, shell=True)",
    ],
)
def test_unsafe_calls_are_detected(source):
    assert unsafe(source)


# Pickles


def published(values: object, protocol: int = 2) -> bytes:
    return pickle.dumps(values, protocol)


GOOD = published({"data": [1, 2, 3], "fine_labels": [0, 1], "names": ["a", "b"]})


@settings(STEADY, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_pickle_is_a_table_or_refused(changes):
    content = bytearray(GOOD)
    for place, byte in changes:
        content[place] = byte
    try:
        assert isinstance(cifar._unpickle(Path("train"), bytes(content)), dict)
    except UserError as error:
        assert "train" in str(error)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_runs_nothing(protocol, tmp_path):
    content = published({"data": Bomb(tmp_path / "exploded")}, protocol)
    with raises("unsafe-file", "train"):
        cifar._unpickle(Path("train"), content)
    assert not (tmp_path / "exploded").exists()
    pickle.loads(content)
    assert (tmp_path / "exploded").exists()  # it would have


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'id'\ntR.",  # by REDUCE
        b"(S'id'\nios\nsystem\n.",  # by INST
        b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93.",  # by STACK_GLOBAL
        b"cnumpy\nload\n.",  # of an admitted module, but another name
        b"cnumpy\nndarray.tofile\n.",
        b"\x80\x02\x82\x01.",  # of the extension registry
        b"P1\n.",  # a persistent id
    ],
)
def test_no_way_into_a_pickle_is_open(content):
    with pytest.raises(UserError):
        cifar._unpickle(Path("train"), content)


# Archives and lists


def archive(root: Path, **members: tarfile.TarInfo) -> None:
    root.mkdir(exist_ok=True)
    with tarfile.open(root / "cifar-100-python.tar.gz", "w:gz") as tar:
        for info in members.values():
            tar.addfile(info, io.BytesIO(bytes(info.size)))


def member(name: str, **values: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in values.items():
        setattr(info, key, value)
    return info


def test_an_archive_writes_nowhere(tmp_path):
    links = {"link": member("cifar-100-python/train", type=tarfile.SYMTYPE, linkname="/etc/passwd")}
    archive(tmp_path / "data", up=member("../../up", size=1), top=member(str(tmp_path / "top"), size=1), **links)
    with pytest.raises(UserError):
        cifar.open_cifar("cifar100", tmp_path / "data", False, 32)
    assert [f.name for f in tmp_path.rglob("*")] == ["data", "cifar-100-python.tar.gz"]


def test_an_archive_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "MAX_FILE_BYTES", 1000)
    archive(tmp_path, large=member("cifar-100-python/train", size=2000))
    with raises("damaged-file", "2,000 bytes"):
        cifar.open_cifar("cifar100", tmp_path, False, 32)


@settings(STEADY, max_examples=100)
@given(
    st.lists(st.sampled_from(["..", ".", "a", "b.jpg", "", "~", "etc", "\\.."]), min_size=1, max_size=6).map("/".join)
)
def test_a_list_leads_nowhere_else(tmp_path_factory, path):
    """With a root, every path in a list is below it, or the list is refused."""
    from longtail.data.lists import ListEntry, _relative_path

    base = tmp_path_factory.getbasetemp()
    try:
        found = _relative_path(base, ListEntry("line 1", path, "0"), is_root_given=True)
    except UserError as error:
        assert "outside" in str(error)
    else:
        assert (base / found).resolve().is_relative_to(base.resolve())


def test_lists_with_paths_outside_of_the_root(odd):
    for name in ("climbs", "nul", "long", "labels", "devices"):
        with pytest.raises(UserError):
            open_lists(odd.root / f"{name}.txt", None, odd.root, (), 8).train.read_encoded(0)


# Names


NAMES = ["[/red]", "[bold]x[/bold]", "\x1b[2J", "a|b", "line\nbreak", "\u202egnp.exe"]


def test_names_are_shown_and_not_obeyed(tmp_path):
    """The name of the data folder is in tables for the terminal and in Markdown."""
    import json

    from rich.console import Console

    from longtail import files, run_folder

    for i, name in enumerate(NAMES):
        folder = make_run(tmp_path / f"{i}/seed0", recipes.digits_lt("ce"), 0, FEW)
        tree = json.loads((folder / run_folder.CONFIG).read_text())
        tree["data"] |= {"name": "folder", "root": f"/nowhere/{name.replace('/', '')}", "imbalance": 1}
        tree["model"]["name"] = name
        files.write_json(folder / run_folder.CONFIG, tree)
    rows = make_rows(run_folder.read_finished(tmp_path))
    screen = Console(file=io.StringIO(), width=400)
    screen.print(to_rich(rows, 400))
    shown, written = screen.file.getvalue(), re.sub(r"\\([\\\[\]])", r"\1", to_markdown(rows))
    for said in (shown, written):
        assert all(line.isprintable() for line in said.splitlines())
        assert "[red]" in said and "\\x1b[2J" in said and "line\\nbreak" in said
    body = [line for line in written.splitlines() if line.startswith("|")]
    assert len(body) == 2 + len(NAMES) and len({line.replace("\\|", "").count("|") for line in body}) == 1


def test_class_names_are_shown_and_not_obeyed(odd):
    with in_folder(odd.place) as here, before_the_work():
        lines = [f'{odd.root}/pets/cat/{i}.{"jpg" if i % 2 else "png"},"{name}"' for name in NAMES for i in range(6)]
        (here / "list.csv").write_text("path,label\n" + "\n".join(lines) + "\n", newline="")
        found = command(["data", "inspect", "list.csv", "--data.test_list", "list.csv"])
    assert found.code == 0 and all(line.isprintable() for line in found.out.splitlines())
    assert "[/red]" in found.out and "\\x1b[2J" in found.out
