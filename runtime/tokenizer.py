"""The model's tokenizer as the runtime needs it: one BOS, no network, readable errors.

Wraps what transformers loads from the model's folder, and reads what that folder says about
generation: the ends of sequence and the default sampling values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.errors import CheckpointError, RequestError
from qtool.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPACE_MARK = "\u2581"  # SentencePiece writes a space so

# Keys of generation_config.json and the sampling parameters they set. The first group shapes
# the distribution to sample from.
_SHAPE_KEYS = {key: key for key in ("temperature", "top_p", "top_k", "min_p")}
_OTHER_KEYS = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}


class Tokenizer:
    """Text to token ids and back, chat templates, and the model's generation settings.

    Encoding, decoding and rendering change nothing, so any thread may call them.

    Attributes:
        eos_token_ids: every id that ends a sequence: those of generation_config.json, of
            config.json and of the tokenizer. Chat models often list a different end in each.
        default_sampling: values for :class:`SamplingParams` that generation_config.json sets;
            a request's own values come first, neutral ones last. ``temperature``, ``top_p``,
            ``top_k`` and ``min_p`` are taken unless the file says ``do_sample: false`` (most
            files leave the key out); ``repetition_penalty`` and ``max_tokens`` always.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Iterable[int] = (),
        default_sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._hf = tokenizer
        # The first encoding clears the truncation a tokenizer.json may ask for. That is the only
        # change to the backend, which must not change while other threads use it.
        tokenizer.encode("")
        own = tokenizer.eos_token_id
        self.eos_token_ids = frozenset(eos_token_ids) | ({own} if own is not None else set())
        self.default_sampling = dict(default_sampling or {})
        self._special = frozenset(tokenizer.all_special_ids)
        self._pieces = _PieceBytes(tokenizer)
        self._backend = _plain_backend(tokenizer)

    @classmethod
    def load(cls, folder: Path, trust_remote_code: bool = False) -> Tokenizer:
        """Load from a model's folder, without a network.

        Raises:
            CheckpointError: no tokenizer there, or a damaged file.
        """
        from transformers import AutoTokenizer

        if not folder.is_dir():
            raise CheckpointError(f"{folder}: is no folder; give the folder of a model")
        generation = _read_json(folder / "generation_config.json")
        config = _read_json(folder / "config.json")
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
        # Whatever is wrong with the files comes up as one of a dozen types, `Exception` among them.
        except Exception as error:
            raise CheckpointError(
                f"{folder}: its tokenizer cannot be loaded ({error}); copy tokenizer.json and "
                "tokenizer_config.json of the original model into it"
            ) from error
        eos = _eos_ids(generation) | _eos_ids(config) | _eos_ids(config.get("text_config") or {})
        return cls(tokenizer, eos, _default_sampling(generation, folder))

    @property
    def vocab_size(self) -> int:
        """Ids below this may have a text; a model's logits can be padded to more."""
        return len(self._hf)

    @property
    def bos_token_id(self) -> int | None:
        """Begin of sequence, if the tokenizer has one."""
        return _optional_int(self._hf.bos_token_id)

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`render_chat` works without a template of the caller."""
        return bool(self._hf.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. A text that begins with BOS gets no second one.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        _check_unicode(text)
        ids: list[int] = self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        bos = self.bos_token_id
        doubled = add_special_tokens and bos is not None and ids[:2] == [bos, bos]
        return ids[1:] if doubled else ids

    def bad_words_ids(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Token sequences that spell ``words``, at the start of a text and after a space."""
        texts = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
        encoded = [tuple(self.encode(text, add_special_tokens=False)) for text in texts]
        return [ids for ids in dict.fromkeys(encoded) if ids]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, rendered by the model's template or by the one given.

        The template writes BOS itself where the model wants one, so none is added.

        Raises:
            RequestError: no template, no messages, a message without content, or the template
                refuses them.
        """
        if not (chat_template or self.has_chat_template):
            raise RequestError(
                "The model has no chat template: send the finished prompt to /v1/completions, or "
                "pass chat_template",
                "messages",
            )
        _check_messages(messages)
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message=True: the last message cannot be continued and answered; "
                "set add_generation_prompt=False",
                "continue_final_message",
            )
        text = self._render(
            messages,
            {
                **(template_kwargs or {}),
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "chat_template": chat_template,
            },
        )
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes of no character are U+FFFD."""
        if self._backend is not None:
            plain: str = self._backend.decode(list(ids), skip_special_tokens)
            return plain
        text = self._hf.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token, with its leading space; bytes of no character are U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token stands for; none for an id that only pads the vocabulary."""
        pieces: Sequence[str | None] = self._hf.convert_ids_to_tokens([token_id])
        piece = pieces[0]
        if piece is None:
            return b""
        return piece.encode() if token_id in self._special else self._pieces(piece)

    def _render(self, messages: Sequence[Mapping[str, Any]], arguments: dict[str, Any]) -> str:
        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, **arguments
            )
        # A template is code that comes with the model or the request: it may raise anything.
        except Exception as error:
            raise RequestError(
                f"The chat template refused the messages: {error or type(error).__name__}; change "
                "the messages, or pass another chat_template",
                "messages",
            ) from error
        assert isinstance(text, str)
        return text


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The tokenizer beneath transformers' one, where that adds nothing when it decodes.

    A step of 32 requests decodes 130 times, each 3 us longer through transformers' checks.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    inherited = kind.decode is PreTrainedTokenizerBase.decode
    inherited = inherited and kind._decode is PreTrainedTokenizerFast._decode
    return tokenizer.backend_tokenizer if inherited else None


class _PieceBytes:
    """Vocabulary entry to the bytes it stands for, for the kind of tokenizer at hand."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._hf = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = backend.decoder.__getstate__().decode() if backend and backend.decoder else ""
        self._byte_level = _byte_alphabet() if '"ByteLevel"' in decoder else None
        self._byte_tokens = backend is None or '"ByteFallback"' in decoder

    def __call__(self, piece: str) -> bytes:
        if self._byte_level is not None and all(c in self._byte_level for c in piece):
            return bytes(self._byte_level[c] for c in piece)
        if self._byte_level is not None:
            return piece.encode()  # an added token, kept as written
        if self._byte_tokens and len(piece) == 6 and piece.startswith("<0x"):
            return bytes.fromhex(piece[3:5])
        return piece.replace(SPACE_MARK, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level BPE writes bytes (Radford et al. 2019, 2.2).

    Printable Latin-1 stands for itself; the other bytes, in order, for U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"character {error.start} of the text is U+{ord(text[error.start]):04X}: half of a "
            "surrogate pair is no character; send valid Unicode"
        ) from error


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Templates print a missing content as an empty string, or fail with a riddle."""
    if not messages:
        raise RequestError("messages=[]: needs at least one message; add one", "messages")
    for position, message in enumerate(messages):
        if message.get("content") is None and not message.get("tool_calls"):
            raise RequestError(
                f"messages[{position}] has no content: send a text, an empty one if need be",
                "messages",
            )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``, empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no JSON ({error}); copy it from the original") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object; copy it from the original model")
    return value


def _eos_ids(config: Mapping[str, Any]) -> set[int]:
    """``eos_token_id`` of a config: absent, one id or a list."""
    value = config.get("eos_token_id")
    return set() if value is None else set(value) if isinstance(value, list) else {value}


def _default_sampling(generation: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Sampling values of a generation_config.json; see :class:`Tokenizer` for the rule."""
    names = _OTHER_KEYS if generation.get("do_sample") is False else _SHAPE_KEYS | _OTHER_KEYS
    values = {
        ours: generation[theirs]
        for theirs, ours in names.items()
        if generation.get(theirs) is not None
    }
    try:
        SamplingParams(**values)
    except (RequestError, TypeError) as error:
        raise CheckpointError(
            f"{folder / 'generation_config.json'}: {error}; correct the value or remove it"
        ) from error
    return values


def _optional_int(value: object) -> int | None:
    assert value is None or isinstance(value, int)
    return value
