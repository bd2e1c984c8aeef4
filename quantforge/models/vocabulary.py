"""How vocabularies spell bytes: GPT-2's alphabet, and SentencePiece's ``<0x0A>`` tokens."""

from functools import cache


def byte_token(token: str) -> int | None:
    """The byte of ``<0x0A>``, or None for any other token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def token_bytes(token: str, *, byte_fallback: bool) -> bytes:
    """The bytes that a token of either kind of vocabulary stands for."""
    if byte_fallback:
        byte = byte_token(token)
        return token.replace("\u2581", " ").encode() if byte is None else bytes([byte])
    table = byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()
