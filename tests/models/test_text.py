"""Text as its tokens come: the pieces are the whole, and no character is shown before all of it is there."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from mla_fx.models.addition import DIRECTORY
from mla_fx.models.text import TextStream
from mla_fx.models.tokenizer import Tokenizer

#: GPT-2's names of the 256 bytes, in an order of the library's own.
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def by_bytes(tmp_path_factory):
    """A token for each byte, two merges, and a special token."""
    library = Library(models.BPE(vocab={**{c: i for i, c in enumerate(BYTES)}, "he": 256, "hel": 257}, merges=MERGES))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    directory = tmp_path_factory.mktemp("by bytes")
    library.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


MERGES = [("h", "e"), ("he", "l")]
END = 258
#: The name of each byte, from the two that every reader of GPT-2's files knows: itself, or counted from 256 on.
VISIBLE = [c if (c := chr(b)) in BYTES else None for b in range(256)]
for _hidden, _byte in enumerate(b for b in range(256) if VISIBLE[b] is None):
    VISIBLE[_byte] = chr(256 + _hidden)


def pieces(tokenizer, tokens, cuts=None):
    """What a stream shows, token after token or in the given portions."""
    stream, shown, start = TextStream(tokenizer), [], 0
    for size in cuts or [1] * len(tokens):
        shown.append(stream.add(tokens[start : start + size], finished=start + size >= len(tokens)))
        start += size
    return shown


def test_a_character_waits_for_its_last_byte(by_bytes):
    tokens = by_bytes.encode("hel€é!")
    assert len(tokens) == 1 + 3 + 2 + 1
    assert pieces(by_bytes, tokens) == ["hel", "", "", "€", "", "é", "!"]
    assert pieces(by_bytes, tokens, [3, 2, 2]) == ["hel", "€", "é!"]


def test_what_is_no_text_is_shown_at_the_end(by_bytes):
    """A text that ends within a character ends with the replacement character, as the whole does."""
    tokens = by_bytes.encode("a€")[:-1]
    assert pieces(by_bytes, tokens) == ["a", "", "\ufffd"]
    assert by_bytes.decode(tokens) == "a\ufffd"


def test_broken_bytes_in_the_middle(by_bytes):
    tokens = [*by_bytes.encode("€")[:2], *by_bytes.encode("xé")]
    assert "".join(pieces(by_bytes, tokens)) == by_bytes.decode(tokens) == "\ufffdxé"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(max_size=30), st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_any_text_in_any_portions(by_bytes, text, cuts):
    """In such portions, again and again."""
    tokens = by_bytes.encode(text)
    assert by_bytes.decode(tokens) == text
    stream, start, shown = TextStream(by_bytes), 0, ""
    for size in itertools.cycle(cuts):
        shown += stream.add(tokens[start : start + size], finished=start + size >= len(tokens))
        start += size
        assert text.startswith(shown)
        if start >= len(tokens):
            break
    assert shown == text


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, END), max_size=40))
def test_any_tokens(by_bytes, tokens):
    assert "".join(pieces(by_bytes, tokens)) == by_bytes.decode(tokens)


def test_special_tokens_are_not_shown(by_bytes):
    assert pieces(by_bytes, [*by_bytes.encode("he"), END]) == ["he", ""]


def test_a_decoder_that_looks_back(tmp_path):
    """Bytes as a fallback: one that is wrong for now makes all bytes beside it wrong; what was shown stays."""
    vocabulary = {**{f"<0x{b:02X}>": b for b in range(256)}, "<unk>": 256}
    library = Library(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    tokens = list("a€b".encode())
    assert tokenizer.decode(tokens) == "a€b"
    assert pieces(tokenizer, tokens) == ["a", "", "", "€", "b"]
    assert pieces(tokenizer, tokens[:3]) == ["a", "", "\ufffd\ufffd"]  # not shown before, so not lost


def test_the_trained_model_has_a_tokenizer():
    tokenizer = Tokenizer(DIRECTORY)
    tokens = tokenizer.encode("12 + 3 =")
    assert tokens[0] == 1  # the beginning
    assert tokenizer.decode(tokens).replace(" ", "") == "12+3="
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


# --- in proportion to its length ------------------------------------------------


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.special, self.decoded = tokenizer, tokenizer.special, 0

    def decode(self, tokens):
        self.decoded += len(tokens)
        return self.tokenizer.decode(tokens)


@pytest.mark.parametrize("piece", ["a", "€", "hel", "🙂é", b"\x80", b"\xe2\x82", "<end>"], ids=repr)
def test_time_is_in_proportion_to_the_length(by_bytes, piece):
    """Tokens that are decoded, for each that comes: characters, parts of one, bytes that are never one, none at all."""
    if piece == "<end>":
        tokens = [END]
    else:
        tokens = by_bytes.encode(piece) if isinstance(piece, str) else [BYTES.index(VISIBLE[b]) for b in piece]
    tokens = tokens * (4000 // len(tokens))
    counting = Counting(by_bytes)
    text = "".join(pieces(counting, tokens))
    assert text == by_bytes.decode(tokens)
    assert counting.decoded <= 12 * len(tokens)


# --- stop strings ---------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text("abé", max_size=20), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_text_up_to_the_first_stop_string(by_bytes, text, stops):
    """Token after token, and a character of two bytes has two: the text before the string that is whole first."""
    stream, shown = TextStream(by_bytes, stops), ""
    tokens = by_bytes.encode(text)
    for place, token in enumerate(tokens):
        shown += stream.add([token], finished=place == len(tokens) - 1)
        assert shown == stream.text
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if ends:
        seen = text[: ends[0]]
        text = seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    assert shown == text
    assert (stream.stopped is not None) == bool(ends)
    if ends:
        assert stream.add(by_bytes.encode("more")) == "" and stream.text == text


def test_what_may_begin_a_stop_string_waits(by_bytes):
    stream = TextStream(by_bytes, ["\n\nQ:"])
    shown = [stream.add([token]) for token in by_bytes.encode("a\nb\n\nQ; \n\nQ:x")]
    assert shown == ["a", "", "\nb", "", "", "", "\n\nQ;", " ", "", "", "", "", ""]
    assert stream.text == "a\nb\n\nQ; "
    assert stream.stopped == "\n\nQ:"
