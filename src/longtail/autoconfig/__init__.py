"""Automatic choice of a configuration for the user's images, as in `longtail train PATH`.

`inspect_data` collects facts about images and machine. `choose` is a pure function of these facts: it returns a configuration
and the reason for each setting. Settings that the user gives are not changed, and the other settings are chosen to match them.
The rules are reasonable defaults; each setting can be changed by its flag.
"""

from longtail.autoconfig.facts import Facts, inspect_data
from longtail.autoconfig.rules import Choice, ChosenConfig, choose, choose_plan, with_values
from longtail.deprecated import find_renamed

__all__ = ["Choice", "ChosenConfig", "Facts", "choose", "choose_plan", "inspect_data", "with_values"]
__getattr__ = find_renamed(__name__, {"Chosen": "ChosenConfig", "look": "inspect_data"})
