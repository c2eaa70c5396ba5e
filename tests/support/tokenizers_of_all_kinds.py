"""Makes small tokenizers with any combination of a model in MODELS, a pre-tokenizer in PRE_TOKENIZERS, and special
tokens around a text in AROUND."""

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, UNK, CLS, SEP = SPECIAL = ["<s>", "</s>", "<pad>", "<unk>", "[CLS]", "[SEP]"]
IDS = {token: index for index, token in enumerate(SPECIAL)}
CORPUS = ["Q: what?\nA: 42 the cat sat on the mat", "  two  spaces\tand a tab", "Größe 数据 🙂 don't, 1234"] * 9
LETTERS = {letter for text in CORPUS for letter in text} | {chr(code) for code in range(33, 127)} | {"\u2581"}
LETTERS = sorted(LETTERS | {*pre_tokenizers.ByteLevel.alphabet()})


def _sequence():
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


# name -> (function that makes a pre-tokenizer or None, function that makes a decoder or None)
PRE_TOKENIZERS = {
    "byte level": (lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel),
    "byte level, a space before": (lambda: pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel),
    "metaspace always": (lambda: pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace),
    "metaspace first": (lambda: pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace),
    "metaspace never": (
        lambda: pre_tokenizers.Metaspace(prepend_scheme="never"),
        lambda: decoders.Metaspace(prepend_scheme="never"),
    ),
    "white space": (pre_tokenizers.Whitespace, None),
    "white space split": (pre_tokenizers.WhitespaceSplit, None),
    "bert": (pre_tokenizers.BertPreTokenizer, None),
    "punctuation": (pre_tokenizers.Punctuation, decoders.Fuse),
    "digits": (lambda: pre_tokenizers.Digits(individual_digits=True), decoders.Fuse),
    "split": (lambda: pre_tokenizers.Split(Regex(r"\s"), "merged_with_next"), decoders.Fuse),
    "scripts": (pre_tokenizers.UnicodeScripts, decoders.Fuse),
    "delimiter": (lambda: pre_tokenizers.CharDelimiterSplit(" "), None),
    "fixed length": (lambda: pre_tokenizers.FixedLength(length=3), decoders.Fuse),
    "sequence": (_sequence, decoders.ByteLevel),
    "none": (None, decoders.Fuse),
}
MODELS = ("bpe", "bpe with bytes", "unigram", "wordpiece", "wordlevel")
# name -> (function that makes a post-processor or None, tokens before a text, tokens after a text)
AROUND = {
    "nothing": (None, [], []),
    "bos": (lambda: _template(f"{BOS} $A"), [BOS], []),
    "eos": (lambda: _template(f"$A {EOS}"), [], [EOS]),
    "both": (lambda: _template(f"{BOS} $A {EOS}"), [BOS], [EOS]),
    "roberta": (lambda: processors.RobertaProcessing((EOS, IDS[EOS]), (BOS, IDS[BOS])), [BOS], [EOS]),
    "bert": (lambda: processors.BertProcessing((SEP, IDS[SEP]), (CLS, IDS[CLS])), [CLS], [SEP]),
    "llama 3": (
        lambda: processors.Sequence([processors.ByteLevel(trim_offsets=True), _template(f"{BOS} $A")]),
        [BOS],
        [],
    ),
}


def _template(single):
    return processors.TemplateProcessing(single=single, special_tokens=[(token, IDS[token]) for token in SPECIAL])


def _untrained(model):
    if model == "bpe":
        return models.BPE(unk_token=UNK), trainers.BpeTrainer(
            vocab_size=500, special_tokens=SPECIAL, initial_alphabet=LETTERS, show_progress=False
        )
    if model == "unigram":
        return models.Unigram(), trainers.UnigramTrainer(
            vocab_size=500, special_tokens=SPECIAL, initial_alphabet=LETTERS, unk_token=UNK, show_progress=False
        )
    if model == "wordpiece":
        return models.WordPiece(unk_token=UNK), trainers.WordPieceTrainer(
            vocab_size=500, special_tokens=SPECIAL, initial_alphabet=LETTERS, show_progress=False
        )
    return models.WordLevel(unk_token=UNK), trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)


@cache
def backend(model: str, pre_tokenizer: str, lower: bool = False) -> str:
    """Trains a tokenizer without a post-processor, and returns it as JSON. Args: model: one of MODELS; pre_tokenizer: a
    key of PRE_TOKENIZERS; lower: True normalizes texts to lower case."""
    split, decoder = PRE_TOKENIZERS[pre_tokenizer]
    of_bytes = model == "bpe with bytes"
    untrained, trainer = _untrained("bpe" if of_bytes else model)
    made = Tokenizer(untrained)
    if split:
        made.pre_tokenizer = split()
    if lower:
        made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    if of_bytes:
        trainer.special_tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer.vocab_size, trainer.initial_alphabet = 700, []
    made.train_from_iterator(CORPUS, trainer)
    if of_bytes:
        made.model.byte_fallback = True
    joined = decoder() if decoder else decoders.Fuse() if of_bytes else None
    made.decoder = decoders.Sequence([decoders.ByteFallback(), joined]) if of_bytes else joined
    if model == "wordpiece" and joined is None:
        made.decoder = decoders.WordPiece()
    return made.to_str()


def tokenizer(model: str, pre_tokenizer: str, around: str = "nothing", lower: bool = False, **names):
    made = Tokenizer.from_str(backend(model, pre_tokenizer, lower))
    if (post_processor := AROUND[around][0]) is not None:
        made.post_processor = post_processor()
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": UNK} | names
    return PreTrainedTokenizerFast(tokenizer_object=made, **{name: token for name, token in named.items() if token})
