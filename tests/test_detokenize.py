"""Text that grows with its tokens is the text of all of them, whatever the tokenizer, and at a cost that is linear."""

from itertools import pairwise
from random import Random

import pytest
import torch
from test_other_tokenizer import KINDS, byte_level, every_byte
from tiny import ALPHABET
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from specdec_lib.decode.stopping import Stopping, TextStream
from specdec_lib.detokenize import Detokenizer, GrowingText

TEXT = "the cab , a bee . It is n't 'the ' cab 've we ? né — 🔥你 ! \n\n a  b"


def tidy(tokenizer):
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    return tokenizer


def word_pieces():
    """As BERT's: words between spaces, `##` in front of what goes on, spaces before punctuation taken away."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["[PAD]", "[UNK]", *"abcehitnv'.,?!", *(f"##{c}" for c in "abceht"), "the", "is", "##ing"]
    inner = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]")


def metaspace():
    """As T5's: a `▁` for each space, and one before every text that reading drops again."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<pad>", "</s>", "<unk>", "▁", "▁the", "▁a", "▁'", "▁.", *"abcehinstv',.?!🔥é", "▁n", "'t", "▁▁"]
    inner = Tokenizer(models.Unigram([(name, -float(i)) for i, name in enumerate(names)], unk_id=2))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")


def suffixes():
    """As the first GPT's: the end of a word is marked, and becomes a space unless the text ends with it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [*"abcehinstv'.,?!", *(f"{c}</w>" for c in "abcehinstv'.,?!")]
    names = {name: i for i, name in enumerate(["<unk>", *letters])}
    inner = Tokenizer(models.BPE(names, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.BPEDecoder(suffix="</w>")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def spaced():
    """Byte-level, with tokens of spaces and of what a tidying decoder looks at."""
    merges = [("Ġ", "Ġ"), ("Ġ", "n"), ("Ġ", "'"), ("'", "t"), ("Ġ", "."), ("Ċ", "Ċ"), ("v", "e")]
    return byte_level(["<eos>", "<unk>", *ALPHABET, *("".join(m) for m in merges)], merges)


TOKENIZERS = {
    **KINDS,
    "bytes": every_byte,
    "spaced": spaced,
    "word pieces": word_pieces,
    "metaspace": metaspace,
    "suffixes": suffixes,
    "bytes that are left out": ByT5Tokenizer,
    **{f"tidy {name}": lambda make=make: tidy(make()) for name, make in KINDS.items()},
    "tidy bytes": lambda: tidy(every_byte()),
    "tidy spaced": lambda: tidy(spaced()),
    "tidy metaspace": lambda: tidy(metaspace()),
    "tidy suffixes": lambda: tidy(suffixes()),
    "tidy word pieces": lambda: tidy(word_pieces()),
}


def texts_of(tokenizer, seed, length=120):
    """Tokens of a text, any tokens, and tokens of a few that meet often."""
    random, ids = Random(seed), sorted(tokenizer.get_vocab().values())
    few = random.sample(ids, min(4, len(ids)))
    text = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    return [random.choices(text, k=length), random.choices(ids, k=length), random.choices(few, k=length), text * 2]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_growing_text_is_the_text_of_all_tokens(name):
    """https://github.com/vllm-project/vllm/issues/17448 - a part decoded for itself is not that part of the text."""
    tokenizer = TOKENIZERS[name]()
    whole = Detokenizer.of(tokenizer)
    for seed in range(3):
        for ids in texts_of(tokenizer, seed):
            text, final = GrowingText(whole), ""
            for n, token in enumerate(ids, 1):
                final += text.add([token])
                assert final + text.open == whole(ids[:n]), (ids[:n], tokenizer.convert_ids_to_tokens(ids[:n]))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_stop_string_is_found_where_the_whole_text_first_holds_it(name):
    tokenizer = TOKENIZERS[name]()
    found = 0
    for seed in range(2):
        for ids in texts_of(tokenizer, seed):
            decode = Detokenizer.of(tokenizer)
            whole, random = decode(ids), Random(seed)
            begin = random.randrange(max(len(whole), 1))
            strings = [whole[begin : begin + n] for n in (1, 3, 7) if whole[begin : begin + n]]
            for string in [*strings, "\ufffd", "é", " ."]:
                stopping = Stopping(frozenset(), (string,), decode=decode)
                check = stopping.begin([])
                first = next((n for n in range(len(ids)) if string in decode(ids[: n + 1])), None)
                answers = [check.reason(token) for token in ids[: None if first is None else first + 1]]
                assert answers.count("stop string") == (first is not None) and not any(answers[:-1])
                found += first is not None
    assert found > 10


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_was_shown_is_the_text(name):
    tokenizer, random = TOKENIZERS[name](), Random(0)
    for seed in range(2):
        for ids in texts_of(tokenizer, seed):
            stopping = Stopping(frozenset(), ("ab", "e ."), decode=Detokenizer.of(tokenizer))
            end = next((n for n in range(1, len(ids)) if stopping.text(ids[:n]) != stopping.decode(ids[:n])), len(ids))
            stream, shown, begin = TextStream(stopping), "", 0
            while begin < end:
                new = ids[begin : min(begin + random.randint(1, 4), end)]
                begin += len(new)
                shown += stream.piece(new, last=begin == end)
                assert stopping.text(ids[:end]).startswith(shown)
            assert shown == stopping.text(ids[:end])


class Counted:
    """A tokenizer's decoder, counting its calls and the tokens that they decode."""

    def __init__(self, tokenizer):
        self.of = Detokenizer.of(tokenizer)
        self.calls = self.tokens = 0

    def __call__(self, ids):
        self.calls += 1
        self.tokens += len(ids)
        return self.of.decode(ids)

    @property
    def detokenizer(self):
        return Detokenizer(self, self.of.tidies, self.of.skipped, self.of.is_byte)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stop_strings_and_streams_decode_a_few_tokens_for_each_one(name):
    """Twice the text, twice the tokens decoded: decoding all of it at each token would be four times as many."""
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer("the cab, a bee. It is néver the end of a cab\n", add_special_tokens=False)["input_ids"]
    ids = (ids * 400)[:4000]
    counts = []
    for n in (2000, 4000):
        stops, streams = Counted(tokenizer), Counted(tokenizer)
        check = Stopping(frozenset(), ("zzz",), decode=stops.detokenizer).begin([])
        stream = TextStream(Stopping(frozenset(), ("zzz",), decode=streams.detokenizer))
        for begin in range(0, n, 4):
            assert not any(check.reason(token) for token in ids[begin : begin + 4])
            stream.piece(ids[begin : begin + 4])
        counts.append(stops.tokens)
        assert stops.calls <= 2 * n and streams.calls == stops.calls and stops.tokens == streams.tokens < 7 * n
    assert counts[1] < 2.1 * counts[0]


def test_criteria_see_every_text_and_it_is_not_copied_for_them():
    seen, places = [], []

    def watch(ids, scores):
        seen.append(ids.clone())
        places.append(ids.data_ptr())
        return False

    prompt, new = [5, 9, 17], [i % 50 for i in range(4000)]
    check = Stopping(frozenset(), criteria=(watch,)).begin(prompt)
    assert not any(check.reason(token) for token in new)
    whole = torch.tensor([prompt + new])
    assert all(torch.equal(ids, whole[:, : len(prompt) + n]) for n, ids in enumerate(seen, 1))
    assert sum(a != b for a, b in pairwise(places)) <= 7  # 67, then twice as much each time
    assert all(ids.dtype == torch.long and ids.shape[0] == 1 for ids in seen)
