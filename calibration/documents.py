"""Documents, once read: plain texts, or conversations that a chat template makes texts of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from qtool.errors import CalibrationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]


@dataclass(frozen=True)
class Text:
    """Named documents; joined with nothing between them they are the whole text.

    Attributes:
        name: of the source; never a path, because it is written into checkpoints.
        documents: in the source's order.
        chat_template: whether a chat template made them.
        whole: whether they are all the source has; false where only its beginning was read.
    """

    name: str
    documents: tuple[str, ...]
    chat_template: bool = False
    whole: bool = True

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the UTF-8 text, in hex."""
        return hashlib.sha256("".join(self.documents).encode()).hexdigest()

    def render(self, _: PreTrainedTokenizerBase) -> Text:
        """Itself: a text is the same for every model."""
        return self


@dataclass(frozen=True)
class Conversations:
    """Named conversations, which are texts only through a model's chat template.

    Attributes:
        name, whole: see :class:`Text`.
        conversations: (where it stands in the source, its messages).
    """

    name: str
    conversations: tuple[tuple[str, tuple[Message, ...]], ...]
    whole: bool = True

    def render(self, tokenizer: PreTrainedTokenizerBase) -> Text:
        """One document a conversation, as the model was trained to read it.

        A BOS token that both the template and the tokenizer would put first is left to the
        tokenizer.

        Raises:
            CalibrationError: the model has no chat template, or it refuses a conversation.
        """
        if not tokenizer.chat_template:
            raise CalibrationError(
                f"{self.name} holds conversations, and the model's tokenizer has no chat template "
                "to make text of them; give a source of plain text, or a chat model"
            )
        bos = _added_bos(tokenizer)
        documents = (
            self._render_one(tokenizer, where, messages).removeprefix(bos)
            for where, messages in self.conversations
        )
        return Text(self.name, tuple(documents), chat_template=True, whole=self.whole)

    def _render_one(
        self, tokenizer: PreTrainedTokenizerBase, where: str, messages: tuple[Message, ...]
    ) -> str:
        try:
            text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False)
        # A template is code that comes with the model: it may raise anything.
        except Exception as error:
            raise CalibrationError(
                f"{self.name}, {where}: the chat template refuses the conversation "
                f"({error or type(error).__name__}); leave it out, or give another source"
            ) from error
        assert isinstance(text, str)
        return text


Documents = Text | Conversations


def leading_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS id if the tokenizer puts one before a text."""
    first: int = tokenizer("a").input_ids[0]
    return first if first == tokenizer.bos_token_id else None


def _added_bos(tokenizer: PreTrainedTokenizerBase) -> str:
    return "" if leading_bos(tokenizer) is None else str(tokenizer.bos_token)
