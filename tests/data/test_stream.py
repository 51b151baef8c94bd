"""Streamed images: decoding, reading ahead in threads, canvases, and training."""

import io
import itertools
import json
import os
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from sklearn.datasets import load_sample_images

import longtail
from longtail import recipes
from longtail.config import Config, DataConfig
from longtail.data import decode
from longtail.data import loader as loaders
from longtail.data.decode import BadImage, JpegHeader, decode_to_fit, read_file, read_jpeg_header
from longtail.data.lazy_images import Split, StreamedImages
from longtail.data.loader import (
    PREFETCHED_BATCHES,
    BatchReader,
    ResidentLoader,
    StreamLoader,
    iterate_frames,
    make_loader,
)
from longtail.data.sources import load
from longtail.engine import examples
from longtail.engine.cuda_graph import use_own_stream
from longtail.errors import RankError, RunError
from longtail.kernels import nvrtc, views
from longtail.views import Views
from tests.data.files import bad_files
from tests.emulator import ORDERS, emulate
from tests.raises import raises

PHOTO = Image.fromarray(load_sample_images().images[0])  # 640 x 427
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
CPU = torch.device("cpu")


def as_file(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int) -> bytes:
    exif = PHOTO.getexif()
    exif[0x0112] = orientation
    return as_file(PHOTO, exif=exif)


# One image


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", ["II", "MM"])
def test_headers_are_read_as_pil_reads_them(orientation, order):
    exif = PHOTO.getexif()
    exif.endian = "<" if order == "II" else ">"
    exif[0x010F], exif[0x0112], exif[0x0132] = "a camera", orientation, "2026:01:01 00:00:00"
    encoded = as_file(PHOTO, exif=exif.tobytes())
    assert order.encode() in encoded[:64] and Image.open(io.BytesIO(encoded)).getexif()[0x0112] == orientation
    assert read_jpeg_header(encoded) == JpegHeader(427, 640, 3, 8, orientation)


def test_headers_of_other_kinds():
    assert read_jpeg_header(as_file(PHOTO.convert("L"), progressive=True)) == JpegHeader(427, 640, 1, 8, 1)
    assert read_jpeg_header(as_file(PHOTO.convert("CMYK"))) == JpegHeader(427, 640, 4, 8, 1)
    assert read_jpeg_header(as_file(PHOTO, "PNG")) is None
    whole = as_file(PHOTO, exif=PHOTO.getexif())
    for end in range(300):  # truncated anywhere before its pixels, it has no header, and no exception is raised
        assert read_jpeg_header(whole[:end]) in (None, read_jpeg_header(whole))
    assert read_jpeg_header(whole[:20]) is None


