"""The file of a click model's dense part: written by `torch.save`, and read where others may have written it.

What is read takes memory in proportion to the file, and calls nothing but what `torch.save` writes for tensors. The
module of the configuration is made without memory first: its parameters must be those of the file.

Threads: no state.
"""

from __future__ import annotations

import contextlib
import io
import pickletools
import re
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shoal.errors import CorruptionError
from shoal.store.base import Store
from shoal.store.local import local

# `torch.save` stores what it saves; a tensor is rebuilt from a storage, which is read from the file.
_GLOBAL = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch (?!Typed|Untyped)\w+Storage"
    r"|torch device|torch (b?float|u?int|complex)\d+|torch bool"
)
_CALLS_BY_OTHER_WORDS = ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")


def read_tower(data: bytes, what: str) -> dict[str, Any]:
    """Read the dense part of a click model, the bytes of a file: CorruptionError names it, if it is damaged."""
    try:
        # Written again, since torch finds the files of an archive in another way than zipfile, which has checked them.
        state = torch.load(_stored(data), weights_only=True)
        tensors = [tensor for tensor in state["module"].values() if isinstance(tensor, torch.Tensor)]
        if sum(tensor.nbytes for tensor in tensors) > len(data):
            raise ValueError("its tensors are larger than the file")
    except Exception as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise CorruptionError(f"{what} is damaged: it is not the dense part of a click model ({reason:.200})") from None
    found: dict[str, Any] = state
    return found


def _stored(data: bytes) -> io.BytesIO:
    """Return an archive that holds what `torch.save` writes, each file once and without compression."""
    copy = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(copy, "w") as stored:
        files = archive.infolist()
        if any(file.compress_type != zipfile.ZIP_STORED for file in files):
            raise ValueError("its files are compressed")
        if sum(file.file_size for file in files) > len(data):
            raise ValueError("its files are larger than itself")
        if len({file.filename for file in files}) != len(files):
            raise ValueError("two of its files have one name")
        for file in files:
            content = archive.read(file)
            if file.filename.endswith(".pkl"):
                _check_calls(content)
            stored.writestr(file.filename, content)
    copy.seek(0)
    return copy


def _check_calls(content: bytes) -> None:
    for operation, argument, _ in pickletools.genops(content):
        is_known = {"GLOBAL": _GLOBAL.fullmatch(str(argument)), "PROTO": argument == 2}.get(operation.name, True)
        if operation.name in _CALLS_BY_OTHER_WORDS or not is_known:
            raise ValueError(f"it names {argument or operation.name}")


def check_module(make: Callable[[Store], nn.Module], data: bytes, what: str) -> None:
    """Check that the module that `make` makes has the parameters of a dense part: CorruptionError. Takes no memory."""
    found = _shapes(read_tower(data, what)["module"])
    left = len(found)
    this_thread = threading.get_ident()

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal left
        if threading.get_ident() == this_thread and parameter is not None and parameter.numel():
            left -= 1
            if left < 0:
                raise CorruptionError(f"{what} is the dense part of another model: it has {len(found)} parameters")

    counting = nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        with (
            described_by(f"the configuration beside {what}", ValueError, RuntimeError),
            local(threads=1, slots=2) as store,
            torch.device("meta"),
            torch.random.fork_rng(devices=[]),
        ):
            wanted = _shapes(make(store).state_dict())
    finally:
        counting.remove()
    for name in found | wanted:
        if found.get(name) != wanted.get(name):
            raise CorruptionError(
                f"{what} is the dense part of another model: its {name} has the shape {found.get(name)} instead of "
                f"{wanted.get(name)}"
            )


@contextlib.contextmanager
def described_by(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Convert errors of a configuration that was read from a file to CorruptionError, those of ``kinds`` too."""
    caught: tuple[type[Exception], ...] = (KeyError, TypeError, AttributeError, *kinds)
    try:
        yield
    except caught as error:
        raise CorruptionError(f"{what} describes no model: {error!r:.200}") from error


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a module's state."""
    return {name: tuple(tensor.shape) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
