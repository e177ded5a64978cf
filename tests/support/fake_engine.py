"""A byte tokenizer and a scripted engine on its own thread: the server's other half in tests."""

from __future__ import annotations

import codecs
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from qtool.errors import EngineError, QtoolError, RequestError
from qtool.runtime.outputs import Logprobs, OutputDelta, TokenLogprob
from qtool.runtime.request import EngineInfo, EngineStats, Request

BOS, EOS, TURN = 256, 257, 258
SPECIAL = {BOS: "<s>", EOS: "</s>", TURN: "<turn>"}
VOCAB_SIZE = 259


class ByteCodec:
    """Token ids 0 to 255 are bytes; three more are special tokens."""

    def __init__(self, default_sampling: Mapping[str, Any] | None = None) -> None:
        self.has_chat_template = True
        self.default_sampling: Mapping[str, Any] = default_sampling or {}
        self.last_render: dict[str, Any] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            return [BOS] * add_special_tokens + list(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError("the text has half a surrogate pair") from error

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        self.last_render = {**locals(), "self": None}
        if template_kwargs and template_kwargs.get("fail"):
            raise RequestError("the chat template raised 'no': change the messages", "messages")
        ids = [BOS]
        for message in messages:
            ids += [TURN, *f"{message['role']}:{message['content']}".encode()]
        return ids + ([TURN, *b"assistant:"] if add_generation_prompt else [])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if i not in SPECIAL] if skip_special_tokens else ids
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return SPECIAL[token_id].encode() if token_id in SPECIAL else bytes([token_id])


def position(token_id: int, num_top: int) -> Logprobs:
    """A made-up distribution whose likeliest token is ``token_id``."""
    top = [TokenLogprob((token_id + r) % 256, -0.5 - r, r + 1) for r in range(num_top)]
    return Logprobs(TokenLogprob(token_id, -0.5, 1), tuple(top))


def say(reply: str, finish: str = "stop") -> Callable[[Request], Iterator[OutputDelta]]:
    """A script: the bytes of ``reply``, one token a step, whole characters only, cut by limits."""

    def script(request: Request) -> Iterator[OutputDelta]:
        params, ids = request.params, list(reply.encode())
        scores = _prompt_scores(request)
        limit = len(ids) if params.max_tokens is None else min(params.max_tokens, len(ids))
        reason = finish if limit == len(ids) else "length"
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if limit == 0:
            yield OutputDelta(request.request_id, "", (), (), scores, "length")
        for step, token in enumerate(ids[:limit], 1):
            last = step == limit
            yield OutputDelta(
                request.request_id,
                decoder.decode(bytes([token]), last),
                (token,),
                () if params.logprobs is None else (position(token, params.logprobs),),
                scores if step == 1 else None,
                reason if last else None,  # type: ignore[arg-type]
            )

    return script


def _prompt_scores(request: Request) -> tuple[Logprobs | None, ...] | None:
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return None
    return (None, *(position(token, num_top) for token in request.prompt_token_ids[1:]))


def fake_info(max_model_len: int) -> EngineInfo:
    """What a toy engine says about itself."""
    return EngineInfo(
        model="fake",
        served_name="org/toy",
        device="cpu",
        dtype="float32",
        backend="reference",
        quantization="none",
        max_model_len=max_model_len,
        block_size=16,
        num_blocks=64,
        kv_bytes_per_token=1,
        weight_bytes=1,
        vocab_size=VOCAB_SIZE,
        notes=(),
    )


class FakeEngine:
    """Runs one scripted delta of every open request per step.

    ``gate`` cleared holds all output back. ``submitted`` and ``aborted`` list request ids.
    """

    def __init__(
        self,
        script: Callable[[Request], Iterator[OutputDelta | QtoolError]] | None = None,
        *,
        delay: float = 0.0,
        max_model_len: int = 256,
    ) -> None:
        self.info = fake_info(max_model_len)
        self.alive = True
        self.script = script or say("Hello")
        self.delay = delay
        self.gate = threading.Event()
        self.gate.set()
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self._open: dict[str, tuple[Iterator[OutputDelta | QtoolError], Any]] = {}
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def open_ids(self) -> list[str]:
        with self._wake:
            return list(self._open)

    def submit(
        self, request: Request, on_output: Callable[[OutputDelta | QtoolError], None]
    ) -> None:
        with self._wake:
            if not self.alive:
                raise EngineError("the engine has stopped")
            assert request.request_id not in self._open
            self.requests.append(request)
            self._open[request.request_id] = (iter(self.script(request)), on_output)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        with self._wake:
            self.aborted.append(request_id)
            self._open.pop(request_id, None)

    def stats(self) -> EngineStats:
        return EngineStats(len(self.open_ids), 0, 3, 64, 11, 7, 1, 5)

    def die(self) -> None:
        """Stop as an engine does whose step raised."""
        with self._wake:
            self.alive = False
            failed, self._open = self._open, {}
            for _, on_output in failed.values():
                on_output(EngineError("the engine stopped: out of memory"))

    def close(self) -> None:
        with self._wake:
            self.alive = False
            self._wake.notify()
        self.gate.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._open or not self.alive)
                if not self.alive:
                    return
                batch = list(self._open.items())
            self.gate.wait()
            for request_id, (deltas, on_output) in batch:
                self._step(request_id, deltas, on_output)
            time.sleep(self.delay)

    def _step(self, request_id: str, deltas: Any, on_output: Any) -> None:
        with self._wake:
            if request_id not in self._open:
                return
            delta = next(deltas)
            if isinstance(delta, QtoolError) or delta.finish_reason is not None:
                del self._open[request_id]
            on_output(delta)
