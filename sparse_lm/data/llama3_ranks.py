"""Llama 3's tokenizer from `tokenizer.model`, the file beside Meta's own checkpoints.

The file is tiktoken's: a line an entry, its bytes in base64 and its rank. It holds neither the
pattern that splits text into words nor the special tokens, which are part of Llama 3's code
(2407.21783); they are repeated here. Hence only a file with exactly Llama 3's entries is taken.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from sparse_lm.data.errors import DataError

ENTRIES = 128_000
SPECIAL_TOKENS = 256
WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Of the release of April 2024. Later ones give names to some reserved tokens; no text is tokenised to any of them.
NAMED_TOKENS = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "<|eot_id|>",
}


def load_llama3_ranks(path: Path) -> Tokenizer:
    """Llama 3's tokenizer: 128,000 byte pairs and 256 special tokens behind them.

    Raises:
      DataError: the file is of another kind, such as a SentencePiece model, or not Llama 3's.
    """
    ranks = read_ranks(path)
    if len(ranks) != ENTRIES:
        raise DataError(
            f"{path} has {len(ranks):,} entries, Llama 3's has {ENTRIES:,}: how another one splits text is not in such "
            "a file; name its tokenizer.json"
        )
    tokenizer = byte_pair_encoder(ranks, WORDS)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special_token_names()])
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Entry -> rank, from a file in tiktoken's format.

    Raises:
      DataError: it has another format, or its ranks are not 0, 1, 2 and so on.
    """
    ranks: dict[bytes, int] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            try:
                entry, rank = line.split()
                ranks[base64.b64decode(entry, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise DataError(
                    f"{path}:{number + 1} is not an entry in base64 and its rank, as tiktoken writes them: name the "
                    "tokenizer.json of a SentencePiece model"
                ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(f"{path} is damaged: its ranks are not 0..{len(ranks) - 1}, each once")
    return ranks


def byte_pair_encoder(ranks: dict[bytes, int], words: Regex) -> Tokenizer:
    """A byte-level BPE that encodes as tiktoken does with these ranks.

    tiktoken joins the two neighbours in a word whose joint entry has the lowest rank. The equivalent
    merges are all the ways to make an entry of two others, in the order of the entries' ranks.
    A word that is an entry is taken whole.

    Args:
      ranks: entry -> id, all 256 bytes among the entries.
      words: each match is encoded by itself.
    """
    letters = byte_letters()
    spelled = {entry: "".join(letters[byte] for byte in entry) for entry in ranks}
    merges = []
    for entry in sorted(ranks, key=ranks.__getitem__):
        cuts = ((entry[:cut], entry[cut:]) for cut in range(1, len(entry)))
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spelled[left], spelled[right]) for left, right in pairs]
    vocabulary = {spelled[entry]: rank for entry, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_letters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary, as GPT-2 chose them.

    Visible Latin-1 characters stand for themselves, the others for the code points from 256 on.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def special_token_names() -> list[str]:
    """Names of the ids from 128,000 on."""
    reserved = iter(range(SPECIAL_TOKENS))
    return [NAMED_TOKENS.get(i) or f"<|reserved_special_token_{next(reserved)}|>" for i in range(SPECIAL_TOKENS)]
