# SPDX-License-Identifier: Apache-2.0
"""Claim: text comes out piece by piece, whole characters only, and the pieces join to the decoding of all tokens."""

from __future__ import annotations

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mmjax.engine.detokenizer import _MAX_HELD, _WINDOW, Detokenizer

TEXTS = ["the quick brown fox, the lazy dog", "été à Zürich", "漢字と仮名", "🎉👩‍👩‍👧 naïve 🇫🇷", "x = 1;  # ok\n\n"]


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges inside and across the bytes of characters, two special tokens and an added one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|pad|>"])
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


@functools.cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """SentencePiece style: a leading space per word, stripped at the start, and a token for each byte."""
    words = ["▁", "▁the", "▁fox", "fox", "s", ",", "é", "漢"]
    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{b:02X}>": 2 + b for b in range(256)}}
    vocab.update({word: 258 + i for i, word in enumerate(words)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def _decode(tokenizer, ids, skip=True):
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def _pieces(tokenizer, ids, **options) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [detokenizer.add([i]) for i in ids] + [detokenizer.finish()]


def _bytes(text: str) -> list[int]:
    """Ids of the byte-level tokenizer, one per byte of `text`."""
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    return byte_level().convert_tokens_to_ids(list(symbols))


random_ids = st.lists(st.integers(0, 340), max_size=60)


@settings(deadline=None, max_examples=300)
@given(ids=random_ids, skip=st.booleans())
@example(ids=[284, 0, 0, 0, 1, 0, 0, 0, 0, 225], skip=True)
@example(ids=[96, 0, 0, 0, 0, 0, 0, 299, 0], skip=True)
def test_pieces_join_to_the_whole_for_random_ids(ids, skip):
    tokenizer = byte_level()
    assert "".join(_pieces(tokenizer, ids, skip_special_tokens=skip)) == _decode(tokenizer, ids, skip)


@settings(deadline=None, max_examples=100)
@given(ids=random_ids, cuts=st.lists(st.integers(1, 7), min_size=60, max_size=60))
def test_pieces_join_for_several_tokens_at_a_time(ids, cuts):
    tokenizer, detokenizer = byte_level(), Detokenizer(byte_level())
    pieces, rest = [], list(ids)
    for cut in cuts:
        pieces.append(detokenizer.add(rest[:cut]))
        del rest[:cut]
    assert "".join(pieces) + detokenizer.finish() == _decode(tokenizer, ids)


@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.one_of(st.integers(0, 1), st.integers(0x82, 0x101), st.integers(258, 265)), max_size=60))
def test_broken_bytes_neither_lose_nor_repeat_their_neighbours(ids):
    """With byte fallback the broken bytes themselves may read differently; everything in ASCII must not."""
    tokenizer = byte_fallback()
    whole = _decode(tokenizer, ids)
    joined = "".join(_pieces(tokenizer, ids))
    assert [c for c in joined if c.isascii()] == [c for c in whole if c.isascii()]


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=40), tokenizer=st.sampled_from([byte_level, byte_fallback]))
@example(text="a\ufffdb\ufffd", tokenizer=byte_level)
def test_valid_text_never_shows_a_broken_character(text, tokenizer):
    tokenizer = tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = _pieces(tokenizer, ids)
    assert "".join(pieces) == _decode(tokenizer, ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_appears_with_its_last_byte():
    assert _pieces(byte_level(), _bytes("a🎉b")) == ["a", "", "", "", "🎉", "b", ""]


def test_special_tokens_are_silent_also_inside_a_character():
    tokenizer = byte_level()
    first, second, mark = _bytes("é!")
    end, tool = tokenizer.convert_tokens_to_ids(["<|end|>", "<tool>"])
    pieces = _pieces(tokenizer, [end, first, end, second, end, tool, mark, end])
    assert pieces == ["", "", "", "é", "", "<tool>", "!", "", ""]


def test_the_first_word_alone_loses_its_space_whatever_precedes_it():
    tokenizer = byte_fallback()
    the, fox, s = tokenizer.convert_tokens_to_ids(["▁the", "▁fox", "s"])
    end = tokenizer.eos_token_id
    ids = [end, end, the, fox, s, *([fox] * 30), end, *([end] * 30), the]
    pieces = _pieces(tokenizer, ids)
    assert "".join(pieces) == "the foxs" + " fox" * 30 + " the" == _decode(tokenizer, ids)


def test_a_long_silence_is_no_new_beginning():
    tokenizer = byte_fallback()
    fox, end = tokenizer.convert_tokens_to_ids(["▁fox", "</s>"])
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add([fox] * _WINDOW + [end] * _WINDOW) == ("fox " * _WINDOW).rstrip()
    assert detokenizer.add([fox]) == " fox"


def test_a_lone_space_after_a_long_silence_counts_as_the_first_word():
    tokenizer = byte_fallback()
    space, fox, end = tokenizer.convert_tokens_to_ids(["▁", "▁fox", "</s>"])
    ids = [end] * (2 * _WINDOW) + [space, fox]
    assert "".join(_pieces(tokenizer, ids)) == _decode(tokenizer, ids) == " fox"


def test_byte_fallback_text_shown_is_not_taken_back():
    """Decoded as a whole, a wrong byte spoils the good character before it; the stream had shown that one already."""
    tokenizer = byte_fallback()
    ids = [2 + byte for byte in "é".encode() + b"\xff"] + tokenizer.convert_tokens_to_ids(["▁fox"])
    assert "".join(_pieces(tokenizer, ids)) == "é\ufffd fox"


@pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback])
def test_broken_bytes_are_held_only_as_long_as_they_may_become_a_character(tokenizer):
    tokenizer = tokenizer()
    stray = 2 + 0x80 if tokenizer is byte_fallback() else tokenizer.convert_tokens_to_ids("Ģ")
    assert _decode(tokenizer, [stray]) == "\ufffd"
    pieces = _pieces(tokenizer, [stray] * 100)
    assert "".join(pieces) == "\ufffd" * 100
    shown = 0
    for count, piece in enumerate(pieces[:-1], start=1):
        shown += len(piece)
        assert count - shown <= _MAX_HELD


class _Counting:
    """A tokenizer that counts how many tokens it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.tokens = tokenizer, 0

    def decode(self, ids, **kwargs):
        self.tokens += len(ids)
        return self.tokenizer.decode(ids, **kwargs)


@pytest.mark.parametrize("kind", ["text", "special", "broken"])
def test_work_per_token_does_not_grow(kind):
    tokenizer = _Counting(byte_level())
    token = byte_level().convert_tokens_to_ids({"text": "a", "special": "<|end|>", "broken": "Ģ"}[kind])
    detokenizer = Detokenizer(tokenizer)
    for _ in range(2000):
        detokenizer.add([token])
    assert tokenizer.tokens < 2000 * (_WINDOW + 2 * _MAX_HELD)
