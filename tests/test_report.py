"""The text that verbs and benchmarks share."""

from __future__ import annotations

import pytest

from kilter.report.machine import memory_bytes, usable_cpus
from kilter.report.progress import progress
from kilter.report.text import short, size, table


@pytest.mark.parametrize(("nbytes", "text"), [
    (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (98_362_432, "93.8 MiB"),
    (671 * 10**9, "624.9 GiB"), (2**60, "1024.0 PiB")])
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(("number", "text"), [
    (0, "0"), (999, "999"), (1000, "1.00 k"), (134_515_008, "135 M"), (7_615_616_512, "7.62 G"),
    (999_499, "999 k"), (999_500, "1.00 M"), (99_949, "99.9 k"), (99_950, "100 k"),
    (9_995, "10.0 k"), (10**21, "1000 E")])
def test_counts(number: int, text: str) -> None:
    assert short(number) == text


def test_tables_are_aligned() -> None:
    assert table([("a", "x", "1"), ("bbb", "yy", "22")], header=("name", "", "n"), left=2) == (
        "  name       n\n"
        "  a     x    1\n"
        "  bbb   yy  22")
    assert table([]) == ""
    with pytest.raises(ValueError):
        table([("a", "b"), ("c",)])


def test_no_bar_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("Working") as update:
        update(1, 2)
        update(2, 2, "Ending")
    assert capsys.readouterr() == ("", "")


def test_the_machine_has_something() -> None:
    installed, free = memory_bytes()
    assert installed > 2**28 and 0 <= free <= installed and usable_cpus() >= 1
