"""A finished folder, read back from disk and held against what memory had."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qtool.errors import CheckpointError
from qtool.formats.checkpoint import CheckpointReader
from qtool.formats.digests import changed_tensors
from qtool.formats.validation.validate import validate

# The rule about what a loader runs.
SCHEMES = "schemes"


def verify_tensors(folder: Path, digests: Mapping[str, str]) -> int:
    """Compare every tensor of a model folder with its digest; returns their number.

    Raises:
        CheckpointError: a tensor is missing, is one too many, or has other bytes.
    """
    with CheckpointReader(folder) as reader:
        if differing := sorted(digests.keys() ^ set(reader.names())):
            raise CheckpointError(
                f"{differing[0]} is only on one side: the disk holds {len(reader.names())} tensors "
                f"and memory held {len(digests)}; this is an error of qtool's: report it"
            )
        for name in changed_tensors(reader, digests):
            raise CheckpointError(
                f"{name} was read back from {folder} with other bytes than were written; the "
                "disk or the memory of this machine is not to be trusted: check both"
            )
    return len(digests)


def verify_loads(folder: Path) -> None:
    """Run the rules of ``qtool validate`` on a folder that is to be published.

    A scheme that another loader does not run is no fault of the folder: who takes which format is
    said where it is chosen.

    Raises:
        CheckpointError: vLLM, transformers or qtool would refuse it.
    """
    errors = [
        finding
        for finding in validate(folder)
        if finding.level == "error"
        and not (finding.check == SCHEMES and "qtool" not in finding.targets)
    ]
    if errors:
        listed = "\n".join(f"  {', '.join(finding.targets)}: {finding}" for finding in errors)
        raise CheckpointError(
            f"the result is not published, because these would refuse it:\n{listed}\n"
            "Repair what the source has of it, or ask for another scheme."
        )
