"""Run folders on the disk."""

import json

from longtail.files import write_json


def test_lists_of_numbers_are_on_one_line(tmp_path):
    tree = {
        "per_class": [1.5, -2e-9, None, True],
        "name": "[\n1,\n 2]",
        "rows": [{"a": [1]}, [], ["x", "y"], [[1, 2], [3]]],
    }
    write_json(tmp_path / "tree.json", tree)
    text = (tmp_path / "tree.json").read_text()
    assert json.loads(text) == tree
    (line,) = (line for line in text.splitlines() if "per_class" in line)
    assert json.loads("{" + line.rstrip(",") + "}") == {"per_class": tree["per_class"]}
    assert '\n   "x",\n' in text
