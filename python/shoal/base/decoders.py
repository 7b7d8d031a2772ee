"""Decoders of msgspec types, which a module makes when it is imported and keeps.

msgspec crashes where several threads are the first to decode a type, so no decoder is made while threads run.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import msgspec

_Decoded = TypeVar("_Decoded")


@overload
def json_decoder(kind: type[_Decoded]) -> msgspec.json.Decoder[_Decoded]: ...
@overload
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a decoder of JSON."""
    return msgspec.json.Decoder(kind)


@overload
def msgpack_decoder(kind: type[_Decoded]) -> msgspec.msgpack.Decoder[_Decoded]: ...
@overload
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]: ...
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder of MessagePack."""
    return msgspec.msgpack.Decoder(kind)
