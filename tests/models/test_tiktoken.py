"""`tiktoken.model` by the definition: cut by the pattern, then merge the neighbours whose union has the lowest rank."""

import base64
import json
from itertools import pairwise

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_fx.effects import InputError
from mla_fx.models.tokenizer import Tokenizer

#: The pattern of `TikTokenTokenizer` as published, written for another library of regular expressions.
UPPER = r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]--\p{Han}]"
LOWER = r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]--\p{Han}]"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
CUT = regex.compile(
    r"(?V1)\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SHORT}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SHORT}"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
WORDS = ["the", "then", "there", "hello", "hell", "你好", "你们", "é", "123", "12", "''", "\n\n", "   ", "it's", "IT'S"]


def ranks():
    """All bytes, then unions of two tokens that are there, as training makes them, and one that no merge reaches."""
    tokens = [bytes([byte]) for byte in range(256)]
    for word in WORDS:
        parts = [bytes([byte]) for byte in word.encode()]
        while len(parts) > 1:
            parts[:2] = [parts[0] + parts[1]]
            if parts[0] not in tokens:
                tokens.append(parts[0])
    tokens += [b"re", b"en", b"her", b"  ", b"    ", b"lo", b"llo", b" the", "们".encode(), b"unreachable"]
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


RANKS = ranks()


def by_definition(text):
    """Token numbers of a text, by two loops."""
    numbers = []
    for piece in CUT.findall(text):
        if piece.encode() in RANKS:
            numbers.append(RANKS[piece.encode()])
            continue
        parts = [bytes([byte]) for byte in piece.encode()]
        while True:
            unions = [(RANKS[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in RANKS]
            if not unions:
                break
            _, at = min(unions)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        numbers += [RANKS[part] for part in parts]
    return numbers


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """As Kimi's: two named special tokens, one that is shown, and reserved ones."""
    path = tmp_path_factory.mktemp("kimi")
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in RANKS.items()]
    (path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    named = {
        str(len(RANKS) + n): {"content": content, "special": special}
        for n, (content, special) in enumerate([("[BOS]", True), ("[EOS]", True), ("<tool>", False)])
    }
    config = {"added_tokens_decoder": named, "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer(directory)


def test_by_hand(tokenizer):
    """A piece that is a token is taken as it is, though no merge reaches it; the mark before a word belongs to it."""
    assert tokenizer.encode("unreachable") == [RANKS[b"unreachable"]]
    assert tokenizer.encode("1234") == [RANKS[b"123"], RANKS[b"4"]]
    assert tokenizer.encode(" the") == [RANKS[b" the"]]
    assert tokenizer.encode("你好") == [RANKS["你好".encode()]]
    assert tokenizer.encode("") == []  # nothing is put around
    assert tokenizer.around.file == "tiktoken.model"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.one_of(
        st.text(max_size=20),
        st.lists(st.sampled_from([*WORDS, " ", "  ", "\n", "'", "X", "ß", "ǅ", "々", "٣", "!"]), max_size=12).map(
            "".join
        ),
    )
)
def test_any_text(tokenizer, text):
    assert tokenizer.encode(text) == by_definition(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(tokenizer):
    """Behind the file's own: named and reserved, 258 in all; one that is not special is shown."""
    first = len(RANKS)
    assert tokenizer.encode("[BOS]the<tool>") == [first, RANKS[b"the"], first + 2]
    assert tokenizer.encode(f"<|reserved_token_{first + 257}|>") == [first + 257]
    assert len(tokenizer.encode(f"<|reserved_token_{first + 258}|>")) > 1
    assert tokenizer.decode([first, RANKS[b"the"], first + 2, first + 7, first + 1]) == "the<tool>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r": the ranks of 0 tokens must be 0, 1, 2, \.\.\., each once"),
        (b"YQ== 0\nYg== 2\n", r": the ranks of 2 tokens must be 0, 1, 2, \.\.\., each once"),
        (b"YQ== 0\nY 1\n", r", line 2: must be a token in base64 and its rank: got b'Y 1'"),
        (b"YQ== x\n", r", line 1: must be a token in base64 and its rank: got b'YQ== x'"),
        (b"YQ==\n", r", line 1: must be a token in base64 and its rank: got b'YQ=='"),
    ],
)
def test_files_that_are_refused(tmp_path, content, message):
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(InputError, match=rf"^{tmp_path}/tiktoken.model{message}$"):
        Tokenizer(tmp_path)
