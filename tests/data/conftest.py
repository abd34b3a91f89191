import itertools
import json

import pytest
from tokenizers import pre_tokenizers

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="session")
def llama3_json(tmp_path_factory):
    """A tokenizer.json with Llama 3's structure and number of entries, and invented merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = itertools.product(alphabet, alphabet)
    triples = ((a + b, c) for a, b, c in itertools.product(alphabet, alphabet, alphabet))
    merges = list(itertools.islice(itertools.chain(pairs, triples), 128_000 - 256))
    entries = [*alphabet, *(left + right for left, right in merges)]
    names = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(254))]
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    begin = {"SpecialToken": {"id": names[0], "type_id": 0}}
    single = [begin, {"Sequence": {"id": "A", "type_id": 0}}]
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {names[0]: {"id": names[0], "ids": [128_000], "tokens": [names[0]]}},
    }
    split = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 128_000 + i, "content": name, **flags} for i, name in enumerate(names)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {"type": "Sequence", "processors": [byte_level, template]},
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {entry: token for token, entry in enumerate(entries)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    return path
