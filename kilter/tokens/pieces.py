"""What a token is made of: the exact bytes behind a vocabulary entry.

Text is produced from tokens in bytes, because one character may be spread over several tokens.
Two spellings of bytes are in use, and a tokenizer's own `decoder` section says which is meant:

    byte-level      every byte is one printable character:    "Ġthe"   -> b" the"
    sentencepiece   spaces are "▁", stray bytes are "<0x0A>": "▁the"   -> b" the"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class PieceDecoder:
    """Turns vocabulary entries into bytes.

    byte_level: pieces are spelled in the byte alphabet of GPT-2.
    space: the character that stands for a space in sentencepiece spelling ("" if there is none).
    byte_fallback: pieces like "<0x0A>" stand for one byte.
    strips_first_space: one space at the very start of a text is not part of it.
    """

    byte_level: bool
    space: str = ""
    byte_fallback: bool = False
    strips_first_space: bool = False

    def bytes_of(self, piece: str) -> bytes:
        """The bytes of one vocabulary entry or added token."""
        if self.byte_level:
            table = byte_of_character()
            if all(character in table for character in piece):
                return bytes(table[character] for character in piece)
            return piece.encode()  # an added token written in plain text
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return (piece.replace(self.space, " ") if self.space else piece).encode()

    @classmethod
    def from_json(cls, decoder: Mapping[str, Any] | None) -> PieceDecoder:
        """Read the `decoder` section of a tokenizer.json.

        Raises ValueError for a decoder whose tokens have no bytes of their own (WordPiece, CTC).
        """
        steps = [] if decoder is None else [decoder]
        if decoder is not None and decoder["type"] == "Sequence":
            steps = list(decoder["decoders"])
        space, fallback, strips, fused = "", False, False, False
        for step in steps:
            match step:
                case {"type": "ByteLevel"} if len(steps) == 1:
                    return cls(byte_level=True)
                case {"type": "Replace", "pattern": {"String": pattern}, "content": " "}:
                    space = pattern
                case {"type": "Metaspace", "replacement": pattern}:
                    space = pattern
                    strips = step.get("prepend_scheme", "always") != "never"
                case {"type": "ByteFallback"}:
                    fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": 0 | 1, "stop": 0} if fused:
                    strips = step["start"] == 1
                case _:
                    steps = []
                    break
        if not steps:
            raise ValueError(
                f"The tokenizer's decoder {decoder!r} does not map every token to bytes, so its "
                "output cannot be streamed. Use a tokenizer with a ByteLevel decoder, or one of "
                "the sentencepiece kind (Replace or Metaspace, ByteFallback, Fuse, Strip)."
            )
        return cls(False, space, fallback, strips)


@cache
def byte_of_character() -> dict[str, int]:
    """The byte alphabet of GPT-2: printable Latin-1 stands for itself, the rest is U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table
