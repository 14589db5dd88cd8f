"""A tokenizer whose tokens are bytes: token id = byte value."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def _byte_symbols() -> list[str]:
    """The character that byte-level tokenizers write for each byte, 0 to 255 (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    symbols = {byte: chr(byte) for byte in printable}
    symbols |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [symbols[byte] for byte in range(256)]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, id = value; byte 0 ends a text and pads a batch (on the left)."""
    symbols = _byte_symbols()
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = symbols[0]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        bos_token=end,
        pad_token=end,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # in a text they are ordinary characters
    )
