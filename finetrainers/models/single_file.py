"""Address of `load_single_file` in the model cards of earlier versions."""

from .files.single_file import load_single_file

__all__ = ["load_single_file"]
