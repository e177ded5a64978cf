"""One decoder block in memory: run, observed, and held against what it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qtool.calibration.observers import Observer
from qtool.errors import CalibrationError

# Tokens in one forward pass: enough for full speed, while activations of small models stay in the
# cache. GPTQ of a SmolLM2 block took .74 of the processor time that it took with 8192.
BATCH_TOKENS = 2048


class _SeenAll(Exception):
    """Ends a forward pass whose rest nobody looks at."""


class _Replay:
    """Stands in for a submodule whose last linear has its inputs already.

    Passes visit all batches in the same order, each once. The first pass computes the outputs,
    which take the place of the inputs.

    Args:
        as_tuple: the submodule is attention, which puts out weights too.
    """

    def __init__(self, linear: nn.Module, inputs: Sequence[Tensor], *, as_tuple: bool) -> None:
        self._linear, self._values, self._as_tuple = linear, list(inputs), as_tuple
        self._visits = 0

    def __call__(self, *_: Any, **__: Any) -> Tensor | tuple[Tensor, None]:
        index = self._visits % len(self._values)
        if self._visits < len(self._values):
            self._values[index] = self._linear(self._values[index])
        self._visits += 1
        return (self._values[index], None) if self._as_tuple else self._values[index]


def _pass_through(x: Tensor) -> Tensor:
    """Stands in for a norm whose output nobody reads."""
    return x


@dataclass(slots=True)
class DecoderBlock:
    """One decoder block with its weights, and what flows into it.

    Attributes:
        index: position in the model.
        prefix: full name, as ``model.layers.3``.
        module: the block, float32, on the walk's device. Replace weights in place.
        inputs: hidden states of all samples, float32 [num_samples, seq_len, hidden_size] on the
            host.
        arguments: the block's other arguments, the same for every batch of samples.
        device: where the module is.
        original_inputs: what ``inputs`` are in the original model, or ``None`` if nobody asked.
        original: the block as it computed before any of its weights was rounded, from
            :meth:`keep_original` until nobody looks at it again.
    """

    index: int
    prefix: str
    module: nn.Module
    inputs: Tensor
    arguments: Mapping[str, Any]
    device: torch.device
    original_inputs: Tensor | None = None
    original: nn.Module | None = None
    _replayed: list[nn.Module] = field(default_factory=list)
    _original_done: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return self.inputs.shape[0] * self.inputs.shape[1]

    def run(self) -> Iterator[Tensor]:
        """The block's outputs, batch by batch, each [batch, seq_len, hidden_size]."""
        return (self._output(self.module, batch) for batch in _batches(self.inputs))

    def _output(self, module: nn.Module, batch: Tensor) -> Tensor:
        output = module(batch.to(self.device), **self.arguments)
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden

    def keep_original(self) -> None:
        """Remember the block as it is; a walk without original inputs has no use for it.

        Called after rewrites that leave its function as it was, so that the original's
        activations are those of the rewritten block.
        """
        if self.original_inputs is not None:
            self.original = copy.deepcopy(self.module)

    def propagate(self) -> None:
        """Overwrite the inputs with the block's outputs, those of the original with its own.

        Raises:
            CalibrationError: an output is not finite.
        """
        for batch in _batches(self.inputs):
            self._hand_on(batch, self._output(self.module, batch))
        if self.original_inputs is not None and not self._original_done:
            assert self.original is not None, "keep_original() comes before the first rounding"
            for batch in _batches(self.original_inputs):
                self._hand_on(batch, self._output(self.original, batch))

    def _hand_on(self, batch: Tensor, output: Tensor) -> None:
        """Outputs take the place of their inputs."""
        # One number that an infinity or NaN among all others spoils: twenty times faster.
        if not output.sum().isfinite():
            raise CalibrationError(
                f"{self.prefix} puts out NaN or infinity on calibration text; the model overflows "
                "on this text, or its weights are damaged"
            )
        batch.copy_(output)

    def observe(self, observers: Mapping[str, Sequence[Observer]]) -> None:
        """Run the block on all samples; each named linear feeds its input to its observers.

        A pass ends when all of them have seen their input: what comes later is not computed.
        """
        waiting: set[str] = set()

        def tick(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(_: nn.Module, __: tuple[Any, ...]) -> None:
                waiting.discard(name)
                if not waiting:
                    raise _SeenAll

            return hook

        with ExitStack() as hooks:
            attach(self.module, observers, hooks)
            for name in observers:
                hook = self.module.get_submodule(name).register_forward_pre_hook(tick(name))
                hooks.callback(hook.remove)
            for batch in _batches(self.inputs):
                waiting.update(observers)
                with suppress(_SeenAll):
                    self.module(batch.to(self.device), **self.arguments)

    def beside_original(
        self, names: Collection[str], *, last: bool = False
    ) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """Inputs of submodules, now and in the original, batch by batch.

        A pass ends when all of them were reached. Needs :meth:`keep_original`.

        Args:
            names: of the submodules.
            last: nobody looks at this block's original again: it runs to its end, and its outputs
                take the place of its inputs, which :meth:`propagate` need not do then.

        Yields:
            Two dictionaries by name, float32 [tokens, features] each.
        """
        assert self.original is not None and self.original_inputs is not None
        streams = _batches(self.inputs), _batches(self.original_inputs)
        for now, then in zip(*streams, strict=True):
            present, _ = self._inputs_of(self.module, names, now)
            original, output = self._inputs_of(self.original, names, then, to_end=last)
            yield present, original
            if output is not None:
                self._hand_on(then, output)
        if last:
            self.original, self._original_done = None, True

    def _inputs_of(
        self, module: nn.Module, names: Collection[str], hidden: Tensor, *, to_end: bool = False
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Inputs of submodules, and the output if the module is to run to its end."""
        caught: dict[str, Tensor] = {}

        def catch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
                caught[name] = args[0].flatten(0, -2)
                if len(caught) == len(names) and not to_end:
                    raise _SeenAll

            return hook

        output = None
        with ExitStack() as hooks, suppress(_SeenAll):
            for name in names:
                hook = module.get_submodule(name).register_forward_pre_hook(catch(name))
                hooks.callback(hook.remove)
            output = self._output(module, hidden)
        return caught, output

    def replay(
        self,
        linear: str,
        now: Sequence[Tensor],
        then: Sequence[Tensor] = (),
        *,
        norm: str,
        attention: bool,
    ) -> None:
        """From now on let the parent of a linear run that alone, on inputs that are known.

        For when all weights before the linear are final. Until :meth:`release`.

        Args:
            linear: the last one of its parent, which puts out what it does. Its weight may change
                until the next pass.
            now, then: its inputs in all batches, here and in the original, as
                :meth:`beside_original` gave them; ``then`` is empty if the original is done.
            norm: what only the parent reads.
            attention: whether the parent is.
        """
        for module, flat in ((self.module, now), (self.original, then)):
            if not flat:
                continue
            assert module is not None
            inputs = [part.unflatten(0, (-1, self.inputs.shape[1])) for part in flat]
            parent = module.get_submodule(linear.rpartition(".")[0])
            parent.forward = _Replay(module.get_submodule(linear), inputs, as_tuple=attention)
            module.get_submodule(norm).forward = _pass_through
            if module is self.module:  # the original is never run by itself again
                self._replayed += [parent, module.get_submodule(norm)]

    def release(self) -> None:
        """Let submodules run by themselves again, and the original go."""
        for submodule in self._replayed:
            del submodule.forward
        self._replayed.clear()
        self.original = None

    def capture(self, name: str, samples: Sequence[int]) -> tuple[Tensor, dict[str, Any]]:
        """Input of a submodule on some of the samples, and its other arguments.

        Returns:
            Its hidden states, float32 [len(samples), seq_len, features], and keyword arguments.
        """
        caught: list[tuple[Tensor, dict[str, Any]]] = []

        def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rest = dict(kwargs)
            hidden = args[0] if args else rest.pop("hidden_states")
            caught.append((hidden, rest))

        submodule = self.module.get_submodule(name)
        hook = submodule.register_forward_pre_hook(catch, with_kwargs=True)
        try:
            self.module(self.inputs[list(samples)].to(self.device), **self.arguments)
        finally:
            hook.remove()
        return caught[0]


def attach(
    module: nn.Module, observers: Mapping[str, Sequence[Observer]], hooks: ExitStack
) -> None:
    """Each named linear feeds its input to its observers until ``hooks`` close."""
    for name, attached in observers.items():
        hook = module.get_submodule(name).register_forward_pre_hook(_feed(attached))
        hooks.callback(hook.remove)


def _batches(hidden: Tensor) -> tuple[Tensor, ...]:
    """Views of samples [num_samples, seq_len, hidden_size] for one forward pass each."""
    return tuple(hidden.split(max(1, BATCH_TOKENS // hidden.shape[1])))


def _feed(observers: Sequence[Observer]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        for observer in observers:
            observer.update(args[0].flatten(0, -2))

    return hook
