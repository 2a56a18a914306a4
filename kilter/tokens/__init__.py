"""Text and tokens: the tokenizer, chat templates, incremental detokenizer."""

from kilter.tokens.detokenizer import Detokenizer, StopChecker
from kilter.tokens.template import ChatTemplate, TemplateError
from kilter.tokens.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopChecker", "TemplateError", "Tokenizer"]
