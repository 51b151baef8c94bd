"""Malicious CIFAR files: pickles and archives that exceed limits are refused with a one-line error."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from longtail.config import DataConfig
from longtail.data import array_pickle, cifar
from longtail.data.inspection import inspect
from tests.data.guard import run_guarded
from tests.data.test_sources import cifar100_entries, write
from tests.raises import raises

ARCHIVE = "cifar-100-python.tar.gz"


def unpickle(content: bytes) -> dict:
    return cifar._unpickle(Path("train"), content)


# Pieces of pickles


def integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def tupled(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def table(*values: bytes, before: bytes = b"") -> bytes:
    """Return the pickle of a dictionary whose keys number its values."""
    return before + b"}(" + b"".join(text(f"key{i}") + value for i, value in enumerate(values)) + b"u."


def dtype_state(order: str = "|", size: int = -1) -> bytes:
    return tupled(integer(3), text(order), b"NNN", integer(size), integer(size), integer(0))


NDARRAY, DTYPE = name("numpy", "ndarray"), name("numpy", "dtype")
RECONSTRUCT, ENCODE = name("numpy.core.multiarray", "_reconstruct"), name("_codecs", "encode")
EMPTY_ARRAY = RECONSTRUCT + tupled(NDARRAY, tupled(integer(0)), text("b")) + b"R"


def dtype(code: str, order: str = "|", size: int = -1) -> bytes:
    return DTYPE + tupled(text(code), integer(0), integer(1)) + b"R" + dtype_state(order, size) + b"b"


def array(shape: tuple[int, ...], code: str, raw: str, order: str = "|") -> bytes:
    state = tupled(integer(1), tupled(*map(integer, shape)), dtype(code, order), b"\x89", text(raw))
    return EMPTY_ARRAY + state + b"b"


def test_pieces_make_arrays():
    read = unpickle(table(array((2, 3), "u1", "abcdef"), array((2,), "i4", "a\0\0\0b\0\0\0", "<")))
    assert read["key0"].tolist() == [[97, 98, 99], [100, 101, 102]] and read["key0"].dtype == np.uint8
    assert read["key1"].tolist() == [97, 98] and read["key1"].dtype == np.int32


# Pickles


def test_dtype_that_grows_after_its_array_was_made():
    """The item size of a dtype changes under an array of ten items, and another array is laid over its buffer."""
    small = dtype("V8", size=8) + b"q\x00"
    items = NDARRAY + tupled(tupled(integer(10)), b"h\x00") + b"Rq\x01"
    grown = b"h\x00" + dtype_state(size=100_000) + b"b"
    over = NDARRAY + tupled(tupled(integer(1_000_000)), dtype("u1"), b"h\x01") + b"R"
    with raises("damaged-file", "train"):
        unpickle(table(over, before=small + b"0" + items + b"0" + grown + b"0"))


NESTED = b")" + b"".join(b"q\x00h\x00\x86" for _ in range(60))  # a tuple that holds itself 2**60 times


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(table(array((4,), "u1", "abc")), id="fewer bytes than the shape has"),
        pytest.param(table(array((2,), "u1", "abc")), id="more bytes than the shape has"),
        pytest.param(table(array((-1, -3), "u1", "abc")), id="negative shape"),
        pytest.param(table(array((2**31 - 1,) * 4, "u1", "")), id="shape that overflows"),
        pytest.param(table(array((1,), "O", "abcdefgh")), id="objects"),
        pytest.param(table(array((1,), "V8", "abcdefgh")), id="void"),
        pytest.param(table(array((1,), "i8", "abcdefgh", ">")), id="another byte order"),
        pytest.param(table(dtype("u1", size=8)), id="another item size"),
        pytest.param(table(dtype("u1")[:-1] + b"0" + b"}b"), id="a dictionary for the state of a dtype"),
        pytest.param(table(array((1,), "u1", "a") + tupled(b"NNNNN") + b"b"), id="array filled twice"),
        pytest.param(table(EMPTY_ARRAY), id="array never filled"),
        pytest.param(table(EMPTY_ARRAY + b"}b"), id="a dictionary for the state of an array"),
        pytest.param(table(EMPTY_ARRAY + text("a") + b"a"), id="append to an array"),
        pytest.param(table(EMPTY_ARRAY + text("a") + b"Ns"), id="set an item of an array"),
        pytest.param(table(NDARRAY + text("a") + b"Ns"), id="set an item of a class"),
        pytest.param(table(NDARRAY + b"}" + text("tofile") + b"Nsb"), id="state of a class"),
        pytest.param(table(NDARRAY + tupled(tupled(integer(10)), dtype("u1")) + b"R"), id="call of ndarray"),
        pytest.param(table(DTYPE + b")R"), id="dtype without arguments"),
        pytest.param(table(DTYPE + tupled(text("u1"), b"N" * 9) + b"R"), id="dtype with ten arguments"),
        pytest.param(table(RECONSTRUCT + b")R"), id="reconstruct without arguments"),
        pytest.param(table(RECONSTRUCT + tupled(DTYPE, tupled(integer(0)), text("b")) + b"R"), id="array of a dtype"),
        pytest.param(table(RECONSTRUCT + tupled(NDARRAY, tupled(integer(9)), text("b")) + b"R"), id="nine items"),
        pytest.param(table(ENCODE + tupled(text("a"), text("rot13")) + b"R"), id="another encoding"),
        pytest.param(table(ENCODE + b"]R"), id="call with a list"),
        pytest.param(table(text("a") + b")R"), id="call of a string"),
        pytest.param(table(text("a") + b"}b"), id="state of a string"),
        pytest.param(table(b"}}b"), id="state of a dictionary"),
        pytest.param(table(b")Na"), id="append to a tuple"),
        pytest.param(b"}" + NESTED + b"Ns.", id="key whose hash takes forever"),
        pytest.param(b"}NNs.", id="key that is not a string"),
        pytest.param(b"}(NNNu.", id="key without a value"),
        pytest.param(b"a.", id="append to nothing"),
        pytest.param(b"(t1.", id="mark that is gone"),
        pytest.param(b"h\x07.", id="memo that is empty"),
        pytest.param(b"}2.", id="DUP"),
        pytest.param(b"}Q.", id="BINPERSID"),
        pytest.param(b"\x82\x01.", id="EXT1"),
        pytest.param(b"\x84\xff\xff\xff\x7f.", id="EXT4"),
        pytest.param(NDARRAY + b")\x81.", id="NEWOBJ"),
        pytest.param(NDARRAY + b")}\x92.", id="NEWOBJ_EX"),
        pytest.param(b"(" + NDARRAY + b"o.", id="OBJ"),
        pytest.param(b"\x97.", id="NEXT_BUFFER"),
        pytest.param(b"\x8f.", id="EMPTY_SET"),
        pytest.param(b"\x8e" + struct.pack("<Q", 2**62) + b"a", id="bytes longer than the file"),
        pytest.param(b"\x96" + struct.pack("<Q", 2**40) + b"a", id="bytearray longer than the file"),
        pytest.param(b"T\xff\xff\xff\xffabc.", id="string longer than the file"),
        pytest.param(b"\x8b\xff\xff\xff\x7f.", id="integer longer than the file"),
        pytest.param(b"L" + b"9" * 100_000 + b"L\n.", id="integer of many digits"),
        pytest.param(b"F" + b"9" * 100_000 + b"\n.", id="float of many digits"),
        pytest.param(b"\x80\x09}.", id="unknown protocol"),
        pytest.param(b"X\x03\0\0\0\xed\xa0\x80.", id="half of a surrogate pair"),
        pytest.param(b"]" * (array_pickle.MAX_INSTRUCTIONS + 1), id="too many instructions"),
    ],
)
def test_hostile_pickles_are_refused(content):
    outcome = run_guarded(lambda: unpickle(content))
    assert outcome.kind == "UserError" and "train" in outcome.text and "\n" not in outcome.text


def test_memo_index_takes_no_memory():
    content = b"}r" + struct.pack("<I", 2**31 - 1) + b"j" + struct.pack("<I", 2**31 - 1) + b"0."
    outcome = run_guarded(lambda: unpickle(content), memory=2**28)
    assert outcome.kind == "done"


def test_bytes_are_not_copied_more_often_than_they_are_stored():
    """A string of one megabyte is encoded a thousand times."""
    arguments = text("a" * 2**20) + text("latin1") + b"\x86q\x000" + ENCODE + b"q\x010"
    calls = b"".join(b"h\x01h\x00R" for _ in range(1000))
    outcome = run_guarded(lambda: unpickle(arguments + b"](" + calls + b"e."), memory=2**28)
    assert outcome.kind == "UserError" and "several" in outcome.text


def test_labels_that_hold_themselves(tmp_path):
    root = write(tmp_path, "cifar-100-python", cifar100_entries())
    labels: list = [1] * 600
    for _ in range(8):
        labels = [labels] * 600
    entry = {"data": np.ones((600, 3072), np.uint8), "fine_labels": labels}
    (root / "cifar-100-python/train").write_bytes(pickle.dumps(entry, 2))
    outcome = run_guarded(lambda: inspect(DataConfig(root=root), quick=True))
    assert outcome.kind == "UserError" and "fine_labels" in outcome.text


@pytest.mark.parametrize("bad", ["\ud800", "a\0b"])
def test_class_names_that_cannot_be_stored(tmp_path, bad):
    entries = cifar100_entries()
    entries["meta"]["fine_label_names"][3] = bad
    root = write(tmp_path, "cifar-100-python", {k: v for k, v in entries.items() if k != "meta"})
    (root / "cifar-100-python/meta").write_bytes(
        pickle.dumps(entries["meta"], 0)
    )  # escapes characters that UTF-8 does not have
    with raises("bad-list", "cifar-100-python/meta"):
        inspect(DataConfig(root=root), quick=True)


def test_long_class_name_that_is_used_for_every_class(tmp_path):
    """A pickle stores the string once, but each copy of it in a message or in an output file takes memory."""
    entries = cifar100_entries()
    entries["meta"]["fine_label_names"] = ["a" * 1001] * 100
    root = write(tmp_path, "cifar-100-python", entries)
    with raises("damaged-file", "1,000"):
        inspect(DataConfig(root=root), quick=True)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_every_protocol(protocol, order):
    data = np.asarray(np.random.RandomState(0).randint(0, 256, (5, 7), np.uint8), order=order)
    labels = np.arange(5) - 2
    read = unpickle(
        pickle.dumps({"data": data, "labels": labels, "names": ["ü", "b"], "more": (1.5, None, True)}, protocol)
    )
    assert np.array_equal(read["data"], data) and read["data"].dtype == np.uint8
    assert np.array_equal(read["labels"], labels) and read["labels"].dtype == np.int64
    assert read["names"] == ["ü", "b"] and read["more"] == (1.5, None, True)


def test_pickle_of_python_2():
    """The official files have protocol 2, and strings that contain bytes."""
    raw = bytes(range(256)) * 12
    state = tupled(
        integer(1), tupled(integer(1), integer(3072)), dtype("u1"), b"\x89", b"T" + struct.pack("<i", len(raw)) + raw
    )
    content = b"\x80\x02}q\x01(U\x04dataq\x02" + EMPTY_ARRAY + state + b"bU\x06labelsq\x03]q\x04(K\x05K\x06eu."
    read = unpickle(content)
    assert read["data"].tobytes() == raw and read["labels"] == [5, 6]
    assert unpickle(b"(dS'labels'\n(lI5\naI01\naL7L\nas.")["labels"] == [5, True, 7]


# Files


def members(root: Path, entries: dict[str, bytes], mode: str = "w:gz", **options) -> Path:
    with tarfile.open(root / ARCHIVE, mode, **options) as tar:
        for path, content in entries.items():
            info = tarfile.TarInfo(path)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return root


def header(path: str, kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo(path)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def compressed(root: Path, *parts: bytes | int) -> Path:
    """Write a gzip archive of these bytes; an integer stands for that many zeros."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, 31)
    with open(root / ARCHIVE, "wb") as file:
        for part in parts:
            zeros = isinstance(part, int)
            file.write(deflate.compress(bytes(2**20) if zeros else part) + deflate.flush(zlib.Z_FULL_FLUSH))
            if zeros:  # the same bytes again, since the last flush has made the compressor forget
                again = deflate.compress(bytes(2**20)) + deflate.flush(zlib.Z_FULL_FLUSH)
                file.write(again * (part // 2**20 - 1))
        file.write(deflate.flush())
    return root


def outcome_of(root: Path) -> str:
    outcome = run_guarded(lambda: cifar.open_cifar("cifar100", root, False, 32), memory=2**30)
    assert outcome.kind == "UserError", outcome
    assert ARCHIVE in outcome.text
    return outcome.text


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_header_of_gigabytes(tmp_path, kind):
    outcome_of(compressed(tmp_path, header("././@LongLink", kind, 4 * 2**30), 2**31))


def test_member_of_gigabytes_that_is_skipped(tmp_path):
    assert f"{cifar.MAX_TOTAL_BYTES:,}" in outcome_of(
        compressed(tmp_path, header("other", tarfile.REGTYPE, 2**32), 3 * 2**30)
    )


def test_many_members(tmp_path):
    assert f"{cifar.MAX_HEADER_BYTES:,}" in outcome_of(
        compressed(tmp_path, header("empty", tarfile.REGTYPE, 0) * 400_000)
    )


def test_chain_of_long_names(tmp_path):
    outcome_of(compressed(tmp_path, (header("x", tarfile.GNUTYPE_LONGNAME, 1) + b"a".ljust(512, b"\0")) * 5000))


def test_global_headers_that_are_copied_to_every_member(tmp_path):
    """`tarfile` applies all records of a global header to each member that follows."""
    records = b"".join(b"8 %s=\n" % f"{n:04x}".encode() for n in range(50_000))
    entries = header("global", tarfile.XGLTYPE, len(records)), records.ljust(-(-len(records) // 512) * 512, b"\0")
    said = outcome_of(compressed(tmp_path, *entries, header("empty", tarfile.REGTYPE, 0) * 1200))
    assert f"{cifar.MAX_HEADER_BYTES:,}" in said


def test_sparse_maps(tmp_path):
    """One sparse member has a map without end, and one would expand."""
    first = bytearray(header("cifar-100-python/train", tarfile.GNUTYPE_SPARSE, 512))
    first[482] = 1  # the map continues in the next block
    first[483:495] = b"77777777777\0"  # the size of the file
    block = (b"00000000000\0" * 42).ljust(504, b"\0") + b"\1" + bytes(7)
    first[148:156] = b"%06o\0 " % (sum(first[:148]) + 256 + sum(first[156:512]))
    outcome_of(compressed(tmp_path, bytes(first), block * 200_000))
    first[482], first[483:495] = 0, b"00000001000\0"
    first[148:156] = b"%06o\0 " % (sum(first[:148]) + 256 + sum(first[156:512]))
    assert "cifar-100-python/" in outcome_of(compressed(tmp_path, bytes(first), 2**20))


def test_member_of_negative_size(tmp_path):
    """The next header would be before this one, so that reading would never end."""
    block = bytearray(header("cifar", tarfile.REGTYPE, 0))
    block[124:136] = b"\xff" * 11 + b"\x00"  # -256 in base 256
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 256 + sum(block[156:512]))
    outcome_of(compressed(tmp_path, bytes(block) * 4, 2**20))


def test_archive_cut_short_and_damaged(tmp_path):
    whole = gzip.compress(os.urandom(100_000))
    for content in (whole[:-1], whole[:50_000], whole[:20], b"", whole[:-8] + b"\0" * 8):
        (tmp_path / ARCHIVE).write_bytes(content)
        outcome_of(tmp_path)


def test_files_of_a_folder_are_regular_and_not_too_large(tmp_path, monkeypatch):
    root = write(tmp_path, "cifar-100-python", cifar100_entries())
    folder, elsewhere = root / "cifar-100-python", root / "elsewhere"
    (folder / "train").rename(elsewhere)
    (folder / "train").symlink_to(elsewhere)
    assert len(cifar.open_cifar("cifar100", root, False, 32).train.labels) == 600
    monkeypatch.setattr(cifar, "MAX_FILE_BYTES", 100_000)
    with raises("unsafe-file", "100,000"):
        cifar.open_cifar("cifar100", root, False, 32)
    monkeypatch.undo()
    monkeypatch.setattr(cifar, "MAX_TOTAL_BYTES", 1_900_000)  # each of them would do, but not all
    with raises("unsafe-file", "test"):
        cifar.open_cifar("cifar100", root, False, 32)
    monkeypatch.undo()
    (folder / "train").unlink()
    os.mkfifo(folder / "train")
    monkeypatch.setattr(os.path, "isfile", lambda path: True)  # as if it had been a file a moment ago
    outcome = run_guarded(lambda: cifar.open_cifar("cifar100", root, False, 32))
    assert outcome.kind == "UserError" and "regular file" in outcome.text


def test_sparse_file_of_gigabytes(tmp_path):
    root = write(tmp_path, "cifar-100-python", cifar100_entries())
    with open(root / "cifar-100-python/train", "r+b") as file:
        file.truncate(2**34)
    outcome = run_guarded(lambda: cifar.open_cifar("cifar100", root, False, 32), memory=2**30)
    assert outcome.kind == "UserError" and "17,179,869,184" in outcome.text
