"""HPACK (RFC 7541), as far as a gRPC server needs it: it reads requests' headers and writes few.

Huffman codes are canonical: those of a length follow each other in the order of `HUFFMAN`, from the next code
of the length before. Only printable ASCII is read; a gateway's own gRPC headers have nothing else.
"""

from __future__ import annotations

from collections import deque

ENTRY_BYTES = 32  # that a table counts for an entry, in addition to its text
TABLE_BYTES = 4096
MOST_HEADERS = 200
_STATIC = (
    ":authority|:method=GET|:method=POST|:path=/|:path=/index.html|:scheme=http|:scheme=https|:status=200|"
    ":status=204|:status=206|:status=304|:status=400|:status=404|:status=500|accept-charset|"
    "accept-encoding=gzip, deflate|accept-language|accept-ranges|accept|access-control-allow-origin|age|"
    "allow|authorization|cache-control|content-disposition|content-encoding|content-language|"
    "content-length|content-location|content-range|content-type|cookie|date|etag|expect|expires|from|host|if-match|"
    "if-modified-since|if-none-match|if-range|if-unmodified-since|last-modified|link|location|max-forwards|"
    "proxy-authenticate|proxy-authorization|range|referer|refresh|retry-after|server|set-cookie|"
    "strict-transport-security|transfer-encoding|user-agent|vary|via|www-authenticate"
)
STATIC = tuple((name, value) for name, _, value in (one.partition("=") for one in _STATIC.split("|")))
HUFFMAN = {  # bits: characters
    5: "012aceiost",
    6: " %-./3456789=A_bdfghlmnpru",
    7: ":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: "&*,;XZ",
    10: "!\"()?",
    11: "'+|",
    12: "#>",
    13: "\0$@[]~",
    14: "^}",
    15: "<`{",
    19: "\\",
}  # fmt: skip


class BadHeaders(ValueError):
    """A header block that cannot be read; the connection's state is lost with it."""


def _codes() -> dict[tuple[int, int], str]:
    codes, code, bits = {}, 0, 0
    for length, characters in HUFFMAN.items():
        code <<= length - bits
        bits = length
        for one in characters:
            codes[length, code] = one
            code += 1
    return codes


_CODES = _codes()
_LENGTHS = tuple(HUFFMAN)


def unhuffed(data: bytes) -> str:
    """A Huffman-coded text. Raises BadHeaders."""
    whole, left = int.from_bytes(data, "big"), len(data) * 8
    text = []
    while left >= _LENGTHS[0]:
        for length in _LENGTHS:
            if length > left:
                break
            one = _CODES.get((length, (whole >> (left - length)) & ((1 << length) - 1)))
            if one is not None:
                text.append(one)
                left -= length
                break
        else:
            raise BadHeaders("a Huffman code that no printable character has")
        if one is None:
            break
    if left >= 8 or whole & ((1 << left) - 1) != (1 << left) - 1:
        raise BadHeaders("Huffman padding")
    return "".join(text)


class HeaderDecoder:
    """The headers of one connection's requests; each block changes the table for the next."""

    def __init__(self) -> None:
        self._table: deque[tuple[str, str]] = deque()
        self._size, self._most = 0, TABLE_BYTES

    def decoded(self, block: bytes) -> dict[str, str]:
        """The headers of a block. Raises BadHeaders."""
        headers: dict[str, str] = {}
        at, count = 0, 0
        while at < len(block):
            first, count = block[at], count + 1
            if count > MOST_HEADERS:
                raise BadHeaders("too many headers")
            if first & 0x80:  # indexed
                index, at = _number(block, at, 7)
                name, value = self._entry(index)
            elif first & 0xE0 == 0x20:  # another size of the table
                self._most, at = _number(block, at, 5)
                if self._most > TABLE_BYTES:
                    raise BadHeaders("a table larger than was offered")
                self._evict()
                continue
            else:
                keeps = first & 0xC0 == 0x40
                index, at = _number(block, at, 6 if keeps else 4)
                if index:
                    name = self._entry(index)[0]
                else:
                    name, at = _text(block, at)
                value, at = _text(block, at)
                if keeps:
                    self._table.appendleft((name, value))
                    self._size += ENTRY_BYTES + len(name) + len(value)
                    self._evict()
            headers[name] = value
        return headers

    def _entry(self, index: int) -> tuple[str, str]:
        if 0 < index <= len(STATIC):
            return STATIC[index - 1]
        if not 0 <= index - len(STATIC) - 1 < len(self._table):
            raise BadHeaders("an index outside the table")
        return self._table[index - len(STATIC) - 1]

    def _evict(self) -> None:
        while self._size > self._most and self._table:
            name, value = self._table.pop()
            self._size -= ENTRY_BYTES + len(name) + len(value)


def _number(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """A number that begins in the last bits of a byte, and where it ends."""
    most = (1 << bits) - 1
    value, at = block[at] & most, at + 1
    if value < most:
        return value, at
    for shift in range(0, 28, 7):
        if at >= len(block):
            break
        value, at = value + ((block[at] & 0x7F) << shift), at + 1
        if not block[at - 1] & 0x80:
            return value, at
    raise BadHeaders("a number without an end")


def _text(block: bytes, at: int) -> tuple[str, int]:
    if at >= len(block):
        raise BadHeaders("a text is missing")
    is_coded = block[at] & 0x80
    length, at = _number(block, at, 7)
    data = block[at : at + length]
    if len(data) < length:
        raise BadHeaders("a text is cut short")
    return (unhuffed(data) if is_coded else data.decode("latin-1")), at + length


def literal(name: str, value: str) -> bytes:
    """A short header in plain bytes, outside the table."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
