"""The error for a name that is neither a recipe nor a path to images: what it is instead, or the closest name."""

import mimetypes
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from longtail import files
from longtail.errors import UserError
from longtail.text import did_you_mean

OTHER_ARCHIVES = (".7z", ".rar")  # archives that Python cannot unpack


def wrong_data_error(path: Path, recipes: Iterable[str], list_suffixes: Sequence[str]) -> UserError:
    """Return the error for a name that is neither a recipe nor a path to images.

    Args:
        path: The name.
        recipes: The names of all recipes.
        list_suffixes: Suffixes of files that list images.
    """
    if os.path.isfile(path):
        return UserError(f"{path} {describe_file(path.name.lower(), list_suffixes)}", kind="missing-file")
    if os.path.lexists(path):  # a FIFO, a socket, a device, or a link to nothing
        return UserError(
            f"{path} is not a folder, and not a regular file: name a folder, shards or a list of images",
            kind="missing-file",
        )
    similar = files.find_similar_path(path)
    if len(path.parts) > 1:
        hint = f"did you mean {similar!r}?" if similar else "check the path"
        return UserError(f"{path} does not exist: {hint}", kind="missing-file")
    hint = did_you_mean(path, [*filter(None, [similar]), *recipes]) or f"the recipes are {', '.join(recipes)}"
    return UserError(f"{str(path)!r} is neither a folder nor a recipe: {hint}", kind="unknown-name")


def describe_file(name: str, list_suffixes: Sequence[str]) -> str:
    """Return the rest of a sentence that says what a file is, and what to do instead.

    Args:
        name: Name of the file in lower case.
        list_suffixes: Suffixes of files that list images.
    """
    archives = [suffix for _, suffixes, _ in shutil.get_unpack_formats() for suffix in suffixes]
    if name.endswith((*archives, *OTHER_ARCHIVES)):
        return "is an archive: unpack it first, and name the folder"
    if (mimetypes.guess_type(name)[0] or "").startswith("image/"):
        return "is a single image: name a folder with one subfolder of images for each class"
    if name.endswith(".parquet"):
        return "is a single shard: name the folder that contains it"
    return f"is not a list of images ({' '.join(list_suffixes)}): name a list, or a folder of images"
