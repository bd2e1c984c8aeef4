"""Codes of 2, 4 or 8 bits in 32-bit words, as AutoAWQ and GPTQ store them: each word is whole.

Codes are signed here and unsigned on disk, ``u = code + 2^(b-1)``; words are little-endian. A word
holds P = 32 / b codes. Field i of a word (from the least significant bit) is code ``order[i]`` of
the P codes that the word holds; the plain order is 0, 1, 2 ...

Legend: R rows, C codes of a row, W words of a row, P codes of a word.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

WORD_BITS = 32


def pack_words(codes_RC: Tensor, num_bits: int, order: Sequence[int] | None = None) -> Tensor:
    """int32 [R, W] from signed int8 codes [R, C], where P divides C."""
    rows, columns = codes_RC.shape
    per_word, per_byte = WORD_BITS // num_bits, 8 // num_bits
    unsigned = codes_RC.contiguous().view(torch.uint8) + (1 << (num_bits - 1))  # wraps to 0 .. 2^b
    fields = unsigned.reshape(rows, columns // per_word, per_word)
    if order is not None:
        fields = fields[..., list(order)]
    octets = fields.reshape(rows, -1, per_byte)
    packed = torch.zeros(octets.shape[:2], dtype=torch.uint8, device=octets.device)
    for i in range(per_byte):
        packed |= octets[..., i] << (num_bits * i)
    return packed.contiguous().view(torch.int32)


def unpack_words(words_RW: Tensor, num_bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Signed int8 codes [R, W P]: the inverse of `pack_words`."""
    rows, words = words_RW.shape
    per_word, per_byte = WORD_BITS // num_bits, 8 // num_bits
    octets = _laid_out(words_RW).view(torch.uint8)
    fields = torch.empty((*octets.shape, per_byte), dtype=torch.uint8, device=octets.device)
    for i in range(per_byte):
        fields[..., i] = (octets >> (num_bits * i)) & ((1 << num_bits) - 1)
    fields = fields.reshape(rows, words, per_word)
    if order is not None:
        fields = fields[..., [list(order).index(i) for i in range(per_word)]]
    signed = fields.reshape(rows, -1) - (1 << (num_bits - 1))  # wraps to two's complement
    return signed.contiguous().view(torch.int8)


def add_to_words(words: Tensor, addend: int) -> Tensor:
    """int32 words plus `addend`, modulo 2^32: carries and borrows cross the fields of a word."""
    low_first = _laid_out(words.long() + addend).view(torch.int32)
    return _laid_out(low_first.reshape(*words.shape, 2)[..., 0])


def _laid_out(tensor: Tensor) -> Tensor:
    """A copy with strides of its own: `contiguous` leaves those of sizes of 1 as they are."""
    return tensor.clone(memory_format=torch.contiguous_format)
