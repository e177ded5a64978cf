"""What a rule says about a checkpoint. No torch: the command line names the targets too."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["error", "warning"]
Target = Literal["vllm", "transformers", "qtool"]

TARGETS: tuple[Target, ...] = ("vllm", "transformers", "qtool")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a loader refuses (``error``), or that its user should know (``warning``).

    Attributes:
        where: a file, a key, or a module; ``*`` stands for the numbers of layers.
        value: what was found there.
        rule: what a loader expects.
        remedy: what to do.
        targets: whose loader expects it.
        check: name of the rule that says so.
        places: how many modules ``where`` stands for.
    """

    level: Level
    where: str
    value: str
    rule: str
    remedy: str
    targets: tuple[Target, ...] = TARGETS
    check: str = ""
    places: int = 1

    @property
    def found(self) -> str:
        """Where, and what."""
        count = f" ({self.places} places)" if self.places > 1 else ""
        # What could not even be opened names its file already.
        named = self.value.startswith(self.where)
        return self.value if named else f"{self.where}{count}: {self.value}"

    def __str__(self) -> str:
        return f"{self.found}; {self.rule}: {self.remedy}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)
