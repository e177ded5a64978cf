"""Rules on files: what lies in the folder, beside the weights and inside their headers."""

from __future__ import annotations

import json
from collections.abc import Iterator

from qtool.errors import CheckpointError
from qtool.formats.digests import DIGESTS_PATH, changed_tensors, read_digests
from qtool.formats.reader import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from qtool.formats.validation.facts import Facts
from qtool.formats.validation.finding import Finding

GENERATION = "generation_config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json", "chat_templates")


def index_metadata(facts: Facts) -> Iterator[Finding]:
    """transformers takes the key without asking."""
    if facts.index is None:
        return
    metadata = facts.index.get("metadata")
    if not isinstance(metadata, dict):
        yield Finding(
            "error",
            INDEX_NAME,
            "no metadata",
            'transformers reads index["metadata"]',
            'add "metadata": {"total_size": BYTES}',
            ("transformers",),
        )
        return
    total = sum(entry.num_bytes for entry in facts.reader.entries.values())
    if metadata.get("total_size", total) != total:
        yield Finding(
            "warning",
            INDEX_NAME,
            f"metadata.total_size {metadata['total_size']}",
            f"the tensors have {total} bytes",
            "correct the number",
        )


def stray_weights(facts: Facts) -> Iterator[Finding]:
    """Without an index vLLM loads every weight file at the top of the folder."""
    weights = {name for name in facts.files if name.endswith(".safetensors")}
    for name in sorted(weights - {SINGLE_NAME}) if facts.index is None else ():
        yield Finding(
            "error",
            name,
            f"a weight file beside {SINGLE_NAME}",
            "without an index vLLM loads every *.safetensors at the top of the folder",
            "move it into a sub-folder, or write an index",
            ("vllm",),
        )


def custom_code(facts: Facts) -> Iterator[Finding]:
    """Classes that the config takes from the folder's own Python files."""
    values = facts.config.get("auto_map") or {}
    references = values.values() if isinstance(values, dict) else ()
    # "repo--module.Class" lies elsewhere.
    modules = {
        str(reference).partition(".")[0]
        for reference in references
        if isinstance(reference, str) and "--" not in reference
    }
    for module in sorted(modules):
        if f"{module}.py" not in facts.files:
            yield Finding(
                "warning",
                f"{CONFIG_NAME}: auto_map",
                f"{module}.py is not in the folder",
                "with trust_remote_code, code that the config names is loaded from the folder",
                "copy the file from the original model",
                ("vllm", "transformers"),
            )


def tokenizer(facts: Facts) -> Iterator[Finding]:
    """Weights load without one, and serve no text."""
    if facts.files.isdisjoint(TOKENIZERS):
        yield Finding(
            "warning",
            "the folder",
            "no tokenizer",
            f"text needs one of {', '.join(TOKENIZERS)}",
            "copy the tokenizer's files from the original model",
        )


def generation_config(facts: Facts) -> Iterator[Finding]:
    """Stop tokens and sampling defaults of a server."""
    if GENERATION not in facts.files:
        yield Finding(
            "warning",
            GENERATION,
            "missing",
            "servers take stop tokens and sampling defaults from it",
            "copy it from the original model, if that has one",
        )
        return
    values = facts.json_file(GENERATION)
    if values is None:
        yield Finding(
            "error",
            GENERATION,
            "not a JSON object",
            "every loader reads it",
            "copy it from the original model",
        )
        return
    yield from _stop_tokens(facts, values.get("eos_token_id"))


def _stop_tokens(facts: Facts, stop: object) -> Iterator[Finding]:
    tokens = stop if isinstance(stop, list) else [] if stop is None else [stop]
    size = facts.decoder.get("vocab_size")
    wrong = [t for t in tokens if not isinstance(t, int) or (isinstance(size, int) and t >= size)]
    if wrong:
        yield Finding(
            "error",
            f"{GENERATION}: eos_token_id",
            str(wrong[0]),
            f"a stop token is one of the vocabulary's {size}",
            "copy the file from the original model",
        )


def chat_template(facts: Facts) -> Iterator[Finding]:
    """Chats of a server; a base model has none."""
    inline = (facts.json_file("tokenizer_config.json") or {}).get("chat_template")
    if facts.files.isdisjoint(TEMPLATES) and not inline:
        yield Finding(
            "warning",
            "the folder",
            "no chat template",
            "chat endpoints need one; a base model has none",
            "copy chat_template.jinja from the original model, if that has one",
        )
    path = facts.reader.folder / TEMPLATES[0]
    if path.is_file() and inline and path.read_text(encoding="utf-8", errors="replace") != inline:
        yield Finding(
            "warning",
            TEMPLATES[0],
            "differs from tokenizer_config.json's chat_template",
            "transformers takes the file, other readers the key",
            "keep one of them",
        )


def json_files(facts: Facts) -> Iterator[Finding]:
    """Files that loaders parse when they are there."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if name not in facts.files:
            continue
        try:
            json.loads((facts.reader.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            yield Finding(
                "error", name, str(error), "every loader reads it", "copy it from the original"
            )


def digests(facts: Facts) -> Iterator[Finding]:
    """Every byte of every tensor, where a checkpoint says what it was written with."""
    rule, remedy = (
        f"{DIGESTS_PATH} has what it was written with",
        f"copy the checkpoint again, or delete {DIGESTS_PATH} if it was changed on purpose",
    )
    try:
        written = read_digests(facts.reader.folder)
    except CheckpointError as error:
        yield Finding("error", DIGESTS_PATH, str(error), rule, remedy)
        return
    if written is None:
        return
    for name in sorted(written.keys() ^ facts.reader.entries.keys()):
        value = "is missing" if name in written else "was not there"
        yield Finding("error", name, value, rule, remedy)
    for name in changed_tensors(facts.reader, written):
        yield Finding("error", name, "has other bytes", rule, remedy)
