"""What is trained: a configuration with the candidates of cross-validation, and how its settings can be changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from longtail.config import Config


@dataclass(frozen=True)
class Plan:
    """The settings of a training: a configuration, or the one of several candidates that cross-validation selects."""

    config: Config
    candidates: tuple[Config, ...] = ()
    adapt: Callable[[Mapping[str, Any]], Plan] | None = field(default=None, compare=False, repr=False)
    """Returns the plan with other values of some settings, to which the other settings are chosen again; None if the settings
    are not chosen automatically."""
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """Names of the settings that the user has given. They are not changed."""

    @property
    def method(self) -> str:
        """The name of the method, for the name of the output folder."""
        return "auto" if len({config.method.name for config in self.candidates}) > 1 else self.config.method.name

    def map(self, change: Callable[[Config], Config]) -> Plan:
        """Return the plan with changed configurations, also after `adapt`."""
        adapt = self.adapt
        return Plan(
            change(self.config),
            tuple(map(change, self.candidates)),
            None if adapt is None else lambda values: adapt(values).map(change),
            self.given,
        )
