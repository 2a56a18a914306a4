"""Texts for property tests: everything that has broken a tokenizer before."""

from __future__ import annotations

from hypothesis import strategies as st

PIECES = [
    *("the", "fox", " over", "They're", "DON'T", "HTTPServer", "a", "aa", "b"),
    *("1", "12", "2024", "3.14", "½", "٣", "Ⅷ"),
    *(" ", "  ", "   ", " " * 9, "\n", "\n\n", "\n" * 7, "\r\n", "\t", "\t\t", "\u00a0", "\u3000"),
    *("é", "e\u0301", "ñ", "你好", "世界", "こ", "안", "привет", "ﷺ", "İ"),
    *(
        "🙂",
        "👩‍👩‍👧",
        "\u200d",
        "\ufe0f",
        "▁",
        "▁▁",
        "Ġ",
        "\x00",
        "\x01",
        "\x7f",
        "\ufffd",
        "\uffff",
    ),
    *("<|im_end|>", "<|im_start|>", "<think>", "<table>", "<s>", "</s>", "<0x0A>", "[INST]"),
    *(".", "!?", "…", "'s", "_", "{}", "€"),
]

texts = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
