"""Job files: what is read comes back, and everything wrong is said at once, by its dotted name."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.job import FilePath, JobError, build, dump, read_job


@dataclass(frozen=True)
class Part:
    size: int
    rate: float = 0.5
    name: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size is {self.size} but cannot be negative.")


@dataclass(frozen=True)
class Whole:
    title: str
    part: Part = field(default_factory=lambda: Part(1))
    parts: tuple[Part, ...] = ()
    pair: tuple[int, int] | None = None
    flag: bool = False
    either: str | Mapping[str, Any] | None = None
    place: Path | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Named:
    output: FilePath
    start: FilePath | None = None
    says: str = ""
    more: FilePath | Mapping[str, Any] | None = None


def test_a_file_with_tables_and_lists_of_tables(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('title = "x"\nflag = true\npair = [1, 2]\nplace = "a/b"\n[part]\nsize = 3\n'
                    'rate = 1\n[[parts]]\nsize = 4\n[[parts]]\nsize = 5\nname = "b"\n'
                    '[either]\na = { b = 1 }\n')
    assert read_job(Whole, path) == Whole(
        "x", Part(3, 1.0), (Part(4), Part(5, name="b")), (1, 2), True, {"a": {"b": 1}},
        Path("a/b"))


@pytest.mark.parametrize(("override", "expected"), [
    ("part.size=7", Whole("x", Part(7))),
    ("part.rate=1e-4", Whole("x", Part(1, 1e-4))),
    ("title=words without quotes", Whole("words without quotes")),
    ('title="with quotes"', Whole("with quotes")),
    ("pair=[3, 4]", Whole("x", pair=(3, 4))),
    ("flag=true", Whole("x", flag=True)),
    ("parts.0.size=9", Whole("x", parts=(Part(9),))),
    ("title = spaced ", Whole("spaced")),
    ("title=a=b", Whole("a=b")),
    ("pair.1=5", Whole("x", pair=(1, 5))),
    ("parts.0={ size = 3 }", Whole("x", parts=(Part(3),))),
    ("title=2026-11-30", Whole("2026-11-30")),
    ("title=07:30:00", Whole("07:30:00")),
])
def test_overrides(override: str, expected: Whole, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('title = "x"\npart = { size = 1 }\n'
                    + ("pair = [1, 2]\n" if override.startswith("pair.") else "")
                    + ("parts = [{ size = 2 }]\n" if override.startswith("parts") else ""))
    assert read_job(Whole, path, [override]) == expected


@pytest.mark.parametrize(("table", "words"), [
    ({}, "title is missing."),
    ({"title": "x", "titel": 1}, "titel is not a setting; did you mean title?"),
    ({"title": "x", "part": {"size": 1, "zzz": 2}}, "part.zzz is not a setting; there are size"),
    ({"title": 1}, "title is 1 but must be text."),
    ({"title": datetime.date(2026, 11, 30)}, "title is 2026-11-30 but must be text."),
    ({"title": "x", "part": {"size": True}}, "part.size is true but must be a whole number."),
    ({"title": "x", "part": {"size": 1.5}}, "part.size is 1.5 but must be a whole number."),
    ({"title": "x", "part": {"size": -1}}, "part: size is -1 but cannot be negative."),
    ({"title": "x", "part": {"size": 1, "rate": math.nan}}, "rate is nan but must be a finite"),
    ({"title": "x", "part": {"size": 1, "rate": -math.inf}}, "rate is -inf but must be a finite"),
    ({"title": "x", "part": {"size": 1, "rate": 10 ** 400}}, "but must be a finite number."),
    ({"title": "x", "names": "a"}, """names is 'a' but must be a list (text each), as in ["a"]."""),
    ({"title": "x", "part": 3}, "part is 3 but must be a table of settings."),
    ({"title": "x", "part": {"size": 1, "name": "c"}}, "part.name is 'c' but must be one of a, b."),
    ({"title": "x", "parts": [{"size": 1}, {"size": "y"}]},
     "parts.1.size is 'y' but must be a whole number."),
    ({"title": "x", "pair": [1]}, "pair is [1] but must be a list of 2."),
    ({"title": "x", "flag": 1}, "flag is 1 but must be true or false."),
    ({"title": "x", "either": 3}, "either is 3 but must be text or a table"),
])
def test_mistakes(table: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as error:
        build(Whole, table)
    assert words in str(error.value)


def test_all_mistakes_at_once() -> None:
    with pytest.raises(JobError) as error:
        build(Whole, {"flag": "yes", "part": {"rate": "fast"}}, "the file")
    assert str(error.value).startswith("The file cannot be used: ")
    for words in ("title is missing", "flag is 'yes'", "part.size is missing", "part.rate is"):
        assert words in str(error.value)


@pytest.mark.parametrize(("override", "words"), [
    ("title", "must have the form dotted.key=value"), ("=3", "must have the form"),
    ("a..b=3", "must have the form"), ("title.x=3", "reaches into title, which is not a table"),
    ("parts.size=3", "reaches into a list of 1, which has no size; count from 0, as in parts.0.s"),
    ("parts.1.size=3", "has no 1; count from 0, as in parts.0.size."),
    ("parts.-1=3", "has no -1; count from 0, as in parts.0."),
    ("names.0=x", "reaches into a list of 0, which has no 0."),
    ("names=[a]", r"is not valid TOML: .* put single quotes around the whole setting."),
    ("part.zz=3", "part.zz is not a setting"),
])
def test_bad_overrides(override: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('title = "x"\nparts = [{ size = 2 }]\nnames = []\n[part]\nsize = 1\n')
    with pytest.raises(JobError, match=words):
        read_job(Whole, path, [override])


def test_a_job_for_another_command(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('title = "x"\nturns = 3\n')
    elsewhere = {"kilter dance": ("turns", "music"), "kilter sing": ("key",)}
    with pytest.raises(JobError, match="has turns, which only a job for `kilter dance` has; give"):
        read_job(Whole, path, elsewhere=elsewhere)
    with pytest.raises(JobError, match=r"has turns, music, which .* leave them out"):
        read_job(Whole, path, ["music=1"], elsewhere)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('title = "x"\n', encoding="utf-8-sig")
    assert read_job(Whole, tmp_path / "job.toml") == Whole("x")


def test_the_home_folder_in_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell gives ``output=~/runs`` on as it is."""
    monkeypatch.setenv("HOME", "/somebody")
    made = build(Named, {"output": "~/runs/a", "start": "~/b", "says": "~/c", "more": {"k": 1}})
    assert made == Named("/somebody/runs/a", "/somebody/b", "~/c", {"k": 1})
    assert build(Named, {"output": "a~/~"}) == Named("a~/~")
    with pytest.raises(JobError, match="output is 3 but must be text"):
        build(Named, {"output": 3})


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="There is no job file"):
        read_job(Whole, tmp_path / "none.toml")
    for content in (b"title = ", b"\xff\xfe"):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(JobError, match="is not valid TOML"):
            read_job(Whole, tmp_path / "bad.toml")


@given(st.builds(
    Whole, st.text(), st.builds(Part, st.integers(0, 9)),
    st.lists(st.builds(Part, st.integers(0, 9), st.floats(0, 1)), max_size=3).map(tuple),
    st.none() | st.tuples(st.integers(), st.integers()), st.booleans(),
    st.none() | st.text() | st.dictionaries(st.text(), st.integers()), st.none()))
def test_dump_is_read_back(job: Whole) -> None:
    assert build(Whole, dump(job)) == job
