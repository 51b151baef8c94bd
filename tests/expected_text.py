"""Compare text that users see with stored text: tests/expected_text/MODULE.json has one entry for each name.

`make expected-text` stores the present text instead of comparing; review the difference before a commit. Use it for output
that is worth keeping as a whole. Errors are better described by their class, their `kind` and the values they name.
"""

import json
import os
import re
import tempfile
from pathlib import Path

import longtail

FOLDER = Path(__file__).with_name("expected_text")
UPDATE = bool(os.environ.get("LONGTAIL_UPDATE_TEXT"))

TEMPORARY = (
    re.escape(str(Path(tempfile.gettempdir()).resolve()))
    + r"/pytest-of-[^/\s]+/pytest-\d+(/popen-gw\d+)?/[^/\s'\",:)]+"
)
PLACEHOLDERS = {
    TEMPORARY: "<tmp>",
    r"\b\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?)?": "<time>",
    r"\b\d+(:\d\d)+\b": "<time>",
    r"\b\d+(\.\d+)? ?(ms|s|min|h)\b": "<duration>",
    r"(?<![\d.])" + re.escape(longtail.__version__) + r"(?![\d.])": "<version>",
}


def check_text(name: str, text: str, folder: Path | None = None) -> None:
    """Compare `text` with what is stored for `name`, which is "MODULE/KEY", such as "test_cli/help".

    `folder` is replaced by `<tmp>`, and so are the temporary folders of pytest. Dates, times, durations and the version
    become placeholders too.
    """
    module, _, key = name.partition("/")
    path = FOLDER / f"{module}.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = replace_variable_parts(text, folder)
    if UPDATE:
        FOLDER.mkdir(exist_ok=True)
        lines = json.dumps(dict(sorted((stored | {key: found.split("\n")}).items())), indent=1, ensure_ascii=False)
        path.write_text(lines + "\n", encoding="utf-8")
        return
    assert key in stored, f"no text is stored for {name}: run `make expected-text`"
    assert found == "\n".join(stored[key])


def replace_variable_parts(text: str, folder: Path | None = None) -> str:
    """Return the text with placeholders for what differs between two runs."""
    if folder is not None:
        text = text.replace(str(folder), "<tmp>")
    for pattern, placeholder in PLACEHOLDERS.items():
        text = re.sub(pattern, placeholder, text)
    return text
