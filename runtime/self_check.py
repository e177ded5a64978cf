"""Does a loaded model answer as it did when it was made? Asked once, when it is loaded."""

from __future__ import annotations

from qtool.errors import CheckpointError
from qtool.formats.probe import Probe, ProbePrompt
from qtool.runtime.model import Decoder
from qtool.runtime.window_run import WindowRun


def self_check(decoder: Decoder, probe: Probe, compute: str, max_len: int) -> None:
    """Run the prompts of a probe through a decoder.

    Args:
        decoder: a model as it will serve.
        probe: what its checkpoint answered when it was made.
        compute: the coarsest dtype it computes in, as ``bfloat16`` or ``int8``.
        max_len: longest sequence it was loaded for; longer prompts are left out.

    Raises:
        CheckpointError: an answer is too far off, with both sides shown.
    """
    allowed = probe.tolerance.get(compute)
    if allowed is None:
        return
    for prompt in probe.prompts:
        if len(prompt.ids) > max_len or max(prompt.ids) >= decoder.config.vocab_size:
            continue
        logits = WindowRun(decoder, list(prompt.ids)).logits(0, len(prompt.ids))[-1]
        distance = prompt.distance(logits)
        if distance > allowed:
            found = [float(logits[token]) for token in prompt.tokens[:3]]
            raise CheckpointError(_message(prompt, found, distance, allowed, compute))


def _message(
    prompt: ProbePrompt, found: list[float], distance: float, allowed: float, compute: str
) -> str:
    pairs = ", ".join(
        f"token {token}: {logit:.3f} then, {now:.3f} now"
        for token, logit, now in zip(prompt.tokens, prompt.logits, found, strict=False)
    )
    return (
        f"self-check: the model does not answer as it did when it was made ({pairs}; distance "
        f"{distance:.3g}, allowed in {compute} {allowed:.3g}); a file is damaged or of another "
        "export, or this machine computes wrongly: copy the checkpoint again and try --backend "
        "reference; --no-self-check loads it as it is"
    )
