"""Names that have changed since snapshot.json was written: renames.json maps each old name to the present one.

Each section of renames.json is a table `old -> new`; an old name that ends with a dot stands for all names that begin with
it. Every test that compares the present code with the snapshot or with an old run translates names here and nowhere else.

flags        command-line flags: "--train.parallel_seeds": "--train.parallel_seeds"
values       values of flags and of config keys: "--train.execution=fused": "kernels"; "train.execution=fused": "kernels"
names        public Python names: "longtail.nn.LabeledQueue": "longtail.nn.LabeledQueue"
parameters   parameters of public functions: "longtail.nn.PaCoLoss.center_tau": "center_tau"
config       keys of config.json: "method.center_tau": "method.center_tau"
state        keys of state_dict: "net.trunk.": "net.backbone."
checkpoint   keys of checkpoint/state.pt: "optimizer.": "optimizer."
environment  keys of environment.json
log          keys of log.jsonl, as "center_logit": "center_logit"
metrics      keys of metrics.json, calibration.json and examples/index.json
files        files of a run folder, and arrays in its .npz files: "features.npz:ids": "features.npz:names"
"""

import json
from pathlib import Path

TABLES: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "renames.json").read_text())


def rename(kind: str, old: str) -> str:
    """Return the present name of something that had the name `old`."""
    table = TABLES[kind]
    if old in table:
        return table[old]
    prefixes = [prefix for prefix in table if prefix.endswith(".") and old.startswith(prefix)]
    longest = max(prefixes, key=len, default="")
    return table[longest] + old[len(longest) :] if longest else old


def rename_value(name: str, value: str) -> str:
    """Return the present text of a value of the flag or config key that had the name `name`."""
    return TABLES["values"].get(f"{name}={value}", value)
