"""Every error qtool raises on purpose.

    QtoolError                 exit code 1
      UsageError               exit code 2: an option's value cannot be used
      ModelError               the model cannot be found or is of a kind we do not support
      CheckpointError          files on disk are missing, damaged or contradict each other
      CalibrationError         text that cannot calibrate or evaluate a model
      QuantizationError        a plan or a weight that cannot be quantized as asked
      KernelError              a kernel's machine code is not what it must be
      RequestError             HTTP 400: one request is wrong, the engine is not
      EngineError              HTTP 500: the engine stopped or cannot start

A message has the value, the rule and the remedy, in this order. The command line prints
the message and exits with ``exit_code``; the server turns it into an OpenAI error object.
"""

from __future__ import annotations


class QtoolError(Exception):
    """Base of all errors a caller can cause."""

    exit_code = 1


class UsageError(QtoolError):
    """An option or argument has a value that cannot be used."""

    exit_code = 2


class ModelError(QtoolError):
    """The model cannot be found, or its architecture is not supported."""


class CheckpointError(QtoolError):
    """A checkpoint's files are missing, damaged, or contradict each other."""


class CalibrationError(QtoolError):
    """A text source cannot be used for calibration or evaluation."""


class QuantizationError(QtoolError):
    """A plan or a weight cannot be quantized as asked."""


class KernelError(QtoolError):
    """A kernel's machine code breaks a promise of docs/kernels.md."""


class RequestError(QtoolError):
    """One generation request is invalid.

    ``param`` names the field at fault, in the API's spelling, or is ``None``.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineError(QtoolError):
    """The engine has stopped, or cannot start with these settings."""
