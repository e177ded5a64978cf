"""What lies beside the weights: report, figures of the run, digests, probe, model card, plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qtool.formats.checkpoint import CheckpointWriter
from qtool.formats.digests import DIGESTS_PATH, digests_json
from qtool.formats.probe import PROBE_PATH
from qtool.quantize.card import CARD_PATH, model_card
from qtool.quantize.phases import RUN_PATH, Phase
from qtool.quantize.plots import draw_plots
from qtool.quantize.report import REPORT_PATH, Report


def publish(
    writer: CheckpointWriter,
    report: Report,
    probe: Mapping[str, Any] | None,
    phases: Sequence[Phase],
    run: str,
) -> str | None:
    """Write everything that is said about a result into its folder; returns what is missing.

    ``run`` is the digest by which the run knows its result again, should it be stopped after this.
    """
    writer.add_json(REPORT_PATH, report.to_dict())
    writer.add_json(RUN_PATH, {"run": run, "phases": [phase.to_dict() for phase in phases]})
    writer.add_json(DIGESTS_PATH, digests_json(writer.digests))
    if probe is not None:
        writer.add_json(PROBE_PATH, probe)
    plots, missing = _plots(report)
    for name, data in plots.items():
        writer.add_bytes(name, data)
    writer.add_text(CARD_PATH, model_card(report, tuple(plots)))
    return missing


def _plots(report: Report) -> tuple[dict[str, bytes], str | None]:
    """Pictures by their place in the folder, and why there are none."""
    try:
        return {f"qtool/{name}": data for name, data in draw_plots(report).items()}, None
    except ImportError:
        return {}, "no plots: matplotlib is not installed (pip install 'qtool[plots]')"
