"""From a folder to a configuration: everything that `longtail train PATH` chooses, each with its reason.

`look` gathers facts about images and machine; `choose` is a pure function of them. What the user gives stands, and what is
chosen after it is chosen to suit. None of the rules is a law: they are where an engineer would begin, and each names the flag
that changes it.
"""

from longtail.autoconfig.choose import Chosen, choose, with_values
from longtail.autoconfig.config_choices import Choice
from longtail.autoconfig.facts import Facts, inspect_data

__all__ = ["Choice", "Chosen", "Facts", "choose", "inspect_data", "with_values"]