def test_plain_jpeg_is_decoded_as_by_pil(monkeypatch):
    monkeypatch.setattr(decode, "open_image", None)  # by torchvision alone
    for options in ({}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}):
        encoded = as_file(PHOTO, **options)
        wanted = np.asarray(Image.open(io.BytesIO(encoded))).transpose(2, 0, 1)
        assert np.abs(decode_to_fit(encoded, 640).astype(int) - wanted).max() <= 2
    gray = as_file(PHOTO.convert("L"))
    assert (decode_to_fit(gray, 640) == np.asarray(Image.open(io.BytesIO(gray)))).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright(orientation):
    encoded = turned(orientation)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))).transpose(2, 0, 1)
    assert np.abs(decode_to_fit(encoded, 640).astype(int) - wanted).max() <= 2


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_a_large_image_is_made_to_fit(kind, orientation):
    exif = PHOTO.getexif()
    exif[0x0112] = orientation
    found = decode_to_fit(as_file(PHOTO, kind, exif=exif), 100)
    size = (100, 67) if orientation == 1 else (67, 100)
    assert found.shape == (3, size[1], size[0])
    upright = PHOTO if orientation == 1 else PHOTO.rotate(-90, expand=True)
    wanted = np.asarray(upright.resize(size, Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    assert np.abs(found.astype(int) - wanted).mean() < 4  # a large JPEG is decoded at a fraction of its size


XMP = b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/>'
LONG = b"Exif\0\0MM\0*\0\0\0\x08\0\x01" + bytes.fromhex("0112 0004 00000001 00000006 00000000")  # not a SHORT


@pytest.mark.parametrize(
    "said", [{"xmp": XMP}, {"exif": LONG}, {"exif": b"Exif\0\0MM\0*\0\0\0\x08" + bytes(6), "xmp": XMP}]
)
def test_images_are_rotated_for_all_exif_encodings(said):
    encoded = as_file(PHOTO, **said)
    assert decode.probe_image(encoded).exif_rotated and decode_to_fit(encoded, 640).shape == (3, 640, 427)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("size", [(5000, 10), (3, 4000), (600, 1), (1, 1)])
def test_an_image_much_longer_than_wide_keeps_a_pixel(kind, size):
    width, height = (max(1, min(n, round(n * 73 / max(size)))) for n in size)
    assert decode_to_fit(as_file(PHOTO.resize(size), kind), 73).shape == (3, height, width)


def test_other_formats_go_through_pil():
    assert (decode_to_fit(as_file(PHOTO, "PNG"), 640) == np.asarray(PHOTO).transpose(2, 0, 1)).all()
    cmyk = decode_to_fit(as_file(PHOTO.convert("CMYK")), 640).astype(int)
    assert np.abs(cmyk - np.asarray(PHOTO).transpose(2, 0, 1)).mean() < 10


def test_a_jpeg_cut_short_is_a_bad_image():
    whole = as_file(PHOTO)
    for share in (0.999, 0.9, 0.5, 0.1):
        with pytest.raises(BadImage):  # the words are those of the decoder
            decode_to_fit(whole[: int(share * len(whole))], 640)


# Many images


def numbered(n: int, side: int = 12) -> StreamedImages:
    """Return n images; image i has gray level i and (4 + i % 5) x (8 - i % 3) pixels."""

    def encoded(i: int) -> bytes:
        return as_file(Image.new("L", (8 - i % 3, 4 + i % 5), i), "PNG")

    return StreamedImages(encoded, lambda i: f"number {i}", side, 3)


def test_batches_come_in_order_and_images_in_their_places():
    rng = np.random.default_rng(0)
    plan = [rng.integers(0, 200, n) for n in (17, 1, 17, 40, 3, 17, 17, 17)]
    found = list(BatchReader(numbered(200), CPU).read_batches(plan))
    assert len(found) == len(plan)
    for indices, (images, size_N2) in zip(plan, found, strict=True):
        assert images.shape == (len(indices), 3, 12, 12) and images.dtype == torch.uint8
        for i, image, (height, width) in zip(indices.tolist(), images, size_N2.tolist(), strict=True):
            assert (height, width) == (4 + i % 5, 8 - i % 3)
            assert (image[:, :height, :width] == i).all()


def test_only_some_batches_are_read_ahead():
    asked = []
    plan = (asked.append(i) or np.array([i]) for i in range(100))
    reading = BatchReader(numbered(100), CPU).read_batches(plan)
    assert not asked
    for done in range(1, 5):
        next(reading)
        assert len(asked) <= done + PREFETCHED_BATCHES + 1
    reading.close()
    assert len(asked) <= 4 + PREFETCHED_BATCHES + 1 and threading.active_count() < 20


def test_processes_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    for processes, each in (("1", 12), ("5", 2), ("64", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert decode.available_cores() == each
    reading = BatchReader(replace(numbered(99), workers=0), CPU).read_batches(np.arange(99).reshape(9, 11))
    next(reading)
    assert sum("longtail-read" in t.name for t in threading.enumerate()) == 1
    reading.close()


def test_processes_of_a_machine_share_its_memory(monkeypatch):
    pages = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    for limit, processes, each in (("max\n", "1", 4_096_000), ("900000\n", "1", 900_000), ("900000\n", "3", 300_000)):
        monkeypatch.setattr(Path, "read_text", lambda path, limit=limit: limit)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert decode.available_memory() == each


def test_readers_share_a_stream(monkeypatch):
    """torch has 32 streams. If each reader had its own, those of captured branches would soon be shared."""
    asked = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: asked.append(device) or object())
    loaders.copy_stream.cache_clear()
    one, other = (BatchReader(numbered(9), torch.device("cuda", 0)) for _ in range(2))
    loaders.copy_stream.cache_clear()
    assert one.stream is other.stream and len(asked) == 1


def test_a_plan_of_few_batches_or_none():
    assert list(BatchReader(numbered(9), CPU).read_batches([])) == []
    (only,) = BatchReader(numbered(9), CPU).read_batches([np.array([3, 4])])
    assert only.images[:, 0, 0, 0].tolist() == [3, 4]


def test_the_first_bad_image_is_named_and_ends_it():
    good = numbered(50)
    bad = replace(good, read_encoded=lambda i: b"none" if i == 37 else good.read_encoded(i))
    reading = BatchReader(bad, CPU).read_batches(np.arange(50).reshape(5, 10))
    for _ in range(2):
        next(reading)
    with raises("bad-image", "number 37", error=RankError):
        list(reading)  # the process that reads it reports it


def test_what_was_under_way_is_given_up_at_the_first_bad_image():
    asked = []
    bad = replace(numbered(50), read_encoded=lambda i: asked.append(i) or time.sleep(0.02) or b"none", workers=1)
    with raises("bad-image", "number 0"):
        next(BatchReader(bad, CPU).read_batches([np.arange(1000)] * 9))
    assert len(asked) < 50


def test_a_test_image_that_is_gone_when_pictures_are_made_is_named():
    gone = replace(source(), images=replace(numbered(43), read_encoded=lambda i: b""))
    with raises("bad-image", "number 3 ("):
        examples.load_picture(gone, 3)


# Left to a decoder of the device: here torchvision's on the CPU, whose pixels are those of `decode_whole`


def photos(n: int = 24, side: int = 64) -> StreamedImages:
    """Return JPEGs, and files that are not plain: a PNG, a JPEG with EXIF rotation, a too large one, a truncated one."""
    rng = np.random.default_rng(5)
    files = [as_file(PHOTO.crop((0, 0, *rng.integers(8, 64, 2)))) for _ in range(n)]
    small = PHOTO.crop((0, 0, 30, 50))
    files[3], files[4], files[5] = as_file(small, "PNG"), as_file(PHOTO), files[5] + b"more"
    exif = small.getexif()
    exif[0x0112] = 6
    files[7] = as_file(small, exif=exif)
    return StreamedImages(files.__getitem__, lambda i: f"photo {i}", side, 2)


class Decoded:
    """A decoder that records its calls; calls with the numbers in `refused` fail."""

    def __init__(self, *refused: int) -> None:
        self.calls, self.refused = [], refused

    def __call__(self, files):
        self.calls.append(len(files))
        if len(self.calls) - 1 in self.refused:
            raise RuntimeError("nvjpegDecode failed: 5")
        return [torch.tensor(decode_to_fit(bytes(f.numpy()), 64)) for f in files]


def same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.size_N2.cpu(), other.size_N2)
        for a, b, (height, width) in zip(one.images.cpu(), other.images, one.size_N2.tolist(), strict=True):
            assert torch.equal(a[:, :height, :width], b[:, :height, :width])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("refused", [(), (1,), (0, 1, 2)])
def test_device_decodes_plain_files_and_the_cpu_the_others(refused, device):
    plan, decoder = np.arange(24).reshape(3, 8), Decoded(*refused)
    same(
        BatchReader(photos(), torch.device(device), decoder).read_batches(plan),
        BatchReader(photos(), CPU).read_batches(plan),
    )
    assert decoder.calls == [4, 8, 8]


def test_an_image_that_the_device_refuses_is_named_by_the_cpu():
    good = photos()
    spoilt = good.read_encoded(9)[:-200] + b"\xff\xd9"  # it has its end, but not the data before it
    bad = replace(good, read_encoded=lambda i: spoilt if i == 9 else good.read_encoded(i))
    reading = BatchReader(bad, CPU, Decoded(1)).read_batches(np.arange(24).reshape(3, 8))
    next(reading)
    with raises("bad-image", "photo 9", error=RankError):
        next(reading)


def test_out_of_memory_is_not_retried_on_the_cpu():
    def decoder(files):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        next(BatchReader(photos(), CPU, decoder).read_batches([np.arange(24)]))


@pytest.mark.parametrize("workers, most", [(0, loaders.CONCURRENT_READS), (6, 6)])
def test_few_threads_read_if_the_device_decodes(workers, most, monkeypatch):
    monkeypatch.setattr(loaders, "available_cores", lambda: 16)
    files, busy, seen, lock = photos(), 0, [], threading.Lock()

    def slowly(index):
        nonlocal busy
        with lock:
            busy += 1
            seen.append(busy)
        time.sleep(0.002)
        with lock:
            busy -= 1
        return files.read_encoded(index % 24)

    many = replace(files, read_encoded=slowly, workers=workers)
    assert len(list(BatchReader(many, CPU, Decoded()).read_batches(np.arange(240).reshape(2, 120)))) == 2
    assert max(seen) == most


def test_paths_that_are_not_files_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in ("pipe", "", "gone"):
        with pytest.raises(BadImage):
            read_file(tmp_path / place)
    (tmp_path / "file").write_bytes(bytes(range(256)) * 999)
    assert read_file(str(tmp_path / "file")) == bytes(range(256)) * 999


@pytest.mark.parametrize("device", [*ORDERS, pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("side", [48, 50])
def test_images_are_laid_on_canvases_in_one_launch(side, device, monkeypatch, tmp_path):
    """Rows of a multiple of 16 bytes are copied in such units. The rest of a canvas, and empty canvases, do not change."""
    if device in ORDERS:
        emulated = emulate(views.canvas_source(), tmp_path)
        emulated.order, device = device, "cpu"
        monkeypatch.setattr(views, "canvas_source", lambda: emulated)
    rng = torch.Generator().manual_seed(0)
    sizes = {0: (48, 48), 1: (1, 1), 3: (31, 16), 4: (side, 33), 6: (2, 32), 7: (5, 48)}
    images = {i: torch.randint(256, (3, *s), generator=rng, dtype=torch.uint8).to(device) for i, s in sizes.items()}
    images[7] = torch.cat([images[7].flatten()[:1], images[7].flatten()])[1:].view(3, 5, 48)  # begins at an odd place
    wanted, found = torch.full((2, 8, 3, side, side), 9, dtype=torch.uint8, device=device)
    monkeypatch.setattr(nvrtc, "is_available", lambda device: False)
    views.copy_to_canvases(images, wanted)
    monkeypatch.setattr(nvrtc, "is_available", lambda device: True)
    views.copy_to_canvases(images, found)
    assert torch.equal(found, wanted) and (wanted[2] == 9).all() and (wanted[0, :, :48, :48] != 9).any()
    for i, (height, width) in sizes.items():
        assert torch.equal(found[i, :, :height, :width], images[i])


def test_the_kernel_compiles(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings", reason="comes with torch for CUDA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert views.canvas_source().cubin("copy_to_canvases", "sm_80")[0][:4] == b"\x7fELF"


def test_where_images_are_decoded():
    assert decode.make_decoder(CPU, "auto") is None and decode.make_decoder(CPU, "cpu") is None
    with raises("conflict", "--data.decode gpu"):
        decode.make_decoder(CPU, "gpu")


@cuda
def test_decoded_on_cuda_they_are_nearly_those_of_the_cpu():
    device = torch.device("cuda")
    decoder = decode.make_decoder(device, "gpu")
    plan = np.arange(24).reshape(3, 8)
    for ours, theirs in zip(
        BatchReader(photos(), device, decoder).read_batches(plan),
        BatchReader(photos(), CPU).read_batches(plan),
        strict=True,
    ):
        assert torch.equal(ours.size_N2.cpu(), theirs.size_N2)
        for a, b, (height, width) in zip(ours.images.cpu(), theirs.images, theirs.size_N2.tolist(), strict=True):
            far = (a[:, :height, :width].int() - b[:, :height, :width].int()).abs().float()
            assert far.mean() < 3


@cuda
def test_batches_decoded_on_cuda_are_not_overwritten_by_later_ones():
    """The device is busy with other work, so a decoder may get memory that is still to be read."""
    device = torch.device("cuda")
    decoder = decode.make_decoder(device, "gpu")
    plan, busy = [np.arange(24)] * 40, torch.randn(4096, 4096, device=device)
    sums = []
    for frames in BatchReader(photos(), device, decoder).read_batches(plan):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        sums.append(torch.stack([image[:, :8, :8].long().sum() for image in frames.images]))
    assert all(torch.equal(sums[0], each) for each in sums[1:])


@cuda
def test_images_are_decoded_on_cuda_while_a_step_is_at_work():
    device = torch.device("cuda")

    def corners() -> list[int]:
        frames = BatchReader(photos(), device, decode.make_decoder(device, "gpu")).read_batches(
            np.arange(24).reshape(3, 8)
        )
        return [each.images[:, :, :8, :8].long().sum().item() for each in frames]

    wanted = corners()
    with use_own_stream(device):
        torch.cuda._sleep(8 * 10**9)  # cycles: seconds
        done = torch.cuda.Event()
        done.record()
        with torch.cuda.stream(loaders.copy_stream(device)):
            assert corners() == wanted and not done.query()


LABELS = np.repeat([0, 1, 2], [30, 9, 4])[np.random.default_rng(1).permutation(43)]


def source(n: int = 43) -> Split:
    return Split(numbered(n), LABELS[:n], ("a", "b", "c"), np.arange(n))


def resident(n: int = 43) -> Split:
    gray = np.arange(n, dtype=np.uint8)[:, None, None, None] * np.ones((12, 12, 3), np.uint8)
    return replace(source(n), images=gray)


@pytest.mark.parametrize("sampler", ["uniform", "balanced", "progressive"])
@pytest.mark.parametrize("part, used", [(1, 8), (2, 8), (3, 8), (2, 7)])
def test_a_stream_has_the_order_of_the_resident_loader(sampler, part, used):
    ours, theirs = StreamLoader(source(), 5, 7, CPU), ResidentLoader(resident(), 5, 7, CPU)
    for loader in (ours, theirs):
        loader.set_stage(sampler, 2, 4)
        loader.set_chunks(part, used)
    places = list(itertools.product(range(2, 6), range(0, used, part)))
    starts = [(), places[5:], places[3:4] + places[9:], places]  # from the start, and as after a resume
    for chosen in starts:
        for epoch, batch in chosen:
            for loader in (ours, theirs):
                loader.seek(epoch, batch)
            (images, size_N2), y = ours.take(part)
            wanted, wanted_y = theirs.take(part)
            assert torch.equal(images[:, :, 0, 0], wanted.images[:, :, 0, 0]) and torch.equal(y, wanted_y)
            assert size_N2[:, 0].tolist() == [4 + i % 5 for i in images[:, 0, 0, 0].tolist()]
    ours.close()


def test_stream_continues_to_read_at_the_next_position(monkeypatch):
    loader, begun = StreamLoader(source(), 5, 0, CPU), []
    plain = loader.plan
    monkeypatch.setattr(loader, "plan", lambda *place: begun.append(place) or plain(*place))
    loader.set_stage("uniform", 0, 3)
    for epoch, batch in itertools.product(range(3), range(loader.num_batches)):
        loader.seek(epoch, batch)
    assert begun == [(0, 0)]
    loader.set_stage("balanced", 3, 1)
    loader.seek(3, 0)
    assert begun == [(0, 0), (3, 0)] and loader.y_n.tolist() == LABELS[loader.order(3)[:5].numpy()].tolist()
    loader.close()


def test_images_are_valid_before_anything_is_read():
    """Captured views are warmed up with these images; sizes beyond the canvas would make kernels read other memory."""
    loader = StreamLoader(source(), 5, 0, CPU)
    loader.set_chunks(2, 8)
    (images, size_N2), y = loader.take(2)
    assert not images.any() and size_N2.dtype == y.dtype == torch.int64 and (size_N2 == 12).all() and not y.any()


def test_number_of_batches_in_memory(monkeypatch):
    """The number of buffers is the one that is checked against the available memory."""
    made, room, alive = [], BatchReader._get_buffer, []

    def remembered(reader, n):
        given = room(reader, n)
        made.append(weakref.ref(given.images))
        alive.append(sum(one() is not None for one in made))
        return given

    monkeypatch.setattr(BatchReader, "_get_buffer", remembered)
    loader = StreamLoader(source(), 5, 0, CPU)
    loader.set_stage("uniform", 0, 3)
    for batch in range(8):
        loader.seek(0, batch)
    loader.close()
    assert PREFETCHED_BATCHES + 1 < max(alive) + 1 <= loaders.BUFFERED_BATCHES  # one more is in the buffer of the steps


def test_canvases_that_memory_would_not_hold_are_refused_beforehand(monkeypatch):
    need = loaders.BUFFERED_BATCHES * 2 * 5 * 3 * 12 * 12
    loader = StreamLoader(source(), 5, 0, CPU)
    monkeypatch.setattr(loaders, "available_memory", lambda: need)
    loader.set_chunks(2, 8)
    monkeypatch.setattr(loaders, "available_memory", lambda: need - 1)
    flags = ("--data.resolution", "--train.batch_size", "--train.accumulate")
    with raises("out-of-memory", "10 images", "12x12", "GiB", *flags):
        loader.set_chunks(2, 8)


def test_second_loader_draws_another_order():
    loader = make_loader(source(), 5, 0, CPU)
    other = loader.clone("partner")
    assert isinstance(other, StreamLoader)
    loader.seek(0, 0), other.seek(0, 0)
    assert loader.take(1)[0].images[:, 0, 0, 0].tolist() != other.take(1)[0].images[:, 0, 0, 0].tolist()
    loader.close(), other.close()


def test_processes_read_every_image_once_in_an_epoch(monkeypatch):
    seen = []
    for rank in range(3):
        monkeypatch.setattr(longtail.data.loader, "rank_and_world_size", lambda rank=rank: (rank, 3))
        loader = StreamLoader(source(42), 7, 0, CPU)
        for batch in range(loader.num_batches):
            loader.seek(0, batch)
            seen += loader.take(1)[0].images[:, 0, 0, 0].tolist()
        loader.close()
    assert sorted(seen) == list(range(42))


def test_chosen_images_come_in_their_order():
    for s in (source(), resident()):
        found = [frames.images[:, 0, 0, 0] for frames in iterate_frames(s, np.arange(43), 10, CPU)]
        assert [len(part) for part in found] == [10, 10, 10, 10, 3] and torch.cat(found).tolist() == list(range(43))
        assert next(iterate_frames(s, np.array([4, 2, 9]), 3, CPU)).images[:, 0, 0, 0].tolist() == [4, 2, 9]


# A training


@pytest.fixture
def folder(tmp_path):
    """Write crops of many shapes from the two photographs of scikit-learn, one class each."""
    rng = np.random.default_rng(2)
    for split, counts in {"train": {"china": 30, "flower": 8}, "val": {"china": 6, "flower": 6}}.items():
        for photo, (name, n) in zip(load_sample_images().images, counts.items(), strict=True):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for i in range(n):
                height, width = rng.integers(60, 200, 2)
                top, left = rng.integers(0, (427 - height, 640 - width))
                piece = Image.fromarray(photo[top : top + height, left : left + width])
                piece.save(tmp_path / "images" / split / name / f"{i}.jpg")
    return tmp_path / "images"


def config(folder, **data) -> Config:
    made = recipes.make(folder, method="paco")
    data = {"image_size": 32, "load": "stream", "workers": 2} | data
    return replace(
        made,
        data=replace(made.data, **data),
        model=replace(made.model, name="resnet8_cifar"),
        method=replace(made.method, queue=16, projection_dim=8),
        optim=replace(made.optim, warmup_epochs=0.0, lr=0.02),
        train=replace(made.train, epochs=4, batch_size=8, device="cpu", checkpoint_every=1),
        log=replace(made.log, progress="none"),
    )


def metrics(run) -> dict:
    return json.loads((run / "metrics.json").read_text())


def test_a_streamed_training_learns_resumes_exactly_and_is_measured_again(folder, tmp_path, monkeypatch):
    chosen = config(folder)
    chosen = replace(chosen, train=replace(chosen.train, epochs=12))
    (whole,) = longtail.train(chosen, tmp_path / "whole")
    assert metrics(whole)["top1"] >= 75 and len(list((whole / "examples").glob("*.png"))) > 0
    save, saves = longtail.engine.trainer.Trainer.save, []

    def stop_at_the_fifth(run) -> None:
        save(run)
        saves.append(run)
        if len(saves) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(longtail.engine.trainer.Trainer, "save", stop_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        longtail.train(chosen, tmp_path / "cut")
    monkeypatch.setattr(longtail.engine.trainer.Trainer, "save", save)
    (cut,) = longtail.train(chosen, tmp_path / "cut", resume=True)
    one, two = (load_file(run / "model.safetensors") for run in (whole, cut))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    before = metrics(whole)
    longtail.evaluate(whole)
    assert metrics(whole)["per_class"] == before["per_class"] and metrics(whole)["ece"] == before["ece"]


def test_auto_selects_resident_or_streamed_images(folder, monkeypatch):
    def streamed(**data) -> bool:
        return isinstance(load(replace(config(folder).data, load="auto", **data)).train.images, StreamedImages)

    assert not streamed(image_size=96) and streamed(image_size=97)
    assert not isinstance(load(DataConfig(name="digits", image_size=128)).train.images, StreamedImages)  # no files
    monkeypatch.setattr("longtail.data.lazy_images.MEMORY_LIMIT", 50 * 3 * 32 * 32)
    assert not streamed(image_size=32) and streamed(image_size=33)
    with raises("out-of-memory", "--data.load stream"):
        load(replace(config(folder).data, load="resident", image_size=33))


def test_streamed_digits_are_the_resident_ones():
    files, memory = (load(DataConfig(name="digits", image_size=8, load=how)) for how in ("stream", "resident"))
    assert files.checksum == memory.checksum and files.train.labels.tolist() == memory.train.labels.tolist()
    every = np.arange(len(files.test.labels))
    parts = (iterate_frames(data.test, every, 100, CPU) for data in (files, memory))
    for streamed, kept in zip(*parts, strict=True):
        assert torch.equal(streamed.images[:, :, :8, :8], kept.images) and (streamed.size_N2 == 8).all()


def test_description_of_streamed_images(folder):
    lines = load(config(folder, image_size=224).data).describe()
    assert "512 px" in lines[0]
    assert "300 px" in load(config(folder, resolution=300).data).describe()[0]
    with raises("invalid-value", "data.resolution"):
        config(folder, resolution=31)


def test_bad_images_stop_a_streamed_training_or_are_left_out(folder, tmp_path):
    wanted = bad_files(folder / "train/china")
    with raises("bad-image", "train/china/", "on_error skip"):
        longtail.train(config(folder), tmp_path / "run")
    (run,) = longtail.train(config(folder, on_error="skip"), tmp_path / "skipped")
    listed = [json.loads(line)["id"] for line in (run / "skipped.jsonl").read_text().splitlines()]
    assert sorted(listed) == sorted(f"train/china/{name}" for name in wanted)
    assert metrics(run)["counts"] == [30, 8]


def test_canvases_have_at_most_the_requested_size(folder):
    data = load(config(folder, resolution=64).data)
    frames = next(iterate_frames(data.train, np.arange(38), 38, CPU))
    assert frames.images.shape == (38, 3, 64, 64) and frames.size_N2.max() <= 64 and loaders.PREFETCHED_BATCHES < 10


@pytest.mark.parametrize("owner, work", [(StreamLoader, "set_chunks"), (StreamLoader, "seek"), (Views, "query")])
def test_error_of_too_little_memory_names_the_resolution(owner, work, folder, tmp_path, monkeypatch):
    """The error can occur at any time. A smaller batch does not help, because canvases that exist do not shrink."""

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(owner, work, no_memory)
    with raises("out-of-memory", "73x73", "--data.resolution", error=RunError):
        longtail.train(config(folder), tmp_path / "run")


def test_one_image_that_cannot_be_read_is_one(folder):
    (folder / "train/china/3.jpg").write_bytes(b"")
    data = load(config(folder, on_error="skip").data)
    assert data.notes[-1].startswith("warning") and "train/china/3.jpg" in data.notes[-1]
