"""What a job says about its data. Every value is checked where it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, get_args

from kilter.job import FilePath

FileFormat = Literal["auto", "text", "jsonl", "json", "parquet"]
Shape = Literal["auto", "messages", "completion", "instruction"]
LongDocuments = Literal["split", "truncate", "drop"]
Turns = Literal["all", "last"]

SUFFIXES = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".ndjson": "jsonl",
            ".json": "json", ".parquet": "parquet"}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True)
class SourceConfig:
    """Some files of one kind.

    paths: files or globs (`**` included). Files are taken in the order of the list; those of one
        glob by name.
    format: "auto" goes by the suffix: .txt .md (text), .jsonl .ndjson (one JSON object per line),
        .json (an array of objects, or lines), .parquet. All but Parquet may be compressed: a
        further .gz, .bz2, .xz or .zst.
    chat: records are conversations instead of text.
    pairs: records are pairs of answers, one better than the other (`kilter.train.data.pairs`).
    field: where in a record the text or the messages are; by default "text", or what `shape` says.
    shape: how a record spells a conversation (`kilter.train.data.shapes`); "auto" goes by the
        fields that it has.
    separator: what stands between the documents of a text file, "\\n\\n" for instance; "" takes a
        whole file as one document. A line feed in it stands for CRLF too.
    weight: how often an epoch goes through the source: 2 takes every document twice, 0.25 a
        quarter of the documents, the next quarter in the next epoch.
    """

    paths: tuple[str, ...]
    format: FileFormat = "auto"
    chat: bool = False
    pairs: bool = False
    field: str = ""
    shape: Shape = "auto"
    separator: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        paths = (self.paths,) if isinstance(self.paths, str) else tuple(self.paths)
        object.__setattr__(self, "paths", paths)
        if not paths or not all(paths):
            raise ValueError("A data source needs paths: at least one file or glob, none empty.")
        _check_choice("format of a data source", self.format, FileFormat)
        _check_choice("shape of a data source", self.shape, Shape)
        if not 0 < self.weight <= 1000:
            raise ValueError(f"The weight of the source {paths[0]} is {self.weight}; it says how "
                             "often an epoch goes through it and must be above 0 and at most 1000.")
        formats = {self.format_of(path) for path in paths}
        if self.separator and formats != {"text"}:
            raise ValueError(f"The separator of the source {paths[0]} is for text files, but it "
                             f"has {' and '.join(sorted(formats))} files. Remove the separator.")
        if self.pairs and (self.chat or self.field):
            raise ValueError(f"The source {paths[0]} has pairs, which are conversations in fields "
                             f"of fixed names. Remove {'chat' if self.chat else 'field'}.")
        for name, what in (("chat", "conversations"), ("pairs", "pairs"), ("field", "fields")):
            if getattr(self, name) and "text" in formats:
                raise ValueError(f"The source {paths[0]} has plain text files, which have no "
                                 f"{what}. Give JSONL or Parquet files, or remove {name}.")
        if self.shape != "auto" and not self.chat:
            raise ValueError(f"The shape of the source {paths[0]} is {self.shape!r}, which is one "
                             "of conversations, but chat is false. Set chat to true.")
        if self.field and self.shape not in ("auto", "messages"):
            raise ValueError(f"The source {paths[0]} has a field, but the shape {self.shape!r} has "
                             "fields of fixed names. Remove one of the two.")

    def format_of(self, path: str) -> str:
        """The format of a file. Raises ValueError where its suffix does not tell."""
        suffixes = [suffix.lower() for suffix in PurePath(path).suffixes]
        compressed = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED else None
        found: str = self.format
        if found == "auto":
            suffix = suffixes[-1] if suffixes else ""
            if suffix not in SUFFIXES:
                raise ValueError(f"The suffix of {path} does not tell its format; known are "
                                 f"{', '.join(SUFFIXES)}, and {', '.join(COMPRESSED)} after them. "
                                 "Set the source's format to text, jsonl, json or parquet.")
            found = SUFFIXES[suffix]
        if found == "parquet" and compressed:
            raise ValueError(f"{path} is a compressed Parquet file, which cannot be read as it is. "
                             "Parquet is compressed inside; decompress the file around it.")
        return found


@dataclass(frozen=True)
class ChatConfig:
    """How conversations become tokens and which of them are targets.

    turns: "all" trains on every assistant turn, "last" on the last one. A template that rewrites
        earlier turns when later ones come (dropping their reasoning, say) allows only "last".
    template: a jinja file to use instead of the tokenizer's own template.
    variables: what the template may also read (`enable_thinking`).
    """

    turns: Turns = "all"
    template: FilePath | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_choice("turns of the chat settings", self.turns, Turns)


@dataclass(frozen=True)
class DataConfig:
    """The data of a run. Tokens are kept in a cache on disk; sources that do not fit on it are
    out of scope.

    seq_len: tokens in a micro-batch, and so the longest sequence.
    packing: several documents in a micro-batch, as many as fit. Otherwise one.
    lookahead: documents that packing chooses from.
    long_documents: a document longer than seq_len is split into pieces (each a sequence of its
        own; no token is lost), truncated to its first seq_len tokens, or dropped. Pairs, both sides
        together, can only be dropped.
    shuffle: a new order in every epoch, determined by the seed.
    bos, eos: a BOS before and an EOS after each text document; bos None does what the tokenizer
        does. A chat template writes its own.
    eval_fraction: this share of the documents is held out. The choice goes by what a document
        says, so two copies of it never are on both sides.
    eval_sources: held-out documents with files of their own.
    """

    sources: tuple[SourceConfig, ...]
    seq_len: int
    packing: bool = True
    lookahead: int = 256
    long_documents: LongDocuments = "split"
    shuffle: bool = True
    seed: int = 0
    bos: bool | None = None
    eos: bool = True
    eval_fraction: float = 0.0
    eval_sources: tuple[SourceConfig, ...] = ()
    chat: ChatConfig = field(default_factory=ChatConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(self.sources))
        object.__setattr__(self, "eval_sources", tuple(self.eval_sources))
        if not self.sources:
            raise ValueError("The data has no sources. Name at least one with its paths.")
        for name, least in (("seq_len", 2), ("lookahead", 1), ("seed", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"The data's {name} is {value}; it must be at least {least}.")
        if not self.packing and self.lookahead != type(self).lookahead:
            raise ValueError(f"The data's lookahead is {self.lookahead}, which only packing uses. "
                             "Leave it out, or set packing to true.")
        _check_choice("long_documents", self.long_documents, LongDocuments)
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"The data's eval_fraction is {self.eval_fraction}; it must be at "
                             "least 0 and below 1.")
        if self.eval_fraction and self.eval_sources:
            raise ValueError("The data has both an eval_fraction and eval_sources. Keep one: hold "
                             "out a share of the documents, or name files for it.")
        pairs = [source for source in (*self.sources, *self.eval_sources) if source.pairs]
        if pairs and self.long_documents != "drop":
            raise ValueError(f"The data's long_documents is {self.long_documents!r}, but a pair "
                             "that is cut is no comparison any more. Set it to \"drop\".")
        if any(source.weight != 1 for source in self.eval_sources):
            raise ValueError("An evaluation source has a weight, but evaluation reads each "
                             "document once. Remove the weight.")


def _check_choice(what: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"The {what} is {value!r}; it must be one of "
                         f"{', '.join(map(repr, get_args(choices)))}.")
