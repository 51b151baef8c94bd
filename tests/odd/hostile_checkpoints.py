"""Hostile checkpoints: values of other types, tensors of other shapes, and archives that would take memory or run code."""

import io
import pickle
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from longtail import run_folder
from tests.odd import hostile_values as values
from tests.odd.hostile_bases import Place, Spec
from tests.odd.hostile_values import Exploding, shorten


def tensor_variants(t: torch.Tensor) -> dict[str, Callable[[], Any]]:
    wide = t.double() if t.is_floating_point() else t
    return {
        "NaN": lambda: torch.full_like(t.float(), float("nan")),
        "inf": lambda: torch.full_like(t.float(), float("inf")),
        "1e38": lambda: torch.full_like(t.float(), 1e38),
        "double": lambda: wide,
        "integers": lambda: t.long(),
        "complex": lambda: t.to(torch.complex64),
        "boolean": lambda: t.bool(),
        "-1": lambda: torch.full_like(t, -1) if t.dtype != torch.uint8 else t.long() - 300,
        "empty": lambda: t.reshape(-1)[:0].clone(),
        "flat": lambda: t.reshape(-1).clone(),
        "scalar": lambda: torch.zeros((), dtype=t.dtype),
        "one more axis": lambda: t[None].clone(),
        "longer": lambda: torch.cat([t.reshape(-1)] * 2),
        "sparse": lambda: t.float().to_sparse(),
        "an expanded view of 2**40 items": lambda: torch.zeros(1, dtype=t.dtype).expand(2**40),
        "on the meta device": lambda: torch.zeros(t.shape, device="meta"),
        "a list": lambda: t.reshape(-1)[:100].tolist(),
        "quantized": lambda: torch.quantize_per_tensor(t.float().cpu(), 0.1, 0, torch.qint8),
        "half": lambda: t.half() if t.is_floating_point() else t.char(),
    }


PLAIN: list[Any] = [
    *(None, True, "x", "", -1, 0, 1, 3, 10**6, 2**31, 2**63, 10**30, 10**400, 1.5, -1.5, 1e300),
    *(float("nan"), float("inf"), [], {}, [None], {"a": 1}, "<script>\x1b[31m", "\ud800", "x" * 300_000, [0] * 100_000),
]


def checkpoint_paths(state: dict[str, Any]) -> list[values.JsonPath]:
    """Return the paths of the values in a checkpoint; of many parameters only the first and the last."""
    paths: list[values.JsonPath] = [(key,) for key in state]
    for key in ("method", "optimizer", "meter", "gradients", "average"):
        inner = list(state[key])
        paths += [(key, name) for name in (inner if len(inner) < 10 else [inner[0], inner[-1]])]
    first = next(iter(state["optimizer"]["state"]))
    paths += [("optimizer", "state", first), ("optimizer", "state", first, "momentum_buffer")]
    return paths + [("method", name) for name in state["method"] if "queue" in name]


def checkpoint_cases(bases: Path) -> Iterator[Spec]:
    """Replace each value of a checkpoint, and the file by ones that would run code or take memory."""
    original = torch.load(bases / "begun/seed0" / run_folder.CHECKPOINT, weights_only=True)

    def spec(path: values.JsonPath, kind: str, make: Callable[[random.Random], Any]) -> Spec:
        def change(place: Place, rng: random.Random) -> str:
            value = make(rng)
            state = values.set_value(original, path, value)
            with mock.patch("warnings.warn"):
                torch.save(state, place.run / run_folder.CHECKPOINT)
            return shorten(value)

        return "begun", f"begun state.pt: {'.'.join(map(str, path))} {kind}", change, ("resume",), {}

    for path in checkpoint_paths(original):
        old = values.get_value(original, path)
        yield spec(path, "absent", lambda rng: values.Absent())
        for n in range(3):
            yield spec(path, f"other {n}", lambda rng: rng.choice(PLAIN))
        if isinstance(old, torch.Tensor):
            for kind, make in tensor_variants(old).items():
                yield spec(path, kind, lambda rng, make=make: make())
        elif isinstance(old, int | float):
            for number in values.RANGES[::2]:
                yield spec(path, "number", lambda rng, number=number: number)
    for kind in checkpoint_files(original, Path("x"), b""):

        def change(place: Place, rng: random.Random, kind: str = kind) -> None:
            file = place.run / run_folder.CHECKPOINT
            file.write_bytes(checkpoint_files(original, place.outside / "exploded", file.read_bytes())[kind]())

        yield "begun", f"begun state.pt: {kind}", change, ("resume",), {}


