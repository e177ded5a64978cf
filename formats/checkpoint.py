"""Model folders: :class:`CheckpointReader` streams in, :class:`CheckpointWriter` streams out."""

from qtool.formats.reader import CONFIG_NAME, CheckpointReader, TensorEntry, read_json
from qtool.formats.safetensors_file import TensorSource
from qtool.formats.writer import CheckpointWriter, check_free_space, check_target, dump_json

__all__ = [
    "CONFIG_NAME",
    "CheckpointReader",
    "CheckpointWriter",
    "TensorEntry",
    "TensorSource",
    "check_free_space",
    "check_target",
    "dump_json",
    "read_json",
]
