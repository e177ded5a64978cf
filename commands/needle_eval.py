"""``qtool eval --kv-cache … --needle-lengths``: facts hidden in long texts, under each form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from transformers import PreTrainedTokenizerBase

from qtool.calibration.data import evaluation_windows
from qtool.calibration.documents import Text
from qtool.commands import console
from qtool.errors import UsageError
from qtool.runtime.cache_cases import CacheCase
from qtool.runtime.needle import Found, Haystack, NeedleCell, cells, depths, look, make_haystack

Cells = Mapping[str, Sequence[NeedleCell]]  # by name of the form


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleOptions:
    """How much is asked.

    Attributes:
        lengths: of texts, in tokens, questions included; none asks nothing.
        depths: facts in a text, from its beginning to its end.
        texts: of each length.
    """

    lengths: tuple[int, ...] = ()
    depths: int = 5
    texts: int = 4

    def __post_init__(self) -> None:
        depths(self.depths)
        for name, value in (("texts", self.texts), ("lengths", min(self.lengths, default=1))):
            if value < 1:
                raise UsageError(f"needle_{name}={value}: must be 1 or more")

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> NeedleOptions:
        """Of the command line: lengths are numbers with commas between them."""
        given = [part.strip() for part in (values["needle_lengths"] or "").split(",")]
        if wrong := [part for part in given if part and not part.isdigit()]:
            raise UsageError(
                f"--needle-lengths: {wrong[0]!r} is no number of tokens; give numbers with commas "
                "between them, such as 512,1024"
            )
        lengths = tuple(int(part) for part in given if part)
        return cls(lengths=lengths, depths=values["needle_depths"], texts=values["needle_texts"])


def make_texts(
    options: NeedleOptions, source: Text, tokenizer: PreTrainedTokenizerBase
) -> dict[int, list[Haystack]]:
    """Texts of each length, all of the same held-out text.

    Raises:
        CalibrationError: that is too short.
        UsageError: a length has no room for facts and questions.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    return {
        length: [
            make_haystack(window.tolist(), encode, options.depths, seed)
            for seed, window in enumerate(
                evaluation_windows(source, tokenizer, length, options.texts)
            )
        ]
        for length in options.lengths
    }


def find_needles(
    cases: Sequence[CacheCase], texts: Mapping[int, Sequence[Haystack]], show: console.Show
) -> dict[str, list[NeedleCell]]:
    """What each form finds, by its name."""
    found: dict[str, list[NeedleCell]] = {case.name: [] for case in cases}
    total, done = len(cases) * sum(map(len, texts.values())), 0
    with show.steps() as steps:
        for length, hays in texts.items():
            for case in cases:
                facts = list[list[Found]]()
                for hay in hays:
                    facts.append(look(case.run(list(hay.tokens)), hay))
                    done += 1
                    steps.update("needles", done, total)
                found[case.name] += cells(length, facts)
    return found


def to_json(found: Cells, name: str) -> list[dict[str, Any]]:
    """Every cell of one form."""
    return [asdict(cell) for cell in found.get(name, ())]


def needle_table(found: Cells) -> Table:
    """A row for each form and length, a column for each depth."""
    table = Table(title="facts found by depth (NLL of their numbers, nats a token)")
    table.add_column("cache")
    table.add_column("tokens", justify="right")
    for depth in dict.fromkeys(cell.depth for row in found.values() for cell in row):
        table.add_column(f"{depth:.0%}", justify="right")
    for name, row in found.items():
        for length in dict.fromkeys(cell.length for cell in row):
            own = [cell for cell in row if cell.length == length]
            shown = (f"{cell.found:.0%} ({cell.nll:.3f})" for cell in own)
            table.add_row(name, f"{length:,}", *shown)
    return table
