"""The tokenizer of a GGUF file, rebuilt for the `tokenizers` library.

A GGUF header lists the vocabulary, the kind of every token, and either merges (model "gpt2":
byte-level BPE, with the name of a pre-tokenizer) or scores (model "llama": sentencepiece BPE, from
which the merges are recovered). The pipelines below are those of the models' own tokenizer.json,
which are the reference where they and llama.cpp differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_SPACE = "▁"

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Pre:
    """How text is cut before the merges.

    split: a regular expression; None for the one that GPT-2's byte level has built in.
    digits: first cut every digit off on its own.
    whole_words: a word that is a vocabulary entry is taken without merging.
    adds_bos: what holds when the file does not say.
    """

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_PRE: dict[str, _Pre] = {
    "default": _Pre(),
    "gpt-2": _Pre(),
    "smollm": _Pre(digits=True),
    "starcoder": _Pre(digits=True),
    "llama-bpe": _Pre(_LLAMA3, whole_words=True, adds_bos=True),
    "llama3": _Pre(_LLAMA3, whole_words=True, adds_bos=True),
    "llama-v3": _Pre(_LLAMA3, whole_words=True, adds_bos=True),
    "qwen2": _Pre(_QWEN2, nfc=True),
    "tekken": _Pre(_TEKKEN, whole_words=True, adds_bos=True),
}

_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# How chat models end a turn. A file names one EOS; these count too where its template writes them.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")


@dataclass(frozen=True)
class GGUFTokenizer:
    """What a GGUF header says about text.

    special: "bos_token", "eos_token", "unk_token", "pad_token" -> text, where the file names them.
    templates: chat templates by name; the main one is "default".
    """

    backend: Tokenizer
    special: dict[str, str]
    eos_token_ids: list[int]
    templates: dict[str, str]
    context_length: int | None


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """Build the tokenizer from a GGUF file's metadata.

    Raises ValueError for metadata without a tokenizer, with an unknown model or pre-tokenizer, or
    with lists that do not fit each other.
    """
    header = _Header.read(metadata)
    backend = _byte_level(header) if header.model == "gpt2" else _sentencepiece(header)
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t in header.of(_CONTROL, _UNKNOWN)]
    )
    backend.add_tokens([AddedToken(t, normalized=False) for t in header.of(_USER_DEFINED)])

    special = {
        f"{name}_token": header.tokens[token_id]
        for name, key in _NAMED.items()
        if (token_id := header.token_id(f"{key}_token_id")) is not None
    }
    _add_post_processor(backend, header, special)

    prefix = "tokenizer.chat_template"
    templates = {
        key[len(prefix) + 1 :]: metadata[key] for key in metadata if key.startswith(prefix)
    }
    templates = {name or "default": text for name, text in templates.items() if text}
    architecture = metadata.get("general.architecture")
    context = metadata.get(f"{architecture}.context_length")
    return GGUFTokenizer(
        backend,
        special,
        header.eos_token_ids("".join(templates.values())),
        templates,
        None if context is None else int(context),
    )


@dataclass(frozen=True)
class _Header:
    metadata: Mapping[str, Any]
    model: str
    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> _Header:
        model = metadata.get("tokenizer.ggml.model")
        if model not in ("gpt2", "llama"):
            raise ValueError(
                f"tokenizer.ggml.model is {model!r}; supported are 'gpt2' (byte-level BPE) and "
                "'llama' (sentencepiece BPE). Convert the model from its original folder instead."
            )
        tokens = [str(token) for token in metadata.get("tokenizer.ggml.tokens", ())]
        types = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())]
        types = types or [_NORMAL] * len(tokens)
        if model == "llama":
            # Writers of GGUF spell spaces in user-defined tokens as spaces.
            tokens = [
                token.replace(" ", _SPACE) if kind == _USER_DEFINED else token
                for token, kind in zip(tokens, types, strict=False)
            ]
        if not tokens or len(types) != len(tokens):
            raise ValueError(
                f"The GGUF metadata has {len(tokens)} tokenizer.ggml.tokens and {len(types)} "
                "tokenizer.ggml.token_type; both lists must have one entry per token. The file is "
                "incomplete: fetch it again."
            )
        if len(set(tokens)) != len(tokens):
            seen: set[str] = set()
            twice = [token for token in tokens if token in seen or seen.add(token)]  # type: ignore[func-returns-value]
            raise ValueError(
                f"{len(twice)} tokens stand in tokenizer.ggml.tokens more than once, such as "
                f"{twice[:3]!r}, so their ids are ambiguous. Convert the model again."
            )
        return cls(metadata, model, tokens, types)

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def of(self, *kinds: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in kinds]

    def token_id(self, key: str) -> int | None:
        token_id = self.get(key)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise ValueError(
                f"tokenizer.ggml.{key} is {token_id}, but the vocabulary has {len(self.tokens)} "
                "tokens. The file is damaged: fetch it again."
            )
        return None if token_id is None else int(token_id)

    def merges(self) -> list[tuple[str, str]]:
        pairs = [merge.partition(" ") for merge in self.get("merges", ())]
        return [(left, right) for left, _, right in pairs]

    def eos_token_ids(self, template_text: str) -> list[int]:
        ids = [self.token_id(f"{name}_token_id") for name in ("eos", "eot", "eom")]
        control = set(self.of(_CONTROL))
        ends = [end for end in _TURN_ENDS if end in control and end in template_text]
        ids += [self.tokens.index(end) for end in ends]
        return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))

    def pre(self) -> _Pre:
        name = self.get("pre", "default")
        if name not in _PRE:
            raise ValueError(
                f"The pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; supported are "
                f"{', '.join(sorted(_PRE))}. Take the tokenizer.json of the original model."
            )
        return _PRE[name]


def _byte_level(header: _Header) -> Tokenizer:
    pre = header.pre()
    merges = header.merges()
    if not merges:
        raise ValueError("The GGUF metadata has no tokenizer.ggml.merges, which 'gpt2' needs.")
    backend = _bpe(header, merges, ignore_merges=pre.whole_words)
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(header: _Header) -> Tokenizer:
    if header.get("remove_extra_whitespaces", False):
        raise ValueError(
            "tokenizer.ggml.remove_extra_whitespaces is set, which is not supported. Take the "
            "tokenizer.json of the original model."
        )
    unknown = header.token_id("unknown_token_id")
    backend = _bpe(
        header,
        header.merges() or _merges_from_scores(header),
        unk_token=None if unknown is None else header.tokens[unknown],
        fuse_unk=True,
        byte_fallback=_BYTE in header.types,
    )
    prefixed = bool(header.get("add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _bpe(header: _Header, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(header.tokens)}
    try:
        return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"The merges of the GGUF file do not fit its tokens: {error}. Convert the model again."
        ) from error


def _merges_from_scores(header: _Header) -> list[tuple[str, str]]:
    """The merges of a sentencepiece BPE model: every way to make a token of two others.

    Sentencepiece merges the neighbours whose union has the best score, so a merge ranks as its
    result does. User-defined tokens come first: sentencepiece takes them out before any merge.
    Equal scores rank by id (longest left part first), as in the tokenizer.json of such models.
    """
    scores = [float(score) for score in header.get("scores", ())]
    if len(scores) != len(header.tokens):
        raise ValueError(
            f"The GGUF metadata has {len(scores)} tokenizer.ggml.scores for {len(header.tokens)} "
            "tokens. The file is incomplete: fetch it again."
        )
    parts = {
        token
        for token, kind in zip(header.tokens, header.types, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    user_defined = set(header.of(_USER_DEFINED))
    order = sorted(
        (token not in user_defined, 0.0 if token in user_defined else -score, token_id)
        for token_id, (token, score) in enumerate(zip(header.tokens, scores, strict=True))
        if token in parts
    )
    return [
        (token[:cut], token[cut:])
        for token in (header.tokens[token_id] for _, _, token_id in order)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in parts and token[cut:] in parts
    ]


def _add_post_processor(backend: Tokenizer, header: _Header, special: Mapping[str, str]) -> None:
    adds_bos = header.pre().adds_bos if header.model == "gpt2" else True
    wanted = {
        "bos": bool(header.get("add_bos_token", adds_bos)),
        "eos": bool(header.get("add_eos_token", False)),
    }
    missing = [name for name, add in wanted.items() if add and f"{name}_token" not in special]
    if missing:
        raise ValueError(
            f"The GGUF metadata asks to add {' and '.join(missing)} tokens to every text, but "
            f"names none (tokenizer.ggml.{missing[0]}_token_id)."
        )
    bos = [special["bos_token"]] if wanted["bos"] else []
    eos = [special["eos_token"]] if wanted["eos"] else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", "$B:1", *eos],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*bos, *eos}],
    )
