"""The tokenizer: text to tokens, tokens to bytes and text, chats to prompts.

A thin face over the `tokenizers` library that adds what serving needs: exact bytes per token, the
list of all end tokens, chat templates, and text whose special tokens are not to be believed.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from kilter.tokens.detokenizer import Detokenizer
from kilter.tokens.gguf import read_gguf_tokenizer
from kilter.tokens.pieces import PieceDecoder
from kilter.tokens.template import ChatTemplate

_SPECIAL_NAMES = tuple(f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class Tokenizer:
    """Text, tokens and chats of one model.

    backend: the pipeline of the `tokenizers` library.
    config: the contents of tokenizer_config.json; names the special tokens.
    eos_token_ids: every token that ends a generation.
    templates: jinja chat templates by name; the main one is "default".

    Raises ValueError if the tokens do not map to bytes or a special token is not in the vocabulary.
    """

    def __init__(
        self,
        backend: Backend,
        config: Mapping[str, Any],
        eos_token_ids: Sequence[int] = (),
        templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._config = dict(config)
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else None
        self._pieces = PieceDecoder.from_json(decoder)
        self.special_tokens = {
            name: text
            for name in _SPECIAL_NAMES
            if (text := _text_of(config.get(name))) is not None
        }
        self._check_special_tokens()
        self.bos_token_id: int | None = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        self.eos_token_ids = list(
            dict.fromkeys([*([] if eos is None else [eos]), *map(int, eos_token_ids)])
        )
        self.special_ids = frozenset(
            token_id
            for token_id, added in backend.get_added_tokens_decoder().items()
            if added.special
        )
        highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size = highest + 1
        self._bytes: dict[int, bytes] = {}
        self._templates = dict(templates or {})
        self._compiled: dict[str, ChatTemplate] = {}

    # ---- where it comes from and goes ----

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read tokenizer.json and, where present, tokenizer_config.json, special_tokens_map.json,
        generation_config.json and chat templates, as `transformers` would.

        Raises ValueError if tokenizer.json is missing or damaged.
        """
        folder = Path(path)
        source = folder / "tokenizer.json"
        if not source.is_file():
            raise ValueError(
                f"The folder {folder} has no tokenizer.json. If it holds a tokenizer of another "
                "kind (tokenizer.model), load and save it once with transformers' AutoTokenizer."
            )
        try:
            backend = Backend.from_str(source.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{source} is not a readable tokenizer.json: {error}.") from error
        config = {
            **_read_json(folder / "special_tokens_map.json"),
            **_read_json(folder / "tokenizer_config.json"),
        }
        templates = _templates_of(config.pop("chat_template", None))
        if (main := folder / "chat_template.jinja").is_file():
            templates["default"] = main.read_text(encoding="utf-8")
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            templates[extra.stem] = extra.read_text(encoding="utf-8")
        _add_tokens_of_config(backend, config)
        eos = _read_json(folder / "generation_config.json").get("eos_token_id")
        ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
        return cls(backend, config, ends, templates)

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Rebuild the tokenizer that a GGUF file describes.

        Raises ValueError for a tokenizer or pre-tokenizer that is not supported.
        """
        found = read_gguf_tokenizer(metadata)
        config: dict[str, Any] = {
            # The class that takes tokenizer.json as it is.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **found.special,
        }
        if found.context_length is not None:
            config["model_max_length"] = found.context_length
        return cls(found.backend, config, found.eos_token_ids, found.templates)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat templates, as `transformers`
        reads them. End tokens beyond the first go into generation_config.json if there is none.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        _write(target / "tokenizer_config.json", _dump(self._config))
        for name, source in self._templates.items():
            if name == "default":
                _write(target / "chat_template.jinja", source)
            else:
                (target / "additional_chat_templates").mkdir(exist_ok=True)
                _write(target / "additional_chat_templates" / f"{name}.jinja", source)
        generation = target / "generation_config.json"
        if len(self.eos_token_ids) > 1 and not generation.exists():
            _write(generation, _dump({"eos_token_id": self.eos_token_ids}))
        # Last: who finds a tokenizer in the folder then finds all of it.
        _write(target / "tokenizer.json", self._backend.to_str())

    # ---- text ----

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text.

        add_special_tokens: put BOS (and EOS) around it where the model asks for them.
        parse_special: whether "<|im_end|>" in the text is the special token. False takes it as
            plain text: right for text from strangers.

        Raises ValueError if the text holds a lone surrogate, which no encoding of text can carry.
        """
        backend = self._backend if parse_special else self._literal_backend
        _check_well_formed(text)
        # A batch of one: unlike `encode`, it lets other threads run meanwhile.
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_batch(self, texts: Sequence[str], parse_special: bool = True) -> list[list[int]]:
        """As `encode`, of many texts at once on all cores, without added special tokens."""
        backend = self._backend if parse_special else self._literal_backend
        for text in texts:
            _check_well_formed(text)
        found = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def encode_batch_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Of each text its token ids without added special tokens, and the characters [begin, end)
        that each of them stands for, white space included. Raises as `encode`."""
        for text in texts:
            _check_well_formed(text)
        found = self._untrimmed_backend.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in found]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the tokens; invalid UTF-8 becomes U+FFFD, one per maximal invalid part."""
        stream = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        pieces = [stream.push(token_id) for token_id in ids]
        return "".join(pieces) + stream.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds to a text; b"" for an id beyond the vocabulary, which
        the padded output layer of a model may give.

        Raises ValueError for a negative id.
        """
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        if token_id < 0:
            raise ValueError(f"A token id cannot be negative, but one is {token_id}.")
        piece = self._backend.id_to_token(token_id) if token_id < self.vocab_size else None
        if piece is None:
            return b""
        return self._bytes.setdefault(token_id, self._pieces.bytes_of(piece))

    @property
    def strips_first_space(self) -> bool:
        """Whether one space at the start of a text is an artefact of the encoding."""
        return self._pieces.strips_first_space

    @cached_property
    def _literal_backend(self) -> Backend:
        """A second pipeline that sees special tokens as text; a flag on the one would not be safe
        between threads."""
        literal = Backend.from_str(self._backend.to_str())
        literal.encode_special_tokens = True
        return literal

    @cached_property
    def _untrimmed_backend(self) -> Backend:
        """A pipeline without the post-processor, which in some models takes white space out of
        offsets, so that a token of a line feed would stand for no character."""
        pipeline = json.loads(self._backend.to_str())
        return Backend.from_str(json.dumps({**pipeline, "post_processor": None}))

    # ---- chats ----

    @property
    def has_chat_template(self) -> bool:
        return "default" in self._templates

    def chat_template(self, tools: Sequence[Any] | None = None) -> ChatTemplate:
        """The template for a chat: the one named "tool_use" for tools where there is one.

        Raises ValueError if the model has none, TemplateError if it is not valid.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ValueError(
                "This model has no chat template, so it cannot be given messages. Use plain text "
                "prompts (it may be a base model), or put the template of its instruction-tuned "
                "version beside its tokenizer.json as chat_template.jinja."
            )
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self._templates[name], self.special_tokens)
        return self._compiled[name]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as the text that the model was tuned on; see `ChatTemplate.render`."""
        template = self.chat_template(tools)
        return template.render(messages, tools, add_generation_prompt, **variables)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation. The template writes BOS itself where the model wants one,
        so none is added."""
        text = self.apply_chat_template(messages, tools, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    # ---- helpers ----

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _check_special_tokens(self) -> None:
        unknown = [
            f"{name} {text!r}"
            for name, text in self.special_tokens.items()
            if self._backend.token_to_id(text) is None
        ]
        if unknown:
            raise ValueError(
                f"The tokenizer's vocabulary lacks {', '.join(unknown)}, which its configuration "
                "names. Correct tokenizer_config.json or take the matching tokenizer.json."
            )


def _add_tokens_of_config(backend: Backend, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json lists. (Its add_bos_token does not count where there
    is a tokenizer.json, whose post-processor says what is added.)"""
    present = {added.content for added in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder", {})
    added = [
        AddedToken(
            entry["content"],
            single_word=entry.get("single_word", False),
            lstrip=entry.get("lstrip", False),
            rstrip=entry.get("rstrip", False),
            normalized=entry.get("normalized", True),
            special=entry.get("special", False),
        )
        for _, entry in sorted(listed.items(), key=lambda item: int(item[0]))
        if entry["content"] not in present
    ]
    backend.add_tokens([token for token in added if not token.special])
    present.update(token.content for token in added)
    named = [_text_of(config.get(name)) for name in _SPECIAL_NAMES]
    added += [AddedToken(text, special=True) for text in named if text and text not in present]
    backend.add_special_tokens([token for token in added if token.special])


def _text_of(token: Any) -> str | None:
    """A special token is written as text or as an object with its content."""
    return token.get("content") if isinstance(token, Mapping) else token


def _templates_of(entry: Any) -> dict[str, str]:
    """The chat_template of tokenizer_config.json: one text or a list of named ones."""
    if isinstance(entry, str):
        return {"default": entry}
    return {item["name"]: item["template"] for item in entry or ()}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return content


def _dump(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _check_well_formed(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The text holds a lone surrogate, {text[error.start]!r}, at position {error.start}. "
            f"Send well-formed Unicode."
        ) from error
