"""The bytes of tokens, for each of the ways in which tokenizers write them."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from prefixd.serving.text.token_bytes import TokenBytes

TEXT = "Grüß Gott, 你好 🙂\n\x00"


def of(tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes(tokenizer, tokenizer.get_added_tokens_decoder().keys())


def test_byte_level_tokens_join_to_the_text() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("G", "o"), ("Ġ", "Go")]
    vocab = {letter: place for place, letter in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<é>", special=True)])
    ids = tokenizer.encode(TEXT + "<é>").ids
    tokens = of(tokenizer)
    assert b"".join(map(tokens.of, ids)) == (TEXT + "<é>").encode()
    assert b" Go" in map(tokens.of, ids)
    assert tokens.of(99_999) == b"", "the model's vocabulary may be longer"


def test_sentencepiece_tokens_have_their_spaces() -> None:
    vocab = {"▁": 0, "▁Go": 1, "G": 2, "o": 3, "▁G": 4} | {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "G"), ("▁G", "o")], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokens = of(tokenizer)
    assert [tokens.of(token) for token in (1, 5 + 0xC3, 5 + 10)] == [b" Go", b"\xc3", b"\n"]


def test_other_tokens_are_decoded() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"un": 0, "##do": 1, "[UNK]": 2}))
    tokenizer.decoder = decoders.WordPiece()
    assert [of(tokenizer).of(token) for token in (0, 1)] == [b"un", b"##do"], "a piece alone has its sign"
    plain = Tokenizer(models.WordLevel(vocab={"word": 0}, unk_token="word"))
    assert of(plain).of(0) == b"word"
