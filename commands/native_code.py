"""Native CPU code, compiled before long work instead of in its middle."""

from __future__ import annotations

from qtool.commands import console
from qtool.quantize.methods import METHODS
from qtool.quantize.options import QuantizeOptions
from qtool.runtime.kernels.cpu.build import load_native, will_compile


def ready(options: QuantizeOptions, show: console.Show) -> None:
    """Compile now what the end of a run would compile, once a machine and version of qtool.

    A forecast does so too: the run it is of then finds the code, and takes the time it says.
    Where there is no compiler, the result runs on torch, as anywhere else.
    """
    quantizes = METHODS[options.method].recipe.family is not None
    runs_result = options.eval_windows > 0 or options.kv_cache is not None
    if quantizes and runs_result and options.torch_device.type == "cpu" and will_compile():
        with show.status("compiling the native CPU code, once for this version of qtool"):
            load_native()
