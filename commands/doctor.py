"""``qtool doctor``: what this machine has, and which kernels it would run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import JustifyMethod
from rich.markup import escape
from rich.table import Table

from qtool import __version__
from qtool.commands import console
from qtool.errors import EngineError
from qtool.formats.model_source import cache_folder
from qtool.runtime.kernels.cpu.build import load_native
from qtool.runtime.kernels.plan import PlannedKernel, planned_kernels
from qtool.runtime.machine import Machine, inspect_machine


def run(show: console.Show, build: bool = False) -> None:
    """Look around and print; a machine that lacks something is no error.

    Args:
        show: how.
        build: compile the native CPU code if that was not done yet; here its absence is an error.

    Raises:
        EngineError: ``build``, and there can be no native code.
    """
    if build:
        _build(show)
    machine = inspect_machine([Path.cwd(), cache_folder()])
    devices = ["cpu", "cuda"] if machine.gpus else ["cpu"]
    plans = {name: planned_kernels(torch.device(name)) for name in devices}
    if show.as_json:
        kernels = {name: [asdict(kernel) for kernel in plan] for name, plan in plans.items()}
        console.emit("result", {"qtool": __version__, **asdict(machine), "kernels": kernels})
        return
    console.out.print(_facts_table(machine))
    for name, plan in plans.items():
        console.out.print(_kernel_table(name, plan))


def _build(show: console.Show) -> None:
    with show.status("compiling the native CPU code"):
        native = load_native()
    if native.library is None:
        raise EngineError(f"--build: {native.reason}")


def _facts_table(machine: Machine) -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _facts(machine):
        table.add_row(name, escape(value))
    return table


def _facts(machine: Machine) -> Iterator[tuple[str, str]]:
    processor = machine.processor
    yield "qtool", f"{__version__}, Python {machine.python}, {machine.platform}"
    yield "CPU", processor.model
    yield "threads", f"{processor.cores} for {processor.logical_cpus} logical CPUs"
    found = ", ".join(processor.instruction_sets) or "none of those that kernels use"
    yield "instructions", f"{found} (torch uses {processor.torch_capability})"
    yield "free memory", console.size(machine.free_memory)
    if not machine.gpus:
        yield "GPU", "torch sees none"
    for gpu in machine.gpus:
        memory = f"{console.size(gpu.free_bytes)} of {console.size(gpu.total_bytes)} free"
        yield "GPU", f"{gpu.name}, capability {gpu.capability}, {memory}"
    for disk in machine.disks:
        yield "free disk", f"{console.size(disk.free_bytes)} at {disk.path}"
    for package, version in machine.packages.items():
        yield package, version or "not installed"
    yield "Triton here", machine.triton
    yield "native code", machine.native
    yield "C++ compiler", machine.compiler or "none (set CXX, or install g++)"


def _kernel_table(device: str, plan: tuple[PlannedKernel, ...]) -> Table:
    table = Table(title=f"kernels on {device}, as --backend auto chooses them", box=SIMPLE)
    for column in ("operation", "dtype", "back end: kernel", "B/weight", "why"):
        justify: JustifyMethod = "right" if column == "B/weight" else "left"
        table.add_column(column, justify=justify, no_wrap=column != "why")
    for kernel in plan:
        size = kernel.bytes_per_weight
        table.add_row(
            kernel.operation,
            kernel.dtype,
            f"{kernel.backend}: {kernel.kernel}",
            "-" if size is None else f"{size:.2f}",
            kernel.reason,
        )
    return table