def saved(state: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream, **options)
    return stream.getvalue()


def checkpoint_files(state: dict[str, Any], mark: Path, good: bytes) -> dict[str, Callable[[], bytes]]:
    def rewrite(edit: Callable[[str, bytes], tuple[bytes, int, int, int]]) -> bytes:
        with zipfile.ZipFile(io.BytesIO(good)) as archive:
            return values.zip_of({name: edit(name, archive.read(name)) for name in archive.namelist()})

    def on_pickle(edit: Callable[[bytes], bytes]) -> bytes:
        return rewrite(lambda name, data: values.stored(edit(data) if name.endswith("data.pkl") else data))

    def on_tensor(make: Callable[[bytes], tuple[bytes, int, int, int]]) -> bytes:
        return rewrite(lambda name, data: make(data) if name.endswith("data/0") else values.stored(data))

    return {
        "a pickle that runs code": lambda: pickle.dumps(Exploding(mark)),
        "a value that runs code": lambda: saved(state | {"seconds": Exploding(mark)}),
        "code in the old format": lambda: saved({"x": Exploding(mark)}, _use_new_zipfile_serialization=False),
        "the old format": lambda: saved(state, _use_new_zipfile_serialization=False),
        "a list": lambda: saved([state]),
        "a tensor": lambda: saved(torch.zeros(3)),
        "nothing": lambda: saved({}),
        "other types of keys": lambda: saved({1: 2, (1, 2): 3, None: 4}),
        "a bomb of 3 GiB for a tensor": lambda: on_tensor(lambda data: values.bomb(data, values.BOMB_SIZE)),
        "a bomb of 3 GiB for the pickle": lambda: rewrite(
            lambda name, data: values.bomb(data, values.BOMB_SIZE) if name.endswith("data.pkl") else values.stored(data)
        ),
        "a bomb beside the tensors": lambda: values.zip_of(
            {"state/data/bomb": values.bomb(b"", values.BOMB_SIZE), "state/data.pkl": values.stored(b".")}
        ),
        "an empty tensor": lambda: on_tensor(lambda data: values.stored(b"")),
        "an empty pickle": lambda: on_pickle(lambda data: b""),
        "a cut pickle": lambda: on_pickle(lambda data: data[: len(data) // 2]),
        "a pickle of nested lists": lambda: on_pickle(
            lambda data: b"\x80\x02" + b"(" * 100_000 + b"l" * 100_000 + b"."
        ),
        "a pickle of nested tuples": lambda: on_pickle(lambda data: b"\x80\x02)" + b"\x85" * 100_000 + b"."),
        "a pickle of a huge string": lambda: on_pickle(lambda data: b"\x80\x04\x8d" + b"\xff" * 7 + b"\x00x."),
        "a pickle of a memo without end": lambda: on_pickle(lambda data: b"\x80\x02]r\xff\xff\xff\x7f."),
        "larger storages": lambda: on_pickle(lambda data: data.replace(b"K\x10", b"J\xff\xff\xff\x7f")),
        "a version of 10**6": lambda: rewrite(
            lambda name, data: values.stored(b"1000000" if name.endswith("version") else data)
        ),
        "another byte order": lambda: rewrite(
            lambda name, data: values.stored(b"big" if name.endswith("byteorder") else data)
        ),
        "members without a folder": lambda: values.zip_of({"x": values.stored(b"x")}),
    }
