"""`tiktoken.model`, the vocabulary of Moonlight and Kimi, as a tokenizer of the `tokenizers` library.

A line of the file is a token's bytes in base64 and its rank.  tiktoken cuts a text by a pattern, takes a piece that is
a token as it is, and otherwise merges, again and again, the two neighbours whose union has the lowest rank.  So every
split of a token into two tokens is a merge, in the order of the ranks of the unions.

The pattern and the number of special tokens are those of the class that the checkpoints name, `TikTokenTokenizer`;
its code, which lies beside the weights, is not run.  It puts nothing around a text.
"""

import base64
import binascii
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from mla_fx.effects import InputError

#: Han characters by themselves; words with the mark before them, capitals first; up to three digits; other marks;
#: line ends; spaces.
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_MARK: Final = r"[^\r\n\p{L}\p{N}]?"
_SHORT: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN: Final = "|".join(
    (
        r"[\p{Han}]+",
        f"{_MARK}{_UPPER}*{_LOWER}+{_SHORT}",
        f"{_MARK}{_UPPER}+{_LOWER}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
#: Special tokens behind those of the file; one without a name in tokenizer_config.json is reserved.
SPECIAL: Final = 258


def load_tiktoken(path: Path, config: dict[str, Any]) -> Tokenizer:
    """Convert a file, with the special tokens of `added_tokens_decoder` of a tokenizer_config.json."""
    ranks = _ranks(path)
    visible = _visible_bytes()
    names = {token: "".join(visible[byte] for byte in token) for token in ranks}
    merges = [
        (names[token[:cut]], names[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    named = config.get("added_tokens_decoder") or {}
    for number in range(len(ranks), len(ranks) + SPECIAL):
        fields = named.get(str(number)) or {"content": f"<|reserved_token_{number}|>"}
        token = AddedToken(fields["content"], special=fields.get("special", True), normalized=False)
        if fields.get("special", True):
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    return tokenizer


def _ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise InputError(f"{path}, line {number}: must be a token in base64 and its rank: got {line!r}") from None
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise InputError(f"{path}: the ranks of {len(ranks)} tokens must be 0, 1, 2, ..., each once")
    return ranks


def _visible_bytes() -> dict[int, str]:
    """The character that stands for each byte: itself where it is printable, the others from 256 on, as in GPT-2."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
